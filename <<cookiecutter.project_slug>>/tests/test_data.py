"""The timer around the loader; what the loader yields is held by test_train.py."""

import time

import pytest

from data import IterationTimer


class Clock:
    """Goes on only when it is told to."""

    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now

    def wait(self, seconds):
        self.now += seconds


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(time, "perf_counter", clock)
    return clock


def loading(clock, *seconds):
    for number, each in enumerate(seconds):
        clock.wait(each)
        yield number


def test_the_timer_hands_on_what_the_loader_yields_and_ends_with_it(clock):
    timer = IterationTimer(loading(clock, 0, 0, 0), 1)
    assert list(zip(range(2), timer)) == [(0, 0), (1, 1)]
    assert list(timer) == [2]


def test_the_last_wait_for_data_is_told_as_a_tensor(clock):
    timer = IterationTimer(loading(clock, 0.25, 2.0), 1)
    waits = []
    for _ in timer:
        clock.wait(9.0)
        waits.append(timer.data_time)
    assert [wait.item() for wait in waits] == [0.25, 2.0]


def test_a_lap_is_the_mean_of_its_iterations_waits_included(clock):
    timer = IterationTimer(loading(clock, 0.5, 0.5, 0.5), 64)
    for number in timer:
        clock.wait(1.5)
        if number == 1:
            assert timer.lap() == {"time": 2.0, "samples_per_second": 32.0}
    assert timer.lap() == {"time": 2.0, "samples_per_second": 32.0}


def test_what_comes_after_a_lap_counts_in_none(clock):
    timer = IterationTimer(loading(clock, 0, 0, 0), 8)
    laps = []
    for _ in timer:
        clock.wait(2.0)
        laps.append(timer.lap()["time"])
        clock.wait(1000.0)  # an evaluation
    assert laps == [2.0, 2.0, 2.0]
