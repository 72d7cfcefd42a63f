"""Run the measuring programs one after the other, and print all their figures as one table.

    python tests/bench [--project DIR] [PROGRAM.py ...]

Without names, all programs of this folder run.  The exit status is 0 unless a program fails: a
person has to judge what a missed floor means on a busy machine.
"""

import argparse
import os
import platform
import subprocess
import sys
from pathlib import Path

from table import COLUMNS, aligned, rows_in, verdict

HERE = Path(__file__).resolve().parent
NO_PROGRAMS = ("__main__.py", "table.py")


def run(program, options):
    """Run a program and show what it prints; return its exit status and the text."""
    print(f"== {program.name}", flush=True)
    command = [sys.executable, "-u", str(program), *options]
    text = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        for line in process.stdout:
            print(line, end="", flush=True)
            text.append(line)
    return process.returncode, "".join(text)


def rows_of(program, status, text):
    """The rows of the table for one program, a verdict at the end of each."""
    rows = [(*row, verdict(row[-2], row[-1])) for row in rows_in(text)]
    if status != 0:
        rows.append((program.name, "", "", "", "", f"FAILED with exit status {status}"))
    elif not rows:
        lines = text.strip().splitlines() or ["printed nothing"]
        rows.append((program.name, "", "", "", "", lines[-1]))
    return rows


def main(words=None):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--project", type=Path, help="default: the template's own")
    parser.add_argument("programs", nargs="*", type=Path, metavar="PROGRAM.py")
    args = parser.parse_args(words)
    programs = args.programs
    if not programs:
        programs = sorted(path for path in HERE.glob("*.py") if path.name not in NO_PROGRAMS)
    options = []
    if args.project is not None:
        options = ["--project", str(args.project)]

    table = [(*COLUMNS, "")]
    has_failed = False
    for program in programs:
        status, text = run(program, options)
        table += rows_of(program, status, text)
        has_failed = has_failed or status != 0
    load = os.getloadavg()[0]
    print(f"\n{platform.machine()}, {os.cpu_count()} CPUs, load {load:.2f} at the end\n")
    print(*aligned(table), sep="\n")
    return int(has_failed)


if __name__ == "__main__":
    sys.exit(main())
