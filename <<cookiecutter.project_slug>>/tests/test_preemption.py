"""Stopping by a signal, alone and on two ranks."""

import os
import signal
import subprocess
import sys
import threading
import time

import pytest
import torch.distributed as dist
from ranks import run_on_ranks

from data import signals_held
from plumbing import comm, preemption
from plumbing.preemption import SIGNALS, StopRequest


@pytest.fixture(autouse=True)
def own_handlers():
    handlers = {number: signal.getsignal(number) for number in SIGNALS}
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_stops_after_the_iteration_and_not_before_it_came(number):
    with StopRequest() as stop:
        assert not stop.agreed(0)
        os.kill(os.getpid(), number)
        assert stop.agreed(1)


def test_handlers_are_as_before_also_after_an_exception():
    class StoppedError(Exception):
        pass

    def handler(*_):
        raise StoppedError

    signal.signal(signal.SIGUSR1, handler)
    with pytest.raises(KeyError), StopRequest():
        raise KeyError
    assert signal.getsignal(signal.SIGUSR1) is handler
    with pytest.raises(StoppedError):
        signal.raise_signal(signal.SIGUSR1)


def test_a_signal_after_the_stop_changes_nothing_while_the_process_ends():
    with StopRequest() as stop:
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.agreed(0)
    os.kill(os.getpid(), signal.SIGTERM)
    os.kill(os.getpid(), signal.SIGUSR1)
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)  # the way out of what hangs


def test_each_request_is_its_own():
    with StopRequest() as stop:
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.agreed(0)
    with StopRequest() as stop:
        assert not stop.agreed(0)


def test_a_process_that_begins_while_signals_are_held_goes_on_and_this_one_gets_them_later():
    with StopRequest() as stop:
        with signals_held():
            child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
            for number in SIGNALS:
                signal.pthread_kill(threading.get_ident(), number)  # numpy's threads hold none
                child.send_signal(number)
            assert not stop.agreed(0)
        assert stop.agreed(0)
    child.communicate(b"\n", timeout=20)
    assert child.returncode == 0


class GoneStore:
    """Of a process group of which another rank is gone, after a signal came."""

    def clone(self):
        return self

    def check(self, keys):
        return True

    def set(self, key, value):
        pass

    def get(self, key):
        raise dist.DistStoreError("closed")


def test_a_request_that_another_rank_cannot_answer_does_not_hang(monkeypatch):
    """The next collective tells what is wrong; torchrun ends the job."""
    monkeypatch.setattr(comm, "get_world_size", lambda: 2)
    monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", GoneStore)
    monkeypatch.setattr(dist, "PrefixStore", lambda prefix, store: store)
    answers = []
    with StopRequest() as stop:
        asks = lambda: answers.extend(stop.agreed(iteration) for iteration in range(3))  # noqa: E731
        thread = threading.Thread(target=asks, daemon=True)
        thread.start()
        thread.join(timeout=10)
    assert answers == [False] * 3


def stops(asked_rank, asked_iteration, start_iter=0):
    """The last iteration of this rank, the first of them after the signal; -1 if not stopped."""
    preemption._POLL_SECONDS = 0.05  # of this rank
    with StopRequest(start_iter) as stop:
        for iteration in range(start_iter, 5000):
            if comm.get_rank() == asked_rank and iteration == asked_iteration:
                os.kill(os.getpid(), signal.SIGUSR1)
            time.sleep(0.001 * (1 + comm.get_rank()))  # the ranks are not in step
            if stop.agreed(iteration):
                break
        else:
            return -1
    os.kill(os.getpid(), signal.SIGTERM)  # although this rank was perhaps not asked before
    return iteration


def stops_all_if_one_is_asked():
    return stops(asked_rank=1, asked_iteration=105, start_iter=100)


def stops_all_if_all_are_asked():
    return stops(asked_rank=comm.get_rank(), asked_iteration=3)


def goes_on_unless_asked():
    with StopRequest() as stop:
        return any(stop.agreed(iteration) for iteration in range(1000))


@pytest.fixture(scope="module")
def both():
    """{name of a check: [what rank 0 returned, what rank 1 returned]}"""
    ranks = run_on_ranks(
        stops_all_if_one_is_asked, stops_all_if_all_are_asked, goes_on_unless_asked
    )
    return {name: [rank[name] for rank in ranks] for name in ranks[0]}


@pytest.mark.parametrize(
    ("name", "asked"), [("stops_all_if_one_is_asked", 105), ("stops_all_if_all_are_asked", 3)]
)
def test_all_ranks_stop_after_the_same_iteration(both, name, asked):
    first, second = both[name]
    assert first == second >= asked


def test_ranks_that_are_not_asked_go_on(both):
    assert both["goes_on_unless_asked"] == [False, False]


def test_a_rank_whose_torchrun_is_gone_dies_of_a_signal_as_any_program_does(monkeypatch):
    raised = []
    monkeypatch.setattr(comm, "get_world_size", lambda: 2)
    monkeypatch.setattr(signal, "raise_signal", raised.append)
    monkeypatch.setattr(StopRequest, "_watch", lambda self, number: None)  # the store is gone
    with StopRequest() as request:
        request._thread.join()
        os.kill(os.getpid(), signal.SIGUSR1)
        assert raised == [signal.SIGUSR1]
        assert signal.getsignal(signal.SIGUSR1) == signal.SIG_DFL
