"""The cost of saving a checkpoint, compared with a plain torch.save and fsync of the same state.

    python tests/bench/checkpoint.py [--project DIR] [--megabytes 500] [--rounds 9]
        [--folder DIR]

The state is a model and its AdamW.  The project's Checkpointer also looks for values that are not
finite, adds checksums, renames the file when it is durable, and tags it.  Both write to one disk,
by turns, and each begins when the blocks of the other one are on the disk.  The time is wall time:
the median of the rounds, and of the ratios of the rounds, because other programs use the disk too.
Memory is the growth of the largest resident size in the first save of that size.
"""

import argparse
import logging
import os
import resource
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch
from table import print_row
from torch import nn

HERE = Path(__file__).resolve()
TEMPLATE_PROJECT = HERE.parents[2] / "<<cookiecutter.project_slug>>"
MIB = 2**20


def make_state(megabytes):
    """A model and its AdamW of so many MiB together, without a peak of memory on the way."""
    width = 512 if megabytes >= 32 else 64
    layers = max(1, round(megabytes * MIB / (3 * 4 * width * width)))
    model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers)))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    for parameter in model.parameters():
        moments = {name: torch.rand_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
        optimizer.state[parameter] = {"step": torch.ones(()), **moments}
    return model, optimizer


def plain_save(path, model, optimizer):
    with open(path, "wb") as file:
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
        file.flush()
        os.fsync(file.fileno())


def peak_memory():
    """The largest resident size of this process so far, in bytes."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def seconds_of(save, path):
    """Wall time of a save to a new file on a disk that has nothing else to write."""
    path.unlink(missing_ok=True)
    os.sync()
    start = time.perf_counter()
    save()
    return time.perf_counter() - start


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--project", type=Path, default=TEMPLATE_PROJECT)
    parser.add_argument("--megabytes", type=float, default=500)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--folder", help="on the disk to write to")
    args = parser.parse_args()
    torch.set_num_threads(1)
    logging.basicConfig(level=logging.ERROR)
    sys.path.insert(0, str(args.project))
    from plumbing.checkpoint import Checkpointer

    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        _, small_optimizer = make_state(0.1)
        Checkpointer(nn.Linear(2, 2), folder, optimizer=small_optimizer).save("warm_up")

        model, optimizer = make_state(args.megabytes)
        checkpointer = Checkpointer(model, folder, optimizer=optimizer)
        path = Path(folder, "model_0000000.pth")
        before = peak_memory()
        checkpointer.save("model_0000000")
        growth = (peak_memory() - before) / MIB
        size = path.stat().st_size / MIB

        plain_path = Path(folder, "plain.pth")
        plain_save(plain_path, model, optimizer)
        ours = []
        plain = []
        for _ in range(args.rounds):
            ours.append(seconds_of(lambda: checkpointer.save("model_0000000"), path))
            plain.append(seconds_of(lambda: plain_save(plain_path, model, optimizer), plain_path))
    ratios = [one / other for one, other in zip(ours, plain)]
    print(f"ratios of the rounds: {' '.join(f'{ratio:.2f}' for ratio in ratios)}")
    print_row(
        f"save of {size:.0f} MiB, checksum and fsyncs included",
        f"{statistics.median(ours) * 1e3:.0f} ms",
        f"{statistics.median(plain) * 1e3:.0f} ms, torch.save and fsync",
        f"{statistics.median(ratios):.2f}",
        "<= 1.3",
    )
    print_row(
        f"memory that the save of {size:.0f} MiB takes",
        f"{growth:.1f} MiB",
        f"{size:.0f} MiB, the state",
        f"{100 * growth / size:.1f} %",
        "<= 5 %",
    )


if __name__ == "__main__":
    main()
