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

HERE = Path(__file__).parent


def plot(axes, rows, names):
    """Draw curves of metrics.json; the last point of the accuracy is labelled."""
    for name in names:
        points = [(row["iteration"], row[name]) for row in rows if row.get(name) is not None]
        iterations, values = zip(*points)
        is_accuracy = name.endswith("accuracy")
        axes.plot(iterations, values, marker="o" if is_accuracy else "", label=name)
        if is_accuracy:
            axes.annotate(
                f"{values[-1]:.4f}",
                (iterations[-1], values[-1]),
                xytext=(0, -14),
                textcoords="offset points",
                ha="right",
            )
    axes.set_xlabel("iteration")
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)


def show(axes, events, tag):
    """Show the newest image of a tag: the confusion matrix has a row for each label."""
    image = events.Images(tag)[-1].encoded_image_string
    axes.imshow(plt.imread(io.BytesIO(image)), cmap="gray")
    axes.set_title(tag, fontsize=9)
    axes.set_xlabel("prediction")
    axes.set_ylabel("label")
    axes.set_xticks(range(10))
    axes.set_yticks(range(10))


def main():
    run = Path(sys.argv[1])
    rows = [json.loads(line) for line in (run / "metrics.json").read_text().splitlines()]
    events = EventAccumulator(str(run), size_guidance={"images": 0})
    events.Reload()

    figure, (losses, rates, confusion) = plt.subplots(1, 3, figsize=(11, 3.2), dpi=110)
    plot(losses, rows, ["total_loss", "digits_test/accuracy"])
    plot(rates, rows, ["lr"])
    show(confusion, events, "digits_test/confusion")
    figure.tight_layout()
    figure.savefig(HERE / "digits.png")


if __name__ == "__main__":
    main()
