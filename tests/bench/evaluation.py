"""What an evaluation of one test set costs two ranks: reads of the device, and collectives.

    python tests/bench/evaluation.py [--project DIR]

The real do_test of a project on the digits, in small batches.  Reads are those between two batches:
item(), float(), bool() and the like, tolist(), numpy() and cpu().  Collectives are those of the
whole evaluation: the means of the buffers, and the results.  Nothing is timed.
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
        self.reads = 0
        self.collectives = 0

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
    """Return (reads at each batch, collectives in all) on this rank."""
    cfg = train.get_cfg()
    cfg.MODEL.DEVICE = "cpu"
    cfg.TEST.BATCH_SIZE = 16
    cfg.DATASETS.TEST = cfg.DATASETS.TEST[:1]
    model = train.DistributedDataParallel(train.build_model(cfg))
    watch = Watch()
    reads_per_batch = []
    build_test_loader = train.build_test_loader

    def watched_loader(*args):
        for data in build_test_loader(*args):
            before = watch.reads
            yield data
            reads_per_batch.append(watch.reads - before)

    train.build_test_loader = watched_loader
    for name in ("tolist", "numpy", "cpu"):
        setattr(torch.Tensor, name, watch.counting(getattr(torch.Tensor, name)))
    with watch:
        train.do_test(cfg, model)
    return reads_per_batch, watch.collectives


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

    train.init_process_group(torch.device("cpu"), timeout_seconds=60)
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
    reads = max(max(reads_per_batch) for reads_per_batch, _ in counts)
    collectives = max(collectives for _, collectives in counts)
    num_batches = sum(len(reads_per_batch) for reads_per_batch, _ in counts)
    what = f"evaluation, {NUM_RANKS} ranks, {num_batches} batches: reads of the device at a batch"
    print_row(what, f"{reads}", "-", f"{reads}", "<= 0")
    what = "evaluation of a test set: collectives"
    print_row(what, f"{collectives}", "-", f"{collectives}", "<= 2")


if __name__ == "__main__":
    main()
