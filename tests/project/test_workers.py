"""Loader workers that fail, hang or are left behind: a run never stands still and always stops."""

import errno
import multiprocessing
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import torch
from conftest import ROOT, TIMEOUT
from plumbing import workers
from plumbing.errors import SettingsError
from plumbing.loading import InferenceLoader, TrainingLoader
from plumbing.samplers import TrainingBatchSampler
from torch.utils.data import Dataset


class Failing(Dataset):
    """Sample 3 calls a function; a sample is a number."""

    def __init__(self, fail):
        self.fail = fail

    def __len__(self):
        return 20

    def __getitem__(self, index):
        if index == 3:
            self.fail()
        return {"x": index}


def killed():
    os.kill(os.getpid(), signal.SIGKILL)


def out_of_memory_map():
    os.kill(os.getpid(), signal.SIGBUS)


def left():
    os._exit(7)


def asleep():
    time.sleep(1000)


def slow():
    time.sleep(1)


def endless():
    while True:
        pass


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    """A wait for a batch looks after the workers more often."""
    monkeypatch.setattr(workers, "POLL_SECONDS", 0.1)


def children():
    return set(multiprocessing.active_children())


def one_line(loader, seen):
    """The message of the error that ends a pass; no worker of it is left."""
    others = children()
    with pytest.raises(SettingsError) as caught:
        seen.extend(batch["x"].item() for batch in loader)
    assert children() == others
    message = str(caught.value)
    assert "\n" not in message
    assert message.startswith("DATALOADER.NUM_WORKERS: ")
    assert "test loader of Failing" in message
    return message


# A batch that does not come


@pytest.mark.parametrize("fail", [asleep, endless])
def test_a_worker_that_is_stuck_ends_in_one_line_after_the_limit(fail):
    loader = InferenceLoader(Failing(fail), 1, num_workers=2, timeout_seconds=0.5)
    seen = []
    message = one_line(loader, seen)
    assert seen == [0, 1, 2]
    for word in ("2 workers", "0.5 s (TIMEOUT_SECONDS)", "shared memory", "docker run --shm-size"):
        assert word in message


def test_a_slow_sample_is_waited_for_over_many_looks_at_the_workers():
    loader = InferenceLoader(Failing(slow), 1, num_workers=2, timeout_seconds=60)
    assert [batch["x"].item() for batch in loader] == list(range(20))


@pytest.mark.parametrize(
    ("fail", "cause"),
    [(killed, "SIGKILL"), (out_of_memory_map, "SIGBUS"), (left, "exit status 7")],
)
def test_a_worker_that_dies_is_one_line_where_its_batch_is_missing(fail, cause):
    seen = []
    message = one_line(InferenceLoader(Failing(fail), 1, num_workers=2), seen)
    assert seen == [0, 1, 2][: len(seen)]
    assert cause in message
    assert "--shm-size" in message


def test_a_worker_killed_while_the_process_computes_interrupts_nothing():
    before = signal.getsignal(signal.SIGCHLD)
    others = children()
    passing = iter(InferenceLoader(Failing(lambda: None), 1, num_workers=1))
    next(passing)
    (worker,) = children() - others
    worker.kill()
    worker.join()
    assert signal.getsignal(signal.SIGCHLD) is before
    with pytest.raises(SettingsError, match="SIGKILL"):
        list(passing)


class Large(Dataset):
    """A batch of it is larger than the shared memory below."""

    def __init__(self, kind):
        self.kind = kind

    def __len__(self):
        return 8

    def __getitem__(self, index):
        if self.kind == "numpy":
            return {"x": np.zeros(50_000)}
        return {"x": torch.zeros(50_000)}


def collate_anew(samples):
    """torch itself would put this batch into shared memory only when it is handed over."""
    return {"x": torch.zeros(400_000)}


FULL = """
import sys
sys.path[:0] = sys.argv[2:]
from test_workers import Large, collate_anew
from plumbing.loading import InferenceLoader

collate_fn = collate_anew if sys.argv[1] == "collate" else None
try:
    list(InferenceLoader(Large(sys.argv[1]), 4, num_workers=2, collate_fn=collate_fn))
except Exception as error:
    print(f"{type(error).__name__}: {error}")
"""
MOUNT = 'mount -t tmpfs -o size=64k tmpfs /dev/shm && exec "$@"'


@pytest.mark.parametrize("kind", ["torch", "numpy", "collate"])
def test_shared_memory_that_is_full_ends_in_one_line_at_once(kind):
    unshare = ["unshare", "-m", "sh", "-c", MOUNT, "sh"]
    try:
        allowed = subprocess.run([*unshare, "true"], capture_output=True).returncode == 0
    except FileNotFoundError:
        allowed = False
    if not allowed:
        pytest.skip("this system does not allow a mount of one's own")
    command = [*unshare, sys.executable, "-c", FULL, kind, ROOT, os.path.dirname(__file__)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT)
    assert done.stdout.startswith("SettingsError: DATALOADER.NUM_WORKERS: "), done.stderr
    (line,) = done.stdout.splitlines()
    for word in ("test loader of Large", "shared memory", "docker run --shm-size"):
        assert word in line


