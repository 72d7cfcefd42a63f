"""What the evaluation of one test set costs: reads of the device, and messages among two ranks.

    python tests/bench/evaluation.py [--project DIR]

The real do_test of a project on the digits, in small batches.  Reads are those between two batches:
item(), float(), bool() and the like, tolist(), numpy() and cpu().  Messages are the collectives of
all of it: the averages of the buffers, and the results.  Nothing is timed.
"""

import argparse
import logging
import os
import pickle
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from table import print_row
from torch.utils._python_dispatch import TorchDispatchMode

HERE = Path(__file__).resolve()
TEMPLATE_PROJECT = HERE.parents[2] / "<<cookiecutter.project_slug>>"
NUM_RANKS = 2


class Watch(TorchDispatchMode):
    """Counts reads and collectives of what runs inside."""

    def __init__(self):
        super().__init__()
        self.reads = self.collectives = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.reads += function is torch.ops.aten._local_scalar_dense.default
        self.collectives += function.namespace == "c10d"
        return function(*args, **(kwargs or {}))

    def counting(self, function):
        def call(*args, **kwargs):
            self.reads += 1
            return function(*args, **kwargs)

        return call


def evaluate(train):
    """(reads at each batch, collectives in all) on this rank."""
    cfg = train.get_cfg()
    cfg.MODEL.DEVICE, cfg.TEST.BATCH_SIZE = "cpu", 16
    cfg.DATASETS.TEST = cfg.DATASETS.TEST[:1]
    model = train.build_parallel(cfg, train.build_model(cfg))
    watch, per_batch, build = Watch(), [], train.build_test_loader

    def watched_loader(*args):
        for data in build(*args):
            before = watch.reads
            yield data
            per_batch.append(watch.reads - before)

    train.build_test_loader = watched_loader
    for name in ("tolist", "numpy", "cpu"):
        setattr(torch.Tensor, name, watch.counting(getattr(torch.Tensor, name)))
    with watch:
        train.do_test(cfg, model)
    return per_batch, watch.collectives


def on_rank(rank, port, project):
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(NUM_RANKS),
        LOCAL_WORLD_SIZE=str(NUM_RANKS),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        TORCHELASTIC_USE_AGENT_STORE="True",
    )
    torch.set_num_threads(1)
    sys.path.insert(0, str(project))
    import train

    train.comm.init_process_group(torch.device("cpu"), timeout_seconds=60)
    counts = evaluate(train)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    store.set(f"counts of {rank}", pickle.dumps(counts))
    dist.destroy_process_group()


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--project", type=Path, default=TEMPLATE_PROJECT)
    args = parser.parse_args()
    logging.basicConfig(level=logging.ERROR)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    mp.start_processes(on_rank, (store.port, args.project), nprocs=NUM_RANKS, start_method="spawn")
    counts = [pickle.loads(store.get(f"counts of {rank}")) for rank in range(NUM_RANKS)]
    reads = max(max(per_batch) for per_batch, _ in counts)
    messages = max(collectives for _, collectives in counts)
    num_batches = sum(len(per_batch) for per_batch, _ in counts)
    what = f"evaluation, {NUM_RANKS} ranks, {num_batches} batches: reads of the device"
    print_row(f"{what} at a batch", f"{reads}", "-", f"{reads}", "<= 0")
    print_row("evaluation of a test set: collectives", f"{messages}", "-", f"{messages}", "<= 2")


if __name__ == "__main__":
    main()
