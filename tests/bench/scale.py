"""What a run costs on many ranks and with many samples: the measured rows of docs/scale.md.

    python tests/bench/scale.py [--project DIR] [--ranks 1024] [--rounds 5]

No cluster is needed: a rank is told that it is one of many, and all the others send what it sends.
(messages.py counts what ranks send to each other.)
"""

import argparse
import contextlib
import functools
import itertools
import json
import logging
import multiprocessing
import os
import pickle
import statistics
import subprocess
import sys
import tempfile
import time
import tracemalloc
from pathlib import Path

import torch
import torch.distributed as dist
from table import print_row

HERE = Path(__file__).resolve()
TEMPLATE_PROJECT = HERE.parents[2] / "<<cookiecutter.project_slug>>"
MIB = 2**20
BATCH_OF_RANK = 64
NUM_BATCHES = 1024  # of the order, that are timed
LOGGED_ITERS = 10**6
NUM_ROWS = 500  # of the log files
NAMES = ["total_loss", "loss_cls", "grad_norm", "lr", "time", "data_time", "samples_per_second"]
NUM_REQUESTS = 2000


@contextlib.contextmanager
def simulated_rank(rank, num_ranks):
    """Inside, this process believes that it is one of so many ranks, which all send the same."""
    from plumbing import comm

    names = ("get_rank", "get_world_size", "gather_tensor", "all_gather")
    before = [getattr(comm, name) for name in names]
    comm.all_gather = lambda data: [data] * num_ranks
    comm.get_rank = lambda: rank
    comm.get_world_size = lambda: num_ranks
    comm.gather_tensor = lambda values: values.expand(num_ranks, *values.shape).clone()
    try:
        yield
    finally:
        for name, function in zip(names, before):
            setattr(comm, name, function)


def seconds_of(function, rounds):
    """Seconds of this process's own time."""
    times = []
    for _ in range(rounds):
        start = time.process_time()
        function()
        times.append(time.process_time() - start)
    return statistics.median(times)


# Samples


def measure_sampler(num_ranks, rounds):
    from plumbing.samplers import TrainingBatchSampler

    with simulated_rank(num_ranks - 1, num_ranks):
        for exponent in (9, 10, 11, 12):
            batch_size = BATCH_OF_RANK * num_ranks
            start_iter = 5 * 10**exponent // batch_size  # in the sixth epoch
            build = functools.partial(
                TrainingBatchSampler, 10**exponent, batch_size, start_iter=start_iter
            )
            first = seconds_of(lambda build=build: next(iter(build())), rounds)
            tracemalloc.start()
            batches = iter(build())
            for _ in itertools.islice(batches, NUM_BATCHES):
                pass
            _, memory = tracemalloc.get_traced_memory()
            tracemalloc.stop()
            start = time.process_time()
            for _ in itertools.islice(batches, NUM_BATCHES):
                pass
            each = (time.process_time() - start) / NUM_BATCHES
            what = f"order of 10^{exponent} samples, one of {num_ranks} ranks"
            table = f"{8 * 10**exponent / MIB:.0f} MiB as a table"
            shown = f"{memory / MIB:.1f} MiB"
            print_row(f"{what}: memory", shown, table, shown, "<= 10 MiB")
            batch = f"{each * 1e6:.0f} us a batch"
            print_row(f"{what}: time", batch, f"{first * 1e3:.1f} ms for the first", batch)


# What ranks send


def measure_log(num_ranks, rounds):
    """The time that a rank computes on the values of all ranks, with three losses."""
    from plumbing.events import EventStorage

    for ranks in (8, 64, num_ranks):
        with simulated_rank(0, ranks):
            storage = EventStorage()

            def log(storage=storage):
                with storage:
                    for _ in range(20):
                        storage.step()
                        for name in ("loss_cls", "total_loss", "grad_norm"):
                            storage.put_scalar(name, torch.ones(()))
                    storage.reduce()

            seconds = seconds_of(log, rounds)
        shown = f"{seconds * 1e3:.1f} ms"
        message = f"{8192 * ranks / MIB:.2g} MiB arrive"
        print_row(f"reduce of 20 iterations on {ranks} ranks, computing", shown, message, shown)


def measure_settings(num_ranks):
    from defaults import get_cfg
    from plumbing.settings import leaves

    size = len(pickle.dumps({key: repr(value) for key, value in leaves(get_cfg())}))
    total = f"{size * num_ranks / MIB:.1f} MiB on each of {num_ranks} ranks"
    print_row("settings that a rank sends at the start", f"{size} bytes", total, f"{size} bytes")


# The launcher


def measure_store(num_ranks):
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    client = dist.PrefixStore("stop", server.clone())
    start = time.perf_counter()
    for _ in range(NUM_REQUESTS):
        client.check(["asked"])
    rate = NUM_REQUESTS / (time.perf_counter() - start)
    shown = f"{rate:.0f} /s"
    wanted = f"{2 * num_ranks} /s wanted by {num_ranks} ranks that watch for a signal"
    print_row("requests that the store answers to one client", shown, wanted, shown)


