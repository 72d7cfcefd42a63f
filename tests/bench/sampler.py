"""What the training sampler costs: its first batch, deep in a huge data set, and each one after.

    python tests/bench/sampler.py [--project DIR] [--batches 20000]

The data set has 10^9 samples, and is begun at position 0 and at 7 * 10^11, in its 701st epoch.
Memory is the peak of what Python and numpy allocate, and the growth of the resident peak.
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
SIZE, BATCH_SIZE = 10**9, 64
MIB = 2**20


def resident_peak():
    """In bytes; Linux tells KiB, macOS bytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--project", type=Path, default=TEMPLATE_PROJECT)
    parser.add_argument("--batches", type=int, default=20_000)
    args = parser.parse_args()
    sys.path.insert(0, str(args.project))
    from plumbing.samplers import TrainingBatchSampler

    def first_batch(position):
        return next(iter(TrainingBatchSampler(SIZE, BATCH_SIZE, 1, 0, position // BATCH_SIZE)))

    for position in (0, 7 * 10**11):
        before = resident_peak()
        first_batch(position)
        grown = resident_peak() - before
        times = []
        for _ in range(5):
            start = time.perf_counter()
            first_batch(position)
            times.append(time.perf_counter() - start)
        tracemalloc.start()
        first_batch(position)
        traced = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        what = f"first batch of 10^9 samples at position {position:.0e}"
        print_row(what, "", "", f"{statistics.median(times):.4f} s", "<= 0.1 s")
        print_row(f"{what}: memory", "", "", f"{max(grown, traced) / MIB:.1f} MiB", "<= 10 MiB")
    for size in (1437, SIZE):
        batches = iter(TrainingBatchSampler(size, BATCH_SIZE, 1, 0))
        next(batches)
        start = time.perf_counter()
        for _ in islice(batches, args.batches):
            pass
        each = (time.perf_counter() - start) / args.batches
        what = f"sampler, a batch of {BATCH_SIZE} of {size} samples"
        print_row(what, "", "", f"{each * 1e6:.1f} us")


if __name__ == "__main__":
    main()
