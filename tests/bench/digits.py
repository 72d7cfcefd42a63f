"""The digits on two CPU ranks: the accuracy, and the time from torchrun to the end.

    python tests/bench/digits.py [--project DIR]

The run is that of cfg.yaml, as in `make demo`.  The time is wall time.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from table import print_row

HERE = Path(__file__).resolve()
TEMPLATE_PROJECT = HERE.parents[2] / "<<cookiecutter.project_slug>>"


def train(project, folder, settings):
    """Run torchrun with two ranks."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    words = ["--nproc_per_node", "2", "train.py", "--config", "cfg.yaml"]
    words += ["MODEL.DEVICE", "cpu", "OUTPUT_DIR", str(folder), *settings]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*launcher, *words], cwd=project, env=environment, capture_output=True, text=True
    )
    if done.returncode != 0:
        sys.exit(f"torchrun ended with {done.returncode}:\n{done.stderr}")


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--project", type=Path, default=TEMPLATE_PROJECT)
    parser.add_argument("settings", nargs="*", help="KEY VALUE ...")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder, "output")
        start = time.perf_counter()
        train(args.project, output, args.settings)
        seconds = time.perf_counter() - start
        lines = (output / "metrics.json").read_text().splitlines()
    accuracy = json.loads(lines[-1])["digits_test/accuracy"]
    what = "digits, 2 CPU ranks"
    print_row(f"{what}: test accuracy", f"{accuracy:.4f}", "-", f"{accuracy:.4f}", ">= 0.98")
    shown = f"{seconds:.1f} s"
    print_row(f"{what}: from torchrun to the end", shown, "-", shown, "<= 60 s")


if __name__ == "__main__":
    main()
