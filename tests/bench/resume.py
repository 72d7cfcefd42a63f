"""The time of a resume to its first iteration, late in a run and early in it.

    python tests/bench/resume.py [--project DIR] [--iters 1000000] [--rounds 15]

Two runs of the project's own model and data are resumed by turns, in this process: one after the
given number of iterations, and one after a thousand, when all histories have become as long as they
get.  metrics.json and the TensorBoard events are as long as they would be.  The time goes from the
call of do_train to the first forward pass, without the reading of checkpoints, which depends on the
size of the model.  It is the process's own time: the two may differ only by computing.
"""

import argparse
import json
import logging
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch
from table import print_row

HERE = Path(__file__).resolve()
TEMPLATE_PROJECT = HERE.parents[2] / "<<cookiecutter.project_slug>>"
EARLY = 1000  # iterations


class Arrived(BaseException):
    """Ends a resume at its first forward pass."""

    def __init__(self):
        self.moment = time.process_time()


class Reading:
    """Measures the calls of ``read_file``, whichever module of plumbing/checkpoint makes them."""

    def __init__(self):
        self.seconds = 0.0
        self._read_file = None
        self._modules = []

    def __enter__(self):
        for name, module in list(sys.modules.items()):
            if name.startswith("plumbing.checkpoint.") and hasattr(module, "read_file"):
                self._modules.append(module)
                self._read_file = module.read_file
                module.read_file = self._timed
        return self

    def __exit__(self, *_):
        for module in self._modules:
            module.read_file = self._read_file

    def _timed(self, *args, **kwargs):
        start = time.process_time()
        file = self._read_file(*args, **kwargs)
        self.seconds += time.process_time() - start
        return file


def settings(train, folder, max_iter):
    cfg = train.get_cfg()
    cfg.OUTPUT_DIR = str(folder)
    cfg.MODEL.DEVICE = "cpu"
    cfg.SOLVER.MAX_ITER = max_iter
    cfg.SOLVER.CHECKPOINT_PERIOD = 1  # so that the last row is written again
    cfg.TEST.EVAL_PERIOD = -1
    return cfg


def save_first_iteration(train, folder):
    """Make a run that was saved after iteration 0."""
    folder.mkdir()
    cfg = settings(train, folder, max_iter=1)
    train.do_train(cfg, train.build_model(cfg))


def grow(save_file, first, folder, num_iters, period):
    """Make the run in ``first`` as it would be after so many iterations."""
    iteration = num_iters - 1
    checkpoint = torch.load(first / "model_final.pth")
    checkpoint["iteration"] = iteration
    checkpoint["scheduler"] = {"iteration": num_iters}
    for history in checkpoint["storage"]["histories"].values():
        iterations = torch.arange(iteration - 999, iteration + 1, dtype=torch.float64)
        values = torch.rand(1000, dtype=torch.float64)
        history["pairs"] = torch.stack([values, iterations], dim=1)
        history["count"] = num_iters
    folder.mkdir()
    save_file(str(folder / "model_final.pth"), checkpoint)
    (folder / "last_checkpoint").write_text("model_final.pth")
    lines = (first / "metrics.json").read_text().splitlines()
    row = json.loads(lines[-1])
    with open(folder / "metrics.json", "w") as file:
        for i in range(period - 1, num_iters, period):
            file.write(json.dumps({**row, "iteration": i}) + "\n")
    for events in first.glob("events*"):
        num_copies = num_iters // period
        (folder / events.name).write_bytes(events.read_bytes() * num_copies)


def time_of_resume(train, source, max_iter):
    """Seconds from do_train to the first forward pass of a resume in a copy of ``source``."""

    def arrive(*_):
        raise Arrived

    with tempfile.TemporaryDirectory() as folder, Reading() as reading:
        copy = shutil.copytree(source, Path(folder, "run"))
        cfg = settings(train, copy, max_iter)
        model = train.build_model(cfg)
        model.register_forward_pre_hook(arrive)
        start = time.process_time()
        try:
            train.do_train(cfg, model, resume=True)
        except Arrived as arrived:
            return arrived.moment - start - reading.seconds
    raise RuntimeError("a resume ended without a forward pass")


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--project", type=Path, default=TEMPLATE_PROJECT)
    parser.add_argument("--iters", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=15)
    args = parser.parse_args()
    torch.set_num_threads(1)
    logging.basicConfig(level=logging.ERROR)
    sys.path.insert(0, str(args.project))
    import train
    from plumbing.checkpoint.archive import save_file

    max_iter = 2 * args.iters
    period = train.get_cfg().LOG_PERIOD
    with tempfile.TemporaryDirectory() as folder:
        first = Path(folder, "first")
        early = Path(folder, "early")
        late = Path(folder, "late")
        save_first_iteration(train, first)
        grow(save_file, first, early, EARLY, period)
        grow(save_file, first, late, args.iters, period)
        seconds = {first: [], early: [], late: []}
        for run in seconds:
            time_of_resume(train, run, max_iter)  # what is slow the first time
        for _ in range(args.rounds):
            for run, values in seconds.items():
                values.append(time_of_resume(train, run, max_iter))
    medians = {run.name: statistics.median(values) * 1e3 for run, values in seconds.items()}
    print(f"after one iteration, with histories of one value: {medians['first']:.1f} ms")
    print_row(
        f"resume after {args.iters:,} iterations, to the next forward pass",
        f"{medians['late']:.1f} ms",
        f"{medians['early']:.1f} ms after {EARLY:,}",
        f"{medians['late'] / medians['early']:.2f}",
        "<= 1.05",
    )


if __name__ == "__main__":
    main()
