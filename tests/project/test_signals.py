"""The second signal: it ends a process that is stuck, and its workers."""

import contextlib
import signal
import subprocess
import sys
import time

import pytest
from conftest import ROOT, TIMEOUT
from shells import wait_until

# Each script prints a line when the signals may come.
SCRIPT = """
import sys
sys.path.insert(0, {root!r})
import ctypes, logging, multiprocessing, os, signal, threading, time
from plumbing.signals import SIGNALS, SignalWatcher

logging.basicConfig(level="INFO", stream=sys.stdout, format="%(message)s")

def worker():
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    time.sleep(1000)

def stuck_in_c():
    mutex = ctypes.create_string_buffer(256)
    ctypes.CDLL(None).pthread_mutex_lock(mutex)
    ctypes.CDLL(None).pthread_mutex_lock(mutex)  # for ever, and no signal interrupts it

def stuck_with_the_log():
    logging.getLogger().handlers[0].acquire()
    stuck_in_c()

def stuck_in_an_endless_loop():
    while True:
        pass

def saving():
    watcher.is_stopping = True
    time.sleep({pause} + 1)

def until_asked():
    while not watcher.asked:
        time.sleep(0.05)
    time.sleep(1)

if __name__ == "__main__":
    for number in SIGNALS:  # as in a program in the foreground, wherever pytest runs
        signal.signal(number, signal.SIG_DFL)
    context = multiprocessing.get_context("fork")
    process = context.Process(target=worker, daemon=True)
    process.start()
    watcher = SignalWatcher()
    watcher.start()
    print("ready", process.pid, flush=True)
    {scene}()
    watcher.stop()
    process.kill()
    print("the end")
"""
PAUSE = 2.2


def run_scene(tmp_path, scene, *numbers, pause=PAUSE):
    """Send the signals, with a pause between two of them: (exit status, output, worker's pid)."""
    path = tmp_path / "script.py"
    path.write_text(SCRIPT.format(root=str(ROOT), scene=scene, pause=pause * len(numbers)))
    process = subprocess.Popen([sys.executable, str(path)], stdout=subprocess.PIPE, text=True)
    worker = int(process.stdout.readline().split()[1])
    for index, number in enumerate(numbers):
        if index > 0:
            time.sleep(pause)
        process.send_signal(number)
    try:
        output, _ = process.communicate(timeout=TIMEOUT)
    finally:
        process.kill()
    return process.returncode, output, worker


def lives(pid):
    with contextlib.suppress(OSError), open(f"/proc/{pid}/stat") as file:
        return file.read().rpartition(")")[2].split()[0] != "Z"
    return False


@pytest.mark.parametrize(
    ("scene", "number"),
    [
        ("stuck_in_c", signal.SIGTERM),
        ("stuck_in_c", signal.SIGINT),
        ("stuck_with_the_log", signal.SIGHUP),
        ("stuck_in_an_endless_loop", signal.SIGTERM),
    ],
)
def test_a_second_signal_ends_a_process_that_is_stuck_and_its_workers(tmp_path, scene, number):
    status, output, worker = run_scene(tmp_path, scene, number, number)
    assert status == 128 + number
    wait_until(lambda: not lives(worker), seconds=10)
    if scene != "stuck_with_the_log":
        assert "another signal after 2 s or more ends it at once" in output
        assert f"{number.name} again: this run ends at once" in output


def test_two_signals_within_two_seconds_are_one(tmp_path):
    signals = [signal.SIGINT, signal.SIGINT, signal.SIGTERM]
    status, output, _ = run_scene(tmp_path, "until_asked", *signals, pause=0.01)
    assert (status, output.splitlines()[-1]) == (0, "the end")


def test_a_repeated_sigterm_does_not_cost_the_save_of_a_run_that_stops(tmp_path):
    status, output, _ = run_scene(tmp_path, "saving", signal.SIGTERM, signal.SIGTERM)
    assert (status, output.splitlines()[-1]) == (0, "the end")


def test_sigint_ends_a_save_that_hangs(tmp_path):
    status, output, worker = run_scene(tmp_path, "saving", signal.SIGTERM, signal.SIGINT)
    assert status == 128 + signal.SIGINT
    wait_until(lambda: not lives(worker), seconds=10)
