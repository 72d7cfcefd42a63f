"""Stopping by a signal: alone, on two ranks, and without torchrun."""

import contextlib
import os
import signal
import subprocess
import sys
import time

import pytest
import torch.distributed as dist
from conftest import ROOT, TIMEOUT, TORCHRUN
from plumbing import comm, launch, preemption
from plumbing.preemption import SIGNALS, StopRequest, current_request, was_stopped
from ranks import run_on_ranks


@pytest.fixture(autouse=True)
def own_handlers():
    """As in a program that was started in the foreground, wherever pytest runs."""
    before = {number: signal.getsignal(number) for number in SIGNALS}
    for number in SIGNALS:
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


# A single process


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_stops_at_the_next_call_and_not_before_it_came(number):
    with StopRequest() as request:
        assert not request.agreed()
        assert not was_stopped()
        os.kill(os.getpid(), number)
        assert request.agreed()
        assert request.agreed()
    assert was_stopped()


def test_an_evaluation_finds_the_request():
    assert current_request() is None
    with contextlib.suppress(KeyError), StopRequest() as request:
        assert current_request() is request
        raise KeyError
    assert current_request() is None


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


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGINT])
def test_a_signal_that_is_ignored_stays_ignored(number):
    """nohup ignores SIGHUP, and a shell ignores SIGINT for what runs in the background."""
    signal.signal(number, signal.SIG_IGN)
    with StopRequest() as request:
        os.kill(os.getpid(), number)
        assert not request.agreed()
    assert signal.getsignal(number) == signal.SIG_IGN


def test_a_signal_after_the_stop_changes_nothing_while_the_process_ends():
    with StopRequest() as request:
        os.kill(os.getpid(), signal.SIGTERM)
        assert request.agreed()
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
        os.kill(os.getpid(), number)
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)  # the way out if something hangs


def test_each_request_is_its_own():
    with StopRequest() as request:
        os.kill(os.getpid(), signal.SIGTERM)
        assert request.agreed()
    with StopRequest() as request:
        assert not request.agreed()
        os.kill(os.getpid(), signal.SIGTERM)
        assert request.agreed()


def test_a_signal_to_a_forked_process_does_there_what_it_did_and_is_not_for_this_one():
    with StopRequest() as request:
        begun, end = os.pipe()
        child = os.fork()
        if child == 0:
            os.write(end, b"x")
            time.sleep(TIMEOUT)
            os._exit(0)
        os.read(begun, 1)
        os.kill(child, signal.SIGTERM)
        _, status = os.waitpid(child, 0)
        assert os.WTERMSIG(status) == signal.SIGTERM
        assert not request.agreed()


def test_the_pipe_of_the_signals_is_closed_and_the_former_one_is_back():
    old, old_end = os.pipe()
    os.set_blocking(old_end, False)
    before = signal.set_wakeup_fd(old_end)
    with StopRequest():
        open_files = len(os.listdir("/proc/self/fd"))
    assert len(os.listdir("/proc/self/fd")) < open_files
    assert signal.set_wakeup_fd(before) == old_end
    os.close(old)
    os.close(old_end)


# Two ranks


def stops(asked_rank, asked_call):
    """The number of the call at which this rank has stopped, or -1."""
    preemption._POLL_SECONDS = 0.05  # of this rank
    for number in SIGNALS:
        signal.signal(number, signal.SIG_DFL)
    with StopRequest() as request:
        for call in range(5000):
            if comm.get_rank() == asked_rank and call == asked_call:
                os.kill(os.getpid(), signal.SIGUSR1)
            time.sleep(0.001 * (1 + comm.get_rank()))  # the ranks are not in step
            if request.agreed():
                break
        else:
            return -1
        assert request.agreed()
    os.kill(os.getpid(), signal.SIGTERM)  # although this rank was perhaps not asked before
    return call


def stops_all_if_one_is_asked():
    return stops(asked_rank=1, asked_call=5)


def stops_all_if_all_are_asked():
    return stops(asked_rank=comm.get_rank(), asked_call=3)


def continues_unless_asked():
    with StopRequest() as request:
        return any(request.agreed() for _ in range(1000))


def finishes_although_asked_at_the_end():
    """One rank is asked after its last call; neither hangs."""
    signal.signal(signal.SIGUSR1, signal.SIG_DFL)
    with StopRequest() as request:
        answers = [request.agreed() for _ in range(10)]
        if comm.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGUSR1)
    return answers == [False] * 10


def leaves_with_an_error():
    with contextlib.suppress(KeyError), StopRequest():
        raise KeyError
    return comm.all_gather(comm.get_rank())


def stops_although_a_connection_broke():
    """Rank 1 loses its connection to the store; later rank 0 is asked."""
    check = dist.PrefixStore.check
    calls = []

    def breaks_once(store, keys):
        calls.append(keys)
        if comm.get_rank() == 1 and len(calls) == 2:
            raise dist.DistNetworkError("connection reset by peer")
        return check(store, keys)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist.PrefixStore, "check", breaks_once)
        call = stops(asked_rank=0, asked_call=400)
    return call, len(calls) > 2


def hands_it_on(was_asked, num_nodes=2):
    """Whether this rank, alone on its node, sends a signal to its parent, and no other one."""
    sent = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GROUP_WORLD_SIZE", str(num_nodes))
        patch.setenv("GROUP_RANK", str(comm.get_rank()))
        patch.setenv("LOCAL_RANK", "0")
        patch.setattr(preemption, "_was_asked", was_asked)
        patch.setattr(os, "kill", lambda *sent_to: sent.append(sent_to))
        preemption.stop_launcher()
    assert sent in ([], [(os.getppid(), signal.SIGTERM)])
    return bool(sent)


