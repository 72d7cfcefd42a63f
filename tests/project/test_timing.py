"""Where the time goes: of an iteration, of the waits for data, of all else."""

import logging
from itertools import islice

import pytest
import torch
from plumbing import comm, timing
from plumbing.errors import SettingsError
from plumbing.timing import TimedLoader
from ranks import run_on_ranks
from torch.utils.data import DataLoader, IterableDataset


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


def test_times_are_means_over_the_iterations_since_the_last_call_waits_included(clock):
    timer = TimedLoader(loading(clock, 0.5, 0.5, 1.25), 64)
    for number in islice(timer, 3):
        clock.wait(1.5)
        if number == 1:
            assert timer.times() == {"time": 2.0, "data_time": 0.5, "samples_per_second": 32.0}
    assert timer.times()["data_time"] == 1.25


def test_what_comes_after_a_call_counts_in_no_iteration(clock):
    timer = TimedLoader(loading(clock, 0, 0, 0), 8)
    laps = []
    for _ in islice(timer, 3):
        clock.wait(2.0)
        laps.append(timer.times()["time"])
        clock.wait(1000.0)  # an evaluation
    assert laps == [2.0, 2.0, 2.0]


def test_the_end_tells_the_time_of_training_apart_from_the_rest(clock, caplog):
    caplog.set_level(logging.INFO, logger="plumbing.timing")
    with TimedLoader(loading(clock, 1.0, 1.0, 1.0, 1.0), 8) as timer:
        for number in islice(timer, 4):
            clock.wait(3.0)
            if number % 2 == 1:
                timer.times()
                clock.wait(50.0)
    assert caplog.messages == [
        "Overall training speed: 4 iterations in 0:00:16.0 (4.0000 s / it)",
        "Total training time: 0:01:56.0 (0:01:40.0 on writing, saving and evaluating)",
    ]


def test_a_run_without_iterations_tells_nothing(caplog):
    caplog.set_level(logging.INFO, logger="plumbing.timing")
    with TimedLoader([], 8) as timer:
        assert list(zip(range(0), timer)) == []
    assert caplog.messages == []


def test_the_end_closes_a_loader_that_goes_on_for_ever(clock):
    loader = loading(clock, *([1.0] * 9))
    with TimedLoader(loader, 8) as timer:
        assert list(islice(timer, 2)) == [0, 1]
    assert list(loader) == []


def laps_of_ranks():
    clock = timing.time = Clock()
    timer = TimedLoader(loading(clock, 1.0 + 4 * comm.get_rank()), 8)
    for _ in islice(timer, 1):
        clock.wait(1.0)
    return timer.times()


def test_the_slowest_rank_counts():
    expected = {"time": 6.0, "data_time": 5.0, "samples_per_second": 8 / 6.0}
    assert [rank["laps_of_ranks"] for rank in run_on_ranks(laps_of_ranks)] == [expected] * 2


def test_a_loader_that_ends_before_the_training_is_one_line_and_no_short_run(clock):
    seen = []
    with (
        pytest.raises(SettingsError, match=r"^build_train_loader: rank 0 has no more batches.*$"),
        TimedLoader(loading(clock, 0, 0), 8) as timer,
    ):
        seen.extend(number for _, number in zip(range(9), timer))
    assert seen == [0, 1]


def test_no_item_is_drawn_after_the_last_iteration(clock):
    loader = loading(clock, 0, 0, 0)
    assert [number for _, number in zip(range(2), TimedLoader(loader, 8))] == [0, 1]
    assert next(loader) == 2


def ends_in_an_error(clock, timer):
    """20 iterations, of which only the first is followed by ``times``."""
    with timer:
        for number in timer:
            clock.wait(3.0)
            if number == 0:
                timer.times()
                clock.wait(50.0)
            if number == 19:
                raise FloatingPointError


def test_after_an_error_the_summary_counts_all_iterations_that_ran(clock, caplog):
    caplog.set_level(logging.INFO, logger="plumbing.timing")
    with pytest.raises(FloatingPointError):
        ends_in_an_error(clock, TimedLoader(loading(clock, *([1.0] * 30)), 8))
    assert caplog.messages == [
        "Overall training speed: 20 iterations in 0:01:20.0 (4.0000 s / it)",
        "Total training time: 0:02:10.0 (0:00:50.0 on writing, saving and evaluating)",
    ]


class Stream(IterableDataset):
    """Has no length and no end."""

    def __iter__(self):
        number = 0
        while True:
            yield {"x": float(number)}
            number += 1


def test_a_stream_without_a_length_can_be_trained():
    batches = ([batch] for batch in DataLoader(Stream(), batch_size=4))
    with TimedLoader(batches, 4) as timer:
        seen = [item[0]["x"].tolist() for _, item in zip(range(2), timer)]
        assert timer.times()["samples_per_second"] > 0
    assert seen == [[0.0, 1.0, 2.0, 3.0], [4.0, 5.0, 6.0, 7.0]]


class Closes:
    def __init__(self):
        self.closed = False

    def __iter__(self):
        return iter(range(9))

    def close(self):
        self.closed = True


def test_the_end_closes_the_loader_also_after_an_error():
    loader = Closes()
    with pytest.raises(KeyError), TimedLoader(loader, 8) as timer:
        raise KeyError(next(iter(timer)))
    assert loader.closed


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_the_memory_is_that_of_the_rank_that_has_taken_most(num_ranks, clock, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 3 * 2**20)
    monkeypatch.setattr(comm, "get_world_size", lambda: num_ranks)
    monkeypatch.setattr(comm, "gather_tensor", lambda numbers: torch.stack([numbers, 2 * numbers]))
    timer = TimedLoader(loading(clock, 1.0), 8)
    for _ in islice(timer, 1):
        clock.wait(1.0)
    assert timer.times()["max_mem"] == 3.0 * num_ranks
