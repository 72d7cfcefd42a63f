"""The cost of the training sampler: its first batch, deep in a huge data set, and each one after.

    python tests/bench/sampler.py [--project DIR] [--batches 20000]

The data set has 10^9 samples.  The sampler begins at position 0, and at 7 * 10^11, which is in the
701st epoch.  Memory is the peak of what Python and numpy allocate, or the growth of the resident
peak if that is larger.
"""

import argparse
import resource
import statistics
import sys
import time
import tracemalloc
from itertools import islice
from pathlib import Path

from table import print_row

HERE = Path(__file__).resolve()
TEMPLATE_PROJECT = HERE.parents[2] / "<<cookiecutter.project_slug>>"
SIZE = 10**9
BATCH_SIZE = 64
MIB = 2**20


def resident_peak():
    """The largest resident size so far, in bytes; Linux counts KiB, macOS bytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def measure_first_batch(build, position):
    """Return (seconds, bytes) of the first batch at a position."""

    def first_batch():
        return next(iter(build(SIZE, start_iter=position // BATCH_SIZE)))

    before = resident_peak()
    first_batch()
    growth = resident_peak() - before
    times = []
    for _ in range(5):
        start = time.perf_counter()
        first_batch()
        times.append(time.perf_counter() - start)
    tracemalloc.start()
    first_batch()
    _, traced = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return statistics.median(times), max(growth, traced)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--project", type=Path, default=TEMPLATE_PROJECT)
    parser.add_argument("--batches", type=int, default=20_000)
    args = parser.parse_args()
    sys.path.insert(0, str(args.project))
    from plumbing.samplers import TrainingBatchSampler

    def build(size, start_iter=0):
        return TrainingBatchSampler(size, BATCH_SIZE, seed=0, start_iter=start_iter)

    for position in (0, 7 * 10**11):
        seconds, memory = measure_first_batch(build, position)
        what = f"first batch of 10^9 samples at position {position:.0e}"
        print_row(what, f"{seconds:.4f} s", "-", f"{seconds:.4f} s", "<= 0.1 s")
        shown = f"{memory / MIB:.1f} MiB"
        print_row(f"{what}: memory", shown, "-", shown, "<= 10 MiB")
    for size in (1437, SIZE):
        batches = iter(build(size))
        next(batches)
        start = time.perf_counter()
        for _ in islice(batches, args.batches):
            pass
        each = (time.perf_counter() - start) / args.batches
        what = f"sampler, a batch of {BATCH_SIZE} of {size} samples"
        print_row(what, f"{each * 1e6:.1f} us", "-", f"{each * 1e6:.1f} us")


if __name__ == "__main__":
    main()
