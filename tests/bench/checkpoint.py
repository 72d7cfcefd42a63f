"""What saving a checkpoint costs, over one plain torch.save and fsync of the same state.

    python tests/bench/checkpoint.py [--project DIR] [--megabytes 500] [--rounds 9]
        [--folder DIR]

The state is a model and its AdamW; the project's Checkpointer also sums it up, renames the file
when it is durable, and tags it.  Both write to one disk, by turns, and each after the other's
blocks are on it.  The time is wall time: the median of the rounds, and of each round's ratio, for
others use the disk too.  Memory is how much the largest resident size grew in the first save of
that size.
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
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (
        1 if sys.platform == "darwin" else 1024
    )


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
    from hardware import refuse_what_is_not_finite
    from plumbing.checkpoint import Checkpointer

    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        small = Checkpointer(nn.Linear(2, 2), folder, optimizer=make_state(0.1)[1])
        small.save("warm_up")
        model, optimizer = make_state(args.megabytes)
        refuse_what_is_not_finite(model)  # as in a run
        checkpointer = Checkpointer(model, folder, optimizer=optimizer)
        before = peak_memory()
        checkpointer.save("model_0000000")
        grown = (peak_memory() - before) / MIB
        size = os.path.getsize(os.path.join(folder, "model_0000000.pth")) / MIB
        plain_path = os.path.join(folder, "plain.pth")
        contenders = {
            "ours": (lambda: checkpointer.save("model_0000000"), "model_0000000.pth"),
            "plain": (lambda: plain_save(plain_path, model, optimizer), "plain.pth"),
        }
        plain_save(plain_path, model, optimizer)
        seconds = {name: [] for name in contenders}
        for i in range(args.rounds):
            for name in sorted(contenders, reverse=i % 2 == 1):
                save, file = contenders[name]
                if os.path.exists(os.path.join(folder, file)):
                    os.remove(os.path.join(folder, file))
                os.sync()
                start = time.perf_counter()
                save()
                seconds[name].append(time.perf_counter() - start)
    ratios = [ours / plain for ours, plain in zip(seconds["ours"], seconds["plain"])]
    ours, plain = (statistics.median(seconds[name]) for name in ("ours", "plain"))
    print(f"ratios of the rounds: {' '.join(f'{ratio:.2f}' for ratio in ratios)}")
    print_row(
        f"save of {size:.0f} MiB, checksum and fsyncs included",
        f"{ours * 1e3:.0f} ms",
        f"{plain * 1e3:.0f} ms, torch.save and fsync",
        f"{statistics.median(ratios):.2f}",
        "<= 1.3",
    )
    print_row(
        f"memory that the save of {size:.0f} MiB takes",
        f"{grown:.1f} MiB",
        f"{size:.0f} MiB, the state",
        f"{100 * grown / size:.1f} %",
        "<= 5 %",
    )


if __name__ == "__main__":
    main()
