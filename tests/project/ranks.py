"""Runs checks of this folder on several ranks, which are processes; one launch serves many."""

import os
import pickle

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from plumbing import launch


def run_on_ranks(*checks, num_ranks=2, **env):
    """Call the functions one after the other on every rank: [{name: what it returned}, ...]."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    args = store.port, num_ranks, env, checks
    mp.start_processes(_run, args, nprocs=num_ranks, start_method="forkserver")
    return [pickle.loads(store.get(f"results of {rank}")) for rank in range(num_ranks)]


def _run(rank, port, num_ranks, env, checks):
    os.environ.update(  # as torchrun does
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(num_ranks),
        LOCAL_WORLD_SIZE=str(num_ranks),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        TORCHELASTIC_USE_AGENT_STORE="True",
        **env,
    )
    torch.set_num_threads(1)
    launch.init_process_group(torch.device("cpu"), timeout_seconds=60)
    results = {check.__name__: check() for check in checks}
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    store.set(f"results of {rank}", pickle.dumps(results))
    dist.destroy_process_group()
