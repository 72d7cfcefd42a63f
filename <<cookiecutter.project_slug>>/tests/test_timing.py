"""Where the time goes: of an iteration, of the waits for data, of all else."""

import itertools
import logging

import pytest
import torch
from conftest import train_here
from ranks import run_on_ranks

import timing
import train
from plumbing import comm
from plumbing.comm import SettingsError
from timing import IterationTimer


class Clock:
    """Stands for the module time, and goes on only when told to."""

    def __init__(self):
        self.now = 0.0

    def wait(self, seconds):
        self.now += seconds

    def perf_counter(self):
        return self.now


@pytest.fixture
def clock(monkeypatch):
    fake = Clock()
    monkeypatch.setattr(timing, "time", fake)
    return fake


def loading(clock, *waits):
    """Yields a number after each of the waits, in seconds."""
    for number, wait in enumerate(waits):
        clock.wait(wait)
        yield number


def test_a_lap_is_the_mean_of_its_iterations_waits_included(clock):
    timer = IterationTimer(loading(clock, 0.5, 0.5, 1.25), 64)
    for number in timer:
        clock.wait(1.5)
        if number == 1:
            assert timer.lap() == {"time": 2.0, "data_time": 0.5, "samples_per_second": 32.0}
    assert timer.lap()["data_time"] == 1.25


def test_what_comes_after_a_lap_counts_in_none(clock):
    timer = IterationTimer(loading(clock, 0, 0, 0), 8)
    laps = []
    for _ in timer:
        clock.wait(2.0)
        laps.append(timer.lap()["time"])
        clock.wait(1000.0)  # an evaluation
    assert laps == [2.0, 2.0, 2.0]


def test_the_end_tells_the_time_of_training_apart_from_the_rest(clock, caplog):
    caplog.set_level(logging.INFO, logger="timing")
    with IterationTimer(loading(clock, 1.0, 1.0, 1.0, 1.0), 8) as timer:
        for number in timer:
            clock.wait(3.0)
            if number % 2 == 1:
                timer.lap()
                clock.wait(50.0)
    assert caplog.messages == [
        "Overall training speed: 4 iterations in 0:00:16.0 (4.0000 s / it)",
        "Total training time: 0:01:56.0 (0:01:40.0 on writing, saving and evaluating)",
    ]


def test_a_run_without_iterations_tells_nothing(caplog):
    caplog.set_level(logging.INFO, logger="timing")
    with IterationTimer([], 8) as timer:
        assert list(timer) == []
    assert caplog.messages == []


def test_the_end_closes_a_loader_that_goes_on_for_ever(clock):
    loader = loading(clock, *([1.0] * 9))
    with IterationTimer(loader, 8) as timer:
        assert list(itertools.islice(timer, 2)) == [0, 1]
    assert list(loader) == []


def laps_of_ranks():
    clock = timing.time = Clock()
    timer = IterationTimer(loading(clock, 1.0 + 4 * comm.get_rank()), 8)
    for _ in timer:
        clock.wait(1.0)
    return timer.lap()


def test_the_slowest_rank_counts():
    expected = {"time": 6.0, "data_time": 5.0, "samples_per_second": 8 / 6.0}
    assert [rank["laps_of_ranks"] for rank in run_on_ranks(laps_of_ranks)] == [expected] * 2


def test_a_loader_that_ends_before_the_training_is_an_error_and_no_short_run(tmp_path, monkeypatch):
    def build_train_loader(cfg, start_iter, *others):
        return itertools.islice(build(cfg, start_iter, *others), 5)

    build = train.build_train_loader
    monkeypatch.setattr(train, "build_train_loader", build_train_loader)
    with pytest.raises(SettingsError, match=r"^build_train_loader: rank 0 has no more batches"):
        train_here(tmp_path / "run")
    assert not (tmp_path / "run/results.json").exists()
    train_here(tmp_path / "five", "SOLVER.MAX_ITER 5")


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_the_memory_is_that_of_the_rank_that_has_taken_most(num_ranks, clock, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 3 * 2**20)
    monkeypatch.setattr(comm, "get_world_size", lambda: num_ranks)
    monkeypatch.setattr(comm, "gather_tensor", lambda numbers: torch.stack([numbers, 2 * numbers]))
    timer = IterationTimer(loading(clock, 1.0), 8)
    for _ in timer:
        clock.wait(1.0)
    assert timer.lap()["max_mem"] == 3.0 * num_ranks
