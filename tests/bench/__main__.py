"""Run the measuring programs one after the other, and print all their figures as one table.

    python tests/bench [--project DIR] [PROGRAM.py ...]

Without names, all programs of this folder run.  The exit status is 0 unless a program fails: what a
floor is worth on a busy machine, a person has to judge.
"""

import argparse
import os
import platform
import subprocess
import sys
from pathlib import Path

from table import COLUMNS, aligned, rows_in, verdict

HERE = Path(__file__).resolve().parent
NO_PROGRAMS = "__main__.py", "table.py"


def run(program, options):
    """Run a program, and show what it prints while it does: its exit status, and the text."""
    print(f"== {program.name}", flush=True)
    command = [sys.executable, "-u", str(program), *options]
    text = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        for line in process.stdout:
            print(line, end="", flush=True)
            text.append(line)
    return process.returncode, "".join(text)


def main(words=None):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--project", type=Path, help="default: the template's own")
    parser.add_argument("programs", nargs="*", type=Path, metavar="PROGRAM.py")
    args = parser.parse_args(words)
    programs = args.programs or sorted(
        path for path in HERE.glob("*.py") if path.name not in NO_PROGRAMS
    )
    options = [] if args.project is None else ["--project", str(args.project)]
    table, failed = [], []
    for program in programs:
        status, text = run(program, options)
        rows = rows_in(text)
        table += [(*row, verdict(row[-2], row[-1])) for row in rows]
        if not rows and not status:
            last = text.strip().splitlines()[-1:]
            table.append((program.name, "", "", "", "", *(last or ["printed nothing"])))
        if status:
            failed.append(program.name)
            table.append((program.name, "", "", "", "", f"FAILED with exit status {status}"))
    load = f"{os.getloadavg()[0]:.2f}"
    print(f"\n{platform.machine()}, {os.cpu_count()} CPUs, load {load} at the end\n")
    print(*aligned([(*COLUMNS, ""), *table]), sep="\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
