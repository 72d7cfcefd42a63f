"""What one iteration of do_train costs, over a bare loop around the same model: one core, one run.

    python tests/bench/loop.py [--project DIR] [--iters 3000] [--rounds 5]

The real do_train of a project, with its storage, writers, checkpointer, schedule and random state,
on batches in memory; both loops take turns.  Prints medians of microseconds and the ratio.
"""

import argparse
import logging
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch
from torch import nn

HERE = Path(__file__).resolve()
TEMPLATE_PROJECT = HERE.parents[2] / "<<cookiecutter.project_slug>>"


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))

    def forward(self, batch):
        inputs, labels = batch
        logits = self.net(inputs)
        loss = nn.functional.cross_entropy(logits, labels)
        return {"loss_ce": loss, "loss_reg": 1e-4 * logits.square().mean()}


def make_batches():
    generator = torch.Generator().manual_seed(0)
    return [
        (
            torch.randn(64, 64, generator=generator),
            torch.randint(0, 10, (64,), generator=generator),
        )
        for _ in range(32)
    ]


def endless(batches):
    while True:
        yield from batches


def bare(batches, num_iters):
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda i: 1.0)
    start = time.perf_counter()
    for batch, _ in zip(endless(batches), range(num_iters)):
        loss = sum(model(batch).values())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
    return time.perf_counter() - start


def do_train(train, batches, num_iters):
    """Seconds from the first batch to the end."""
    start = []

    def build_train_loader(cfg, start_iter, *_):
        start.append(time.perf_counter())
        return ([batch] for batch in endless(batches))

    with tempfile.TemporaryDirectory() as folder:
        cfg = train.get_cfg()
        cfg.OUTPUT_DIR = folder
        cfg.MODEL.DEVICE = "cpu"
        cfg.SOLVER.MAX_ITER = num_iters
        cfg.SOLVER.BASE_LR = 0.01
        cfg.SOLVER.CHECKPOINT_PERIOD = cfg.TEST.EVAL_PERIOD = -1
        train.build_train_loader = build_train_loader
        train.do_train(cfg, Net())
        return time.perf_counter() - start[0]


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--project", type=Path, default=TEMPLATE_PROJECT)
    parser.add_argument("--iters", type=int, default=3000)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    torch.set_num_threads(1)
    logging.basicConfig(level=logging.ERROR)
    sys.path.insert(0, str(args.project))
    import train

    batches = make_batches()
    do_train(train, batches, 40)
    times = {"bare loop": [], "do_train": []}
    for _ in range(args.rounds):
        times["bare loop"].append(bare(batches, args.iters) / args.iters)
        times["do_train"].append(do_train(train, batches, args.iters) / args.iters)
    base = statistics.median(times["bare loop"])
    for name, seconds in times.items():
        median = statistics.median(seconds)
        print(f"{name:10s} {median * 1e6:7.1f} us, {median / base:.2f} of the bare loop")


if __name__ == "__main__":
    main()
