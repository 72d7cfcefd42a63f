"""How long a program takes to say its usage, and to its first iteration, over `import torch` alone.

    python tests/bench/startup.py [--project DIR] [--rounds 9]

Each is a process of its own, on the CPU; they take turns, and the first round only warms up the
disk's cache.  The time is what the process computed (user and system), which other processes
disturb less than the wall clock; the first iteration is reached when the first module's forward
pass begins, with the data loaded, the settings checked and the output folder made.
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
train.launch(train.main, train.parse_args(sys.argv[1:]))
"""


def time_of(words, project, status=0):
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
    seconds = {"import torch": [], "train.py --help": [], "first iteration": []}
    with tempfile.TemporaryDirectory() as folder:
        for i in range(args.rounds + (not args.no_warm_up)):
            cpu = f"--config cfg.yaml MODEL.DEVICE cpu OUTPUT_DIR {folder}/{i}".split()
            taken = (
                time_of(["-c", "import torch"], args.project),
                time_of(["train.py", "--help"], args.project),
                time_of(["-c", FIRST_ITERATION, *cpu], args.project, status=42),
            )
            for values, each in zip(seconds.values(), taken):
                values += [each] * (i > 0 or args.no_warm_up)
    bare, *_ = medians = [statistics.median(values) for values in seconds.values()]
    for name, median, floor in zip(seconds, medians, ("", "<= 1.3", "<= 1.8")):
        if floor:
            print_row(
                f"start of the program to {name}",
                f"{median:.2f} s",
                f"{bare:.2f} s, import torch",
                f"{median / bare:.2f}",
                floor,
            )


if __name__ == "__main__":
    main()
