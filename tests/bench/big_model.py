"""The memory of the saves and loads of a big model, each in a process of its own; Linux only.

    python tests/bench/big_model.py [--project DIR] [--megabytes 1000] [--folder DIR]

The weights of the project's own model take so many MB, and with AdamW three times as much is saved.
(1000 MB need 10 GB of memory and 3 GB of disk.)  Each figure is what a save or a load takes beyond
the model and its optimizer, as a share of these two.  There are two of them:

    private     memory that only this process has (RssAnon), sampled.  This is what counts: the
                system can take it from nobody, and ends a process for it.
    with pages  the largest resident size (VmHWM).  It also counts the pages of the checkpoint,
                which is mapped.  The ranks of a machine share these pages, they can be dropped at
                any moment, and a limit of memory (a cgroup) drops them before it ends a process.
"""

import argparse
import json
import logging
import multiprocessing
import sys
import tempfile
import threading
from pathlib import Path

import torch
import torch.distributed as dist
from table import print_row

HERE = Path(__file__).resolve()
TEMPLATE_PROJECT = HERE.parents[2] / "<<cookiecutter.project_slug>>"
MB = 10**6
POLL_SECONDS = 0.002
FLOOR = "<= 10 %"


def status(key):
    """A size of this process in bytes, as proc(5) has it."""
    with open("/proc/self/status") as file:
        for line in file:
            if line.startswith(f"{key}:"):
                return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {key}")


class Growth:
    """Measures by how much memory has grown, at most, since this object was made."""

    def __init__(self):
        self._private_before = status("RssAnon")
        self._resident_before = status("VmRSS")
        # Sets the largest resident size back to the present one.
        Path("/proc/self/clear_refs").write_text("5")
        self._largest_private = 0
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._sample)
        self._thread.start()

    def _sample(self):
        while not self._is_over.wait(POLL_SECONDS):
            self._largest_private = max(self._largest_private, status("RssAnon"))

    def end(self):
        """Bytes of private memory, and of all resident memory."""
        self._is_over.set()
        self._thread.join()
        largest_private = max(self._largest_private, status("RssAnon"))
        resident = status("VmHWM") - self._resident_before
        return largest_private - self._private_before, resident


def settings(megabytes):
    """Settings whose model has so many MB of weights."""
    from defaults import get_cfg

    cfg = get_cfg()
    cfg.MODEL.DEVICE = "cpu"
    cfg.SOLVER.OPTIMIZER = "AdamW"
    # Nearly all weights are those of two layers, which have 18 and 36 times WIDTH**2.
    cfg.MODEL.WIDTH = max(8, round((megabytes * MB / 4 / 54) ** 0.5))
    return cfg


def build(cfg):
    from model import build_model
    from solver import build_optimizer

    model = build_model(cfg)
    return model, build_optimizer(cfg, model)


def num_bytes(model):
    return sum(parameter.nbytes for parameter in model.parameters())


# Each step returns (bytes that the model and its optimizer take, private growth, resident growth).


def save(cfg, folder):
    from plumbing.checkpoint import Checkpointer

    model, optimizer = build(cfg)
    for parameter in model.parameters():
        moments = {name: torch.rand_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
        optimizer.state[parameter] = {"step": torch.ones(()), **moments}
    growth = Growth()
    checkpointer = Checkpointer(model, folder, config=cfg.dump(), optimizer=optimizer)
    checkpointer.save("model_final", iteration=9)
    private, resident = growth.end()
    taken = 3 * num_bytes(model)
    return taken, taken + private, taken + resident


def resume(cfg, folder):
    from plumbing.checkpoint import Checkpointer

    growth = Growth()
    model, optimizer = build(cfg)
    checkpoint = Checkpointer(model, folder, optimizer=optimizer).resume_or_load("")
    assert checkpoint["iteration"] == 9
    return 3 * num_bytes(model), *growth.end()


def load_weights(cfg, folder):
    from plumbing.checkpoint import Checkpointer

    growth = Growth()
    model, optimizer = build(cfg)
    checkpointer = Checkpointer(model, f"{folder}/other", optimizer=optimizer)
    checkpointer.resume_or_load(f"{folder}/model_final.pth", resume=False)
    return num_bytes(model), *growth.end()


def predict(cfg, folder):
    from predict import load_model

    growth = Growth()
    model = load_model(f"{folder}/model_final.pth")
    return num_bytes(model), *growth.end()


def rank_of_step(step, cfg, folder, rank, num_ranks):
    """Run a step as a rank, and write what it returns to a file."""
    if num_ranks > 1:
        store = dist.FileStore(f"{folder}/store {step.__name__}", num_ranks)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=num_ranks)
    figures = step(cfg, folder)
    Path(folder, f"{rank}.json").write_text(json.dumps(figures))


def run(step, cfg, folder, num_ranks=1):
    """Run a step on ranks of their own; returns its figures on the rank where they are largest."""
    # A process that is forked has all imports already.
    context = multiprocessing.get_context("fork")
    ranks = []
    for rank in range(num_ranks):
        args = (step, cfg, folder, rank, num_ranks)
        ranks.append(context.Process(target=rank_of_step, args=args))
        ranks[-1].start()
    for rank in ranks:
        rank.join()
    if any(rank.exitcode != 0 for rank in ranks):
        raise RuntimeError(f"{step.__name__} failed on {num_ranks} ranks")
    return max(json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(num_ranks))


def print_figures(what, taken, private, resident):
    """Print a row for the private memory, which has a floor, and one with the pages of the file."""
    peer = f"{taken / MB:.0f} MB, the model and its optimizer"
    for kind, grown, floor in (("private", private, FLOOR), ("with pages", resident, "")):
        more = grown - taken
        figure = f"{100 * more / taken:.1f} %"
        print_row(f"{what}, {kind}", f"{more / MB:+.1f} MB", peer, figure, floor)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--project", type=Path, default=TEMPLATE_PROJECT)
    parser.add_argument("--megabytes", type=float, default=1000)
    parser.add_argument("--folder", help="on the disk to write to")
    args = parser.parse_args()
    if not Path("/proc/self/clear_refs").exists():
        print("no /proc here: nothing was measured")
        return
    torch.set_num_threads(1)
    logging.basicConfig(level=logging.ERROR)
    sys.path.insert(0, str(args.project))

    with tempfile.TemporaryDirectory() as folder:
        small = settings(0)
        # What is read and compiled at the first use does not count.
        for step in (save, resume, load_weights, predict):
            step(small, folder)
    cfg = settings(args.megabytes)
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        print_figures("save with AdamW", *run(save, cfg, folder))
        print_figures("resume with AdamW", *run(resume, cfg, folder))
        print_figures("start from MODEL.WEIGHTS", *run(load_weights, cfg, folder))
        print_figures("load for predict.py", *run(predict, cfg, folder))
        print_figures("save with AdamW on 2 ranks", *run(save, cfg, folder, 2))
        print_figures("resume with AdamW on 2 ranks", *run(resume, cfg, folder, 2))


if __name__ == "__main__":
    main()
