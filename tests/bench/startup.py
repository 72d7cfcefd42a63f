"""The time to show the usage, and to reach the first iteration, compared with `import torch`.

    python tests/bench/startup.py [--project DIR] [--rounds 9]

Each is a process of its own, on the CPU.  They take turns, and the first round only warms up the
disk's cache.  The time is what the process computed (user and system), which other processes
disturb less than the wall clock.  The first iteration is reached when the first module's forward
pass begins: then the data is loaded, the settings are checked and the output folder is made.
"""

import argparse
import os
import resource
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from table import print_row

HERE = Path(__file__).resolve()
TEMPLATE_PROJECT = HERE.parents[2] / "<<cookiecutter.project_slug>>"
FIRST_ITERATION = """
import os
import sys

sys.path.insert(0, "")
import train
from torch.nn.modules.module import register_module_forward_pre_hook

register_module_forward_pre_hook(lambda *_: os._exit(42))
train.launch(train.main, train.parse_args(""))
"""
FLOORS = {"train.py --help": "<= 1.3", "first iteration": "<= 1.8"}


def seconds_of(words, project, status=0):
    """Seconds that ``python *words`` computes in the project's folder until it ends."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [sys.executable, *words]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=project, env=environment, capture_output=True, text=True)
    if done.returncode != status:
        sys.exit(f"{' '.join(words[:2])} ended with {done.returncode}:\n{done.stderr}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--project", type=Path, default=TEMPLATE_PROJECT)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--no-warm-up", action="store_true", help="count the first round too")
    args = parser.parse_args()
    num_warm_ups = 0 if args.no_warm_up else 1
    seconds = {"import torch": [], "train.py --help": [], "first iteration": []}
    with tempfile.TemporaryDirectory() as folder:
        for i in range(num_warm_ups + args.rounds):
            settings = f"--config cfg.yaml MODEL.DEVICE cpu OUTPUT_DIR {folder}/{i}".split()
            taken = {
                "import torch": seconds_of(["-c", "import torch"], args.project),
                "train.py --help": seconds_of(["train.py", "--help"], args.project),
                "first iteration": seconds_of(
                    ["-c", FIRST_ITERATION, *settings], args.project, status=42
                ),
            }
            if i >= num_warm_ups:
                for name, values in seconds.items():
                    values.append(taken[name])
    bare = statistics.median(seconds["import torch"])
    for name, floor in FLOORS.items():
        median = statistics.median(seconds[name])
        print_row(
            f"start of the program to {name}",
            f"{median:.2f} s",
            f"{bare:.2f} s, import torch",
            f"{median / bare:.2f}",
            floor,
        )


if __name__ == "__main__":
    main()