def hands_it_on_if_the_other_node_was_asked():
    return hands_it_on(was_asked=comm.get_rank() == 0)


def hands_it_on_if_both_nodes_were_asked():
    return hands_it_on(was_asked=True)


def hands_it_on_within_one_node():
    return hands_it_on(was_asked=comm.get_rank() == 0, num_nodes=1)


@pytest.fixture(scope="module")
def both():
    """{name of a check: [what rank 0 returned, what rank 1 returned]}"""
    ranks = run_on_ranks(
        stops_all_if_one_is_asked,
        stops_all_if_all_are_asked,
        continues_unless_asked,
        finishes_although_asked_at_the_end,
        leaves_with_an_error,
        stops_although_a_connection_broke,
        hands_it_on_if_the_other_node_was_asked,
        hands_it_on_if_both_nodes_were_asked,
        hands_it_on_within_one_node,
    )
    return {name: [rank[name] for rank in ranks] for name in ranks[0]}


@pytest.mark.parametrize(
    ("name", "asked"), [("stops_all_if_one_is_asked", 5), ("stops_all_if_all_are_asked", 3)]
)
def test_all_ranks_stop_at_the_same_call(both, name, asked):
    first, second = both[name]
    assert first == second >= asked


def test_ranks_that_are_not_asked_continue(both):
    assert both["continues_unless_asked"] == [False, False]


def test_a_rank_that_is_asked_after_its_last_call_finishes(both):
    assert both["finishes_although_asked_at_the_end"] == [True, True]


def test_ranks_that_leave_with_an_error_do_not_wait_for_each_other(both):
    assert both["leaves_with_an_error"] == [[0, 1], [0, 1]]


def test_a_broken_connection_of_one_rank_neither_stops_nor_hangs_the_others(both):
    (first, _), (second, has_polled_again) = both["stops_although_a_connection_broke"]
    assert first == second >= 400
    assert has_polled_again


@pytest.mark.parametrize(
    ("name", "who"),
    [
        ("hands_it_on_if_the_other_node_was_asked", [False, True]),
        ("hands_it_on_if_both_nodes_were_asked", [False, False]),
        ("hands_it_on_within_one_node", [False, False]),
    ],
)
def test_a_signal_is_handed_on_to_the_launcher_of_a_node_that_did_not_get_it(both, name, who):
    assert both[name] == who


def loses_the_other_rank():
    """Rank 0 is asked when rank 1 is gone: its calls do not hang, and the next signal ends it."""
    launch.init_process_group(launch.torch.device("cpu"), timeout_seconds=60)
    signal.signal(signal.SIGUSR1, signal.SIG_DFL)
    request = StopRequest()
    request.__enter__()
    comm.synchronize()
    if comm.get_rank() == 1:
        os._exit(9)
    os.kill(os.getpid(), signal.SIGUSR1)
    while request._phase is not preemption.Phase.FAILED:
        assert not request.agreed()
        time.sleep(0.05)
    assert not request.agreed()
    print("continues", flush=True)
    os.kill(os.getpid(), signal.SIGUSR1)
    time.sleep(TIMEOUT)


def enters_when_the_other_rank_is_gone():
    launch._MARGIN_SECONDS = 0.0
    launch.init_process_group(launch.torch.device("cpu"), timeout_seconds=5)
    comm.synchronize()
    if comm.get_rank() == 1:
        os._exit(9)
    with pytest.raises(RuntimeError), StopRequest():
        pass


def test_a_rank_that_waits_for_another_one_to_begin_waits_no_longer_than_the_limit(on_ranks):
    rank, _ = on_ranks(2, enters_when_the_other_rank_is_gone)
    assert rank.code == 0, rank.printed


def test_a_request_that_another_rank_cannot_answer_does_not_hang(on_ranks):
    """The next collective tells what is wrong; a signal does what it does to any program."""
    rank, _ = on_ranks(2, loses_the_other_rank)
    assert rank.code == -signal.SIGUSR1, rank.printed
    assert "continues" in rank.printed


# Without torchrun

WITHOUT_TORCHRUN = """
import sys
sys.path.insert(0, {root!r})
import os, signal, time
from pathlib import Path
import torch
from plumbing import comm
from plumbing.launch import init_process_group, launch
from plumbing.preemption import StopRequest

def main():
    init_process_group(torch.device("cpu"), 60)
    with StopRequest() as request:
        call = 0
        while not request.agreed():
            comm.all_gather(call)
            call += 1
            if comm.get_rank() == 0 and call == 20:
                os.kill(os.getppid(), signal.SIGKILL)
            time.sleep(0.01)
        calls = comm.all_gather(call)
    Path({output!r}, str(comm.get_rank())).write_text(str(calls))

launch(main)
"""


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_ranks_whose_torchrun_was_killed_stop_together(tmp_path, num_ranks):
    script = tmp_path / "script.py"
    script.write_text(WITHOUT_TORCHRUN.format(root=str(ROOT), output=str(tmp_path)))
    process = subprocess.Popen([sys.executable, *TORCHRUN[:-1], str(num_ranks), str(script)])
    assert process.wait(timeout=TIMEOUT) == -signal.SIGKILL
    deadline = time.monotonic() + TIMEOUT
    files = [tmp_path / str(rank) for rank in range(num_ranks)]
    while not all(file.exists() and file.read_text() for file in files):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    calls = {file.read_text() for file in files}
    assert len(calls) == 1
    assert len(set(eval(calls.pop()))) == 1
