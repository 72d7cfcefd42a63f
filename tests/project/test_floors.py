"""What a long run, a save and a start may cost: counts of bytes and steps, so no clock."""

import os
import resource
import sys
import tracemalloc
import zlib

import pytest
import torch
from conftest import shell
from plumbing.checkpoint import Checkpointer
from plumbing.events import (
    CommonMetricPrinter,
    EventStorage,
    JSONWriter,
    TensorboardXWriter,
    open_writers,
)
from torch import nn
from torch.utils.serialization import config

MIB = 2**20


@pytest.fixture
def traced_memory():
    """Call it for the bytes of Python's objects that are new since it was called first."""

    def measure():
        if not tracemalloc.is_tracing():
            tracemalloc.start()
        return tracemalloc.get_traced_memory()[0]

    yield measure
    tracemalloc.stop()


@pytest.fixture
def writers(tmp_path):
    """All writers, inside their context."""
    folder = str(tmp_path)
    made = [
        CommonMetricPrinter(10**7),
        JSONWriter(os.path.join(folder, "metrics.json")),
        TensorboardXWriter(folder),
    ]
    with EventStorage(), open_writers(made) as opened:
        yield opened


def log(storage, writers, iterations):
    """As the loop does when something is due in each iteration."""
    loss = torch.ones(())
    for iteration in iterations:
        storage.iter = iteration
        storage.put_scalars(total_loss=loss, grad_norm=loss)
        storage.put_scalar("lr", 0.1, smoothing_hint=False)
        storage.reduce()
        storage.put_scalars({"time": 0.5, "samples_per_second": 8.0}, smoothing_hint=False)
        for writer in writers:
            writer.write()


def test_after_100_000_iterations_a_storage_takes_the_memory_that_it_took_after_1_000(
    traced_memory,
):
    storage = EventStorage()

    def put(iterations):
        for storage.iter in iterations:
            storage.put_scalar("loss", 0.5 * storage.iter)
        return traced_memory()

    traced_memory()
    before = put(range(1000))
    assert put(range(1000, 100_000)) - before < 10_000


def test_the_memory_of_writers_is_bounded(writers, traced_memory):
    with EventStorage() as storage:
        log(storage, writers, range(1))  # what they import is not counted
        traced_memory()
        log(storage, writers, range(1, 1100))
        before = traced_memory()
        log(storage, writers, range(1100, 2200))
        assert traced_memory() - before < 50_000


def steps_of(function, *args):
    """How many instructions of Python a call takes."""
    count = 0

    def trace(frame, event, _):
        nonlocal count
        frame.f_trace_opcodes = True
        count += event == "opcode"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        function(*args)
    finally:
        sys.settrace(before)
    return count


def test_logging_a_late_iteration_takes_the_steps_of_an_early_one(writers):
    with EventStorage() as storage:
        log(storage, writers, range(1100))  # all histories are full
        early = steps_of(log, storage, writers, range(1100, 1102))
        log(storage, writers, range(1102, 3000))
        late = steps_of(log, storage, writers, range(3000, 3002))
    assert early > 1000
    assert abs(late - early) <= 0.01 * early


def peak_of_a_save(folder, num_tensors, num_rows, dtype):
    """MiB by which a save raises this process's largest resident size; a row has 512 numbers."""
    Checkpointer(nn.Linear(2, 2), folder).save("warm_up")
    dtype = getattr(torch, dtype)
    model = nn.ParameterList(torch.ones(num_rows, 512, dtype=dtype) for _ in range(num_tensors))
    scale = 1 if sys.platform == "darwin" else 1024
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    Checkpointer(model, folder).save("large")
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * scale / MIB


@pytest.mark.parametrize(
    ("num_tensors", "num_rows", "dtype"),
    [(64, 512, "float32"), (1, 64 * 512, "float32"), (1, 64 * 1024, "bfloat16")],
)
def test_a_save_takes_at_most_a_twentieth_of_the_state_as_memory(
    on_ranks, tmp_path, num_tensors, num_rows, dtype
):
    (rank,) = on_ranks(1, peak_of_a_save, str(tmp_path), num_tensors, num_rows, dtype)
    assert rank.code == 0, rank.printed
    assert (tmp_path / "large.pth").stat().st_size > 64 * MIB
    assert rank.result <= 64 / 20


@pytest.fixture
def summed(monkeypatch):
    """The sizes of all that zlib summed up, in bytes."""
    crc32 = zlib.crc32
    sizes = []

    def counted(data, *args):
        sizes.append(len(data))
        return crc32(data, *args)

    monkeypatch.setattr(zlib, "crc32", counted)
    return sizes


def test_a_save_sums_up_no_tensor_again_that_torch_has_summed_up(tmp_path, summed):
    Checkpointer(nn.Linear(512, 512), str(tmp_path)).save("x")
    size = (tmp_path / "x.pth").stat().st_size
    assert size > MIB
    assert 0 < sum(summed) < size / 20


def test_torch_sums_up_the_tensors_of_a_checkpoint_whatever_it_was_told(tmp_path):
    with config.patch("save.compute_crc32", False):
        Checkpointer(nn.Linear(2, 2), str(tmp_path)).save("x", iteration=9)
        assert config.save.compute_crc32 is False
    assert Checkpointer(nn.Linear(2, 2), str(tmp_path)).resume_or_load("") == {"iteration": 9}


def test_the_usage_is_shown_without_the_slow_parts_of_torch_and_without_tensorboard():
    slow = ["torch._dynamo", "torch._inductor", "sympy", "tensorboard", "torch.utils.tensorboard"]
    code = f"import sys, train; print([name for name in {slow} if name in sys.modules])"
    done = shell("-c", code)
    assert (done.stdout, done.stderr) == ("[]\n", "")


def test_a_resume_reads_only_the_end_of_the_metrics(tmp_path, traced_memory):
    path = tmp_path / "metrics.json"
    path.write_text("".join(f'{{"iteration": {i}, "loss": 0.5}}\n' for i in range(50_000)))
    writer = JSONWriter(str(path), start_iter=49_990)
    with EventStorage(50_000) as storage:
        storage.put_scalar("loss", 1.0)
        traced_memory()
        writer.write()
        assert tracemalloc.get_traced_memory()[1] < 100_000
    writer.close()
    lines = path.read_text().splitlines()
    assert len(lines) == 49_991
    assert lines[-2:] == ['{"iteration": 49989, "loss": 0.5}', '{"iteration": 50000, "loss": 1.0}']