def no_room(*args, **kwargs):
    raise RuntimeError("unable to allocate shared memory(shm) for file </torch>: No space left")


def test_a_batch_that_does_not_fit_into_shared_memory_is_noticed_in_the_worker(monkeypatch):
    monkeypatch.setattr(torch.Tensor, "share_memory_", no_room)
    message = one_line(InferenceLoader(Failing(lambda: None), 1, num_workers=1), [])
    assert "No space left" in message
    assert "--shm-size" in message


def test_a_start_without_room_is_one_line(monkeypatch):
    def refuse(process):
        raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    monkeypatch.setattr(multiprocessing.process.BaseProcess, "start", refuse)
    with pytest.raises(SettingsError, match="cannot start the workers .*unavailable.*shm-size"):
        list(InferenceLoader(Failing(slow), 1, num_workers=1))


def test_a_data_set_that_cannot_be_sent_to_its_workers_is_one_line():
    method = multiprocessing.get_start_method()
    multiprocessing.set_start_method("forkserver", force=True)
    try:
        with pytest.warns(UserWarning, match="pickle"):  # torch's own
            message = one_line(InferenceLoader(Failing(lambda: None), 1, num_workers=1), [])
    finally:
        multiprocessing.set_start_method(method, force=True)
    assert "start method forkserver" in message
    assert "no lambdas" in message


# The end of workers


def training_loader(fail, **options):
    return TrainingLoader(Failing(fail), TrainingBatchSampler(20, 1), seed=0, **options)


def test_workers_that_are_asked_to_end_do_so_by_themselves():
    others = children()
    loader = training_loader(slow, num_workers=2)
    passing = iter(loader)
    next(passing)
    started = children() - others
    assert len(started) == 2
    loader.close()
    assert {worker.exitcode for worker in started} == {0}


class Stuck(Dataset):
    """The second worker never gives a sample; a file tells that it has begun."""

    def __init__(self, path):
        self.path = path

    def __len__(self):
        return 2

    def __getitem__(self, index):
        if torch.utils.data.get_worker_info().id == 1:
            self.path.touch()
            endless()
        return {"x": index}


def test_a_worker_that_is_stuck_is_killed_soon_after_it_was_asked(monkeypatch, tmp_path):
    monkeypatch.setattr(workers, "GRACE_SECONDS", 0.2)
    others = children()
    dataset = Stuck(tmp_path / "begun")
    loader = TrainingLoader(dataset, TrainingBatchSampler(2, 1), seed=0, num_workers=2)
    passing = iter(loader)
    next(passing)
    deadline = time.monotonic() + TIMEOUT
    while not dataset.path.exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    started = children() - others
    loader.close()
    assert sorted(worker.exitcode for worker in started) == [-signal.SIGKILL, 0]


STUCK = """
import sys
from pathlib import Path
sys.path[:0] = sys.argv[2:4]
from test_workers import Stuck, TrainingBatchSampler, TrainingLoader

dataset = Stuck(Path(sys.argv[4]))
loader = iter(TrainingLoader(dataset, TrainingBatchSampler(2, 1), seed=0, num_workers=2))
next(loader)
while not dataset.path.exists():
    pass
print("ready", flush=True)
if sys.argv[1] == "raise":
    raise KeyError("a bug")
next(loader)
"""


@pytest.mark.parametrize("end", ["raise", "kill"])
def test_no_worker_is_left_however_its_rank_ends(end, tmp_path):
    paths = [ROOT, os.path.dirname(__file__), tmp_path / "begun"]
    command = [sys.executable, "-c", STUCK, end, *paths]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as rank:
        assert rank.stdout.readline() == b"ready\n"
        if end == "kill":
            rank.kill()
        rank.communicate(timeout=TIMEOUT)  # until no process holds the other ends of the pipes
    assert rank.returncode == (1 if end == "raise" else -signal.SIGKILL)


class Handlers(Dataset):
    """Tells how its process takes signals."""

    def __len__(self):
        return 1

    def __getitem__(self, index):
        numbers = signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP
        return {"ignored": all(signal.getsignal(each) is signal.SIG_IGN for each in numbers)}


def test_workers_of_any_start_method_outlive_the_signals_that_stop_a_training():
    (batch,) = InferenceLoader(Handlers(), 1, num_workers=1)
    assert batch["ignored"].all()
