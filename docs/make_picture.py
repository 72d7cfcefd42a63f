"""Draw docs/digits.png from the run of `make demo`; needs matplotlib and tensorboard.

    python docs/make_picture.py build/digits/output
"""

import io
import json
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

run = Path(sys.argv[1])
rows = [json.loads(line) for line in (run / "metrics.json").read_text().splitlines()]
events = EventAccumulator(str(run), size_guidance={"images": 0})
events.Reload()

figure, (losses, confusion, sheet) = plt.subplots(1, 3, figsize=(11, 3.2), dpi=110)
for name in ("total_loss", "digits_test/accuracy"):
    points = [(row["iteration"], row[name]) for row in rows if name in row]
    losses.plot(*zip(*points), marker="o" if "accuracy" in name else "", label=name)
losses.set_xlabel("iteration")
losses.legend(frameon=False)
losses.spines[["top", "right"]].set_visible(False)
for axes, tag in ((confusion, "confusion"), (sheet, "misclassified")):
    image = events.Images(f"digits_test/{tag}")[-1].encoded_image_string
    axes.imshow(plt.imread(io.BytesIO(image)), cmap="gray")
    axes.set_title(f"digits_test/{tag}", fontsize=9)
    axes.set_axis_off()
figure.tight_layout()
figure.savefig(Path(__file__).with_name("digits.png"))