class CountingStore(dist.Store):
    """Hands on what a process group asks of its store, and counts the requests."""

    def __init__(self, store):
        super().__init__()
        self._store = store
        self.num_requests = 0

    def set(self, key, value):
        self.num_requests += 1
        self._store.set(key, value)

    def get(self, key):
        self.num_requests += 1
        return self._store.get(key)

    def wait(self, *args):
        self.num_requests += 1
        self._store.wait(*args)


def num_sockets():
    """How many sockets this process has."""
    count = 0
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            count += os.readlink(f"/proc/self/fd/{name}").startswith("socket:")
    return count


def connect(rank, num_ranks, folder):
    """Make the two groups of a training, and write what that took: sockets, requests."""
    before = num_sockets()
    store = CountingStore(dist.FileStore(f"{folder}/store {num_ranks}", num_ranks))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=num_ranks)
    dist.new_group(backend="gloo")
    dist.barrier()
    figures = [num_sockets() - before, store.num_requests]
    Path(folder, f"{rank} of {num_ranks}.json").write_text(json.dumps(figures))
    dist.barrier()
    dist.destroy_process_group()


def measure_connections(num_ranks, folder):
    """Connect 4 ranks and 8 ranks, and see what each further rank costs a rank."""
    context = multiprocessing.get_context("fork")
    figures = []
    for size in (4, 8):
        processes = []
        for rank in range(size):
            process = context.Process(target=connect, args=(rank, size, folder))
            process.start()
            processes.append(process)
        for process in processes:
            process.join()
        figures.append(json.loads(Path(folder, f"0 of {size}.json").read_text()))
    sockets, requests = [(of_8 - of_4) / 4 for of_4, of_8 in zip(*figures)]
    shown = f"{sockets:g} for each other rank"
    total = f"{sockets * (num_ranks - 1):.0f} on {num_ranks} ranks"
    print_row("sockets that a rank opens for gloo", shown, total, shown)
    shown = f"{requests:g} for each rank"
    total = f"{requests * num_ranks**2:.1e} of {num_ranks} ranks together"
    print_row("requests to the store of a rank that connects", shown, total, shown)


def measure_imports(project):
    code = "import sys, train; files = [getattr(m, '__file__', 0) for m in sys.modules.values()]"
    code += "; print(len(set(filter(None, files))))"
    done = subprocess.run([sys.executable, "-c", code], cwd=project, capture_output=True, text=True)
    shown = f"{int(done.stdout)} files"
    print_row("Python files that a rank reads when it starts", shown, "-", shown)


# What is written


def measure_checkpoint(num_ranks, folder):
    """The size of a checkpoint of the project's model, whose batch norms have buffers."""
    from defaults import get_cfg
    from model import build_model
    from plumbing.checkpoint import Checkpointer

    model = build_model(get_cfg())
    sizes = []
    for ranks in (1, num_ranks):
        with simulated_rank(0, ranks):
            Checkpointer(model, folder).save("model", iteration=1)
        sizes.append(Path(folder, "model.pth").stat().st_size)
    buffers = sum(buffer.nbytes for buffer in model.buffers())
    each = f"{(sizes[1] - sizes[0]) / num_ranks:.0f} bytes for each rank"
    print_row(
        "checkpoint of digits, buffers of all ranks", each, f"{buffers} bytes of buffers", each
    )


def measure_reading(folder, rounds):
    """The speed at which a checkpoint is read from memory, and checked."""
    from plumbing.checkpoint import Checkpointer, load_file

    path = Path(folder, "large.pth")
    Checkpointer(torch.nn.Linear(2048, 4096), folder).save("large")
    seconds = seconds_of(lambda: load_file(str(path)), rounds)
    shown = f"{path.stat().st_size / seconds / MIB:.0f} MiB/s"
    print_row("checksums of a checkpoint, on one core", shown, "-", shown)


def measure_log_files(folder):
    from plumbing.events import EventStorage, default_writers

    storage = EventStorage()
    writers = default_writers(folder, 10**6)
    for iteration in range(NUM_ROWS):
        with storage:
            storage.iter = 20 * iteration + 19
            for name in NAMES:
                storage.put_scalar(name, 1 / (iteration + 1))
            for writer in writers:
                writer.write()
    for what, pattern in (("metrics.json", "metrics.json"), ("TensorBoard", "events*")):
        size = sum(path.stat().st_size for path in Path(folder).glob(pattern)) / NUM_ROWS
        rows = LOGGED_ITERS // 20
        total = f"{size * rows / MIB:.0f} MiB"
        print_row(f"{what}: a row", f"{size:.0f} bytes", f"{rows} rows in 10^6 iterations", total)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--project", type=Path, default=TEMPLATE_PROJECT)
    parser.add_argument("--ranks", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    torch.set_num_threads(1)
    logging.basicConfig(level=logging.ERROR)
    sys.path.insert(0, str(args.project))
    with tempfile.TemporaryDirectory() as folder:
        # Its ranks are forked, so it comes before anything that starts a thread.
        measure_connections(args.ranks, folder)
        measure_sampler(args.ranks, args.rounds)
        measure_log(args.ranks, args.rounds)
        measure_settings(args.ranks)
        measure_checkpoint(args.ranks, folder)
        measure_reading(folder, args.rounds)
        measure_store(args.ranks)
        measure_imports(args.project)
        with tempfile.TemporaryDirectory() as logs:
            measure_log_files(logs)


if __name__ == "__main__":
    main()
