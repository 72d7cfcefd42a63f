"""Samples a second of the training loader, over a plain DataLoader of the same digits: one core.

    python tests/bench/loading.py [--project DIR] [--batches 1000] [--rounds 7]

Both shuffle, shift each image at random and load in the process itself, in batches of 64.  The
plain one fetches and shifts a sample at a time in ``__getitem__`` and collates as PyTorch does.
They take turns; the figures are medians.
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


class PlainDigits(Dataset):
    def __init__(self, images, labels, max_shift):
        margin = (0, 0), (max_shift, max_shift), (max_shift, max_shift)
        self.padded, self.labels, self.max_shift = np.pad(images, margin), labels, max_shift

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        down, right = (random.randrange(2 * self.max_shift + 1) for _ in range(2))
        image = self.padded[index, down : down + 8, right : right + 8]
        return {"images": torch.from_numpy(image)[None], "labels": int(self.labels[index])}


def endless(loader):
    while True:
        yield from loader


def seconds(batches, count):
    """Of one batch; the first ones, which start things, are left out."""
    for _ in range(10):
        next(batches)
    start = time.perf_counter()
    for _ in range(count):
        next(batches)
    return (time.perf_counter() - start) / count


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--project", type=Path, default=TEMPLATE_PROJECT)
    parser.add_argument("--batches", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    torch.set_num_threads(1)
    sys.path.insert(0, str(args.project))
    import data
    import sampling
    from defaults import get_cfg

    cfg = get_cfg()
    cfg.MODEL.DEVICE = "cpu"
    size = cfg.SOLVER.BATCH_SIZE
    ours = data.build_train_loader(cfg, 0, sampling.build_train_sampler)
    images, labels = data.read_digits(args.project / cfg.DATASETS.PATH)["digits_train"]
    dataset = PlainDigits(images, labels, cfg.DATASETS.MAX_SHIFT)
    plain = endless(DataLoader(dataset, size, shuffle=True, drop_last=True))
    times = {"ours": [], "plain": []}
    for _ in range(args.rounds):
        times["ours"].append(seconds(ours, args.batches))
        times["plain"].append(seconds(plain, args.batches))
    ours, plain = (size / statistics.median(each) for each in times.values())
    row = f"{ours:,.0f} samples/s", f"{plain:,.0f} samples/s", f"{ours / plain:.1f}", ">= 5"
    print_row("loading digits, 0 workers, over a plain DataLoader", *row)


if __name__ == "__main__":
    main()
