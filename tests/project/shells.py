"""Programs that tests start from the shell, and what becomes of their processes."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from conftest import ROOT, TIMEOUT


def started(*words, cwd=ROOT, **env):
    """Start ``python *words``: a process whose two streams are one."""
    return subprocess.Popen(
        [sys.executable, *map(str, words)],
        cwd=cwd,
        env={**os.environ, "OMP_NUM_THREADS": "1", **env},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        # As in a program in the foreground, wherever pytest runs.
        preexec_fn=default_signals,
    )


def default_signals():
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)


def wait_until(is_true, seconds=TIMEOUT):
    deadline = time.monotonic() + seconds
    while not is_true():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def pids_with(text):
    """Processes, zombies left out, whose command line holds a text."""
    pids = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            command = (folder / "cmdline").read_bytes().decode(errors="replace")
            state = (folder / "stat").read_text().rpartition(")")[2].split()[0]
            if text in command and state != "Z":
                pids.append(int(folder.name))
    return pids
