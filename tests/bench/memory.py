"""Whether a long run costs more than a short one: memory of storage and writers, time of logging.

    python tests/bench/memory.py [--project DIR] [--iters 1000000] [--blocks 60]

A storage and the writers of a run get what the loop puts, in each iteration four tensors and two
numbers, and are read and written every 20 iterations.  Memory is the resident size (on Linux)
after a thousand iterations and after all.  Then a second storage, with writers of its own, does a
thousand iterations, and both continue by turns, 200 iterations at a time, on the clock of the
process's own time.
"""

import argparse
import gc
import logging
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch
from table import print_row

HERE = Path(__file__).resolve()
TEMPLATE_PROJECT = HERE.parents[2] / "<<cookiecutter.project_slug>>"
PERIOD = 20  # iterations
START = 1000
BLOCK = 200
MIB = 2**20


class Run:
    """What a training logs, without the training."""

    def __init__(self, events, folder, num_iters):
        folder.mkdir()
        self.storage = events.EventStorage()
        self.writers = events.default_writers(str(folder), num_iters)
        self.losses = torch.rand(97)
        self.next_iter = 0

    def go_on(self, num_iters):
        storage = self.storage
        with storage:
            for iteration in range(self.next_iter, self.next_iter + num_iters):
                storage.iter = iteration
                loss = self.losses[iteration % 97]
                storage.put_scalars({"total_loss": loss, "loss_cls": loss, "accuracy": loss})
                storage.put_scalars(grad_norm=loss, data_time=1e-4)
                storage.put_scalar("lr", 0.1 / (iteration + 1), smoothing_hint=False)
                if (iteration + 1) % PERIOD == 0:
                    storage.reduce()
                    numbers = {"time": 1e-3 + iteration * 1e-9, "samples_per_second": 1e3}
                    storage.put_scalars(numbers, smoothing_hint=False)
                    for writer in self.writers:
                        writer.write()
        self.next_iter += num_iters

    def close(self):
        for writer in self.writers:
            writer.close()


def resident_memory():
    """The resident size of this process, in MiB."""
    gc.collect()
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / MIB


def time_of(run):
    """Seconds of an iteration."""
    start = time.process_time()
    run.go_on(BLOCK)
    return (time.process_time() - start) / BLOCK


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--project", type=Path, default=TEMPLATE_PROJECT)
    parser.add_argument("--iters", type=int, default=1_000_000)
    parser.add_argument("--blocks", type=int, default=60)
    args = parser.parse_args()
    torch.set_num_threads(1)
    sys.path.insert(0, str(args.project))
    from plumbing import events

    with tempfile.TemporaryDirectory() as folder:
        logging.basicConfig(level="INFO", filename=os.path.join(folder, "log.txt"))
        long = Run(events, Path(folder, "long"), 10 * args.iters)
        long.go_on(START)
        before = resident_memory()
        long.go_on(args.iters - START)
        after = resident_memory()

        short = Run(events, Path(folder, "short"), 10 * args.iters)
        short.go_on(START)
        long_times = []
        short_times = []
        for _ in range(args.blocks // 2):
            long_times.append(time_of(long))
            short_times.append(time_of(short))
            short_times.append(time_of(short))
            long_times.append(time_of(long))
        long.close()
        short.close()
    longer = statistics.median(long_times) * 1e6
    shorter = statistics.median(short_times) * 1e6
    print_row(
        f"memory of storage and writers, {args.iters:,} iterations",
        f"{after:.1f} MiB",
        f"{before:.1f} MiB after {START:,}",
        f"{after - before:+.1f} MiB",
        "<= 1 MiB",
    )
    print_row(
        f"logging of an iteration, at iteration {args.iters:,}",
        f"{longer:.1f} us",
        f"{shorter:.1f} us at {START:,}",
        f"{longer / shorter:.2f}",
        "<= 1.05",
    )


if __name__ == "__main__":
    main()
