"""Samples a second of the training loader, compared with a plain DataLoader: one core.

    python tests/bench/loading.py [--project DIR] [--batches 200] [--rounds 9]

All loaders get the project's own data set and its transforms, shuffle, and load in the process
itself.  The project's loader sets the generators of torch, numpy and Python before each sample, so
that a resumed run sees the same samples.  It is compared with torch's DataLoader

  * that seeds nothing: then random transforms draw other numbers after a resume;
  * whose samples are seeded by hand, with torch.manual_seed, np.random.seed and random.seed.

A data set with ``__getitems__`` loads whole batches, and the generators are set once for each.  The
loaders take turns; the time is the process's own, and the figures are medians.
"""

import argparse
import random
import statistics
import sys
import time
from pathlib import Path

import numpy as np
import torch
from table import print_row
from torch.utils.data import DataLoader, Dataset

HERE = Path(__file__).resolve()
TEMPLATE_PROJECT = HERE.parents[2] / "<<cookiecutter.project_slug>>"


class Wrapped(Dataset):
    def __init__(self, dataset):
        self.dataset = dataset

    def __len__(self):
        return len(self.dataset)

    def __getitem__(self, index):
        return self.dataset[index]


class SeededByHand(Wrapped):
    """The same samples, after the global generators were set."""

    def __getitem__(self, index):
        torch.manual_seed(index)
        np.random.seed(index)
        random.seed(index)
        return self.dataset[index]


class WholeBatches(Wrapped):
    """The same samples, but a batch at a time."""

    def __getitems__(self, indices):
        return [self.dataset[index] for index in indices]


def endless(loader):
    while True:
        yield from loader


def seconds_of(batches, count):
    """Seconds of one batch; the first ones, which start things, are left out."""
    for _ in range(10):
        next(batches)
    start = time.process_time()
    for _ in range(count):
        next(batches)
    return (time.process_time() - start) / count


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--project", type=Path, default=TEMPLATE_PROJECT)
    parser.add_argument("--batches", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=9)
    args = parser.parse_args()
    torch.set_num_threads(1)
    sys.path.insert(0, str(args.project))
    import data
    from defaults import get_cfg

    cfg = get_cfg()
    cfg.MODEL.DEVICE = "cpu"
    size = cfg.SOLVER.BATCH_SIZE
    shift = data.RandomShift(cfg.DATASETS.MAX_SHIFT)
    dataset = data.build_dataset(cfg, cfg.DATASETS.TRAIN, shift)
    ours = data.build_train_loader(cfg, 0)
    build_dataset = data.build_dataset
    data.build_dataset = lambda *args: WholeBatches(build_dataset(*args))
    whole_batches = data.build_train_loader(cfg, 0)
    data.build_dataset = build_dataset
    by_hand = SeededByHand(dataset)
    loaders = {
        "ours": iter(ours),
        "whole batches": iter(whole_batches),
        "plain": endless(DataLoader(dataset, size, shuffle=True, drop_last=True)),
        "by hand": endless(DataLoader(by_hand, size, shuffle=True, drop_last=True)),
    }

    seconds = {name: [] for name in loaders}
    for _ in range(args.rounds):
        for name, loader in loaders.items():
            seconds[name].append(seconds_of(loader, args.batches))
    speed = {name: size / statistics.median(values) for name, values in seconds.items()}
    cost = (1 / speed["ours"] - 1 / speed["plain"]) * 1e6
    print(f"the generators and the order of the samples cost {cost:.1f} us for each sample")

    def print_speed(what, name, peer, text, floor):
        ratio = speed[name] / speed[peer]
        peer_speed = f"{speed[peer]:,.0f} samples/s, {text}"
        print_row(what, f"{speed[name]:,.0f} samples/s", peer_speed, f"{ratio:.2f}", floor)

    what = "loading digits, 0 workers"
    print_speed(what, "ours", "plain", "a plain DataLoader", ">= 0.5")
    print_speed(what, "ours", "by hand", "a DataLoader seeded by hand", ">= 5")
    what = "the same, a data set that loads whole batches"
    print_speed(what, "whole batches", "plain", "a plain DataLoader", ">= 0.9")


if __name__ == "__main__":
    main()
