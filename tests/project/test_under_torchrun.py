"""Runs from the shell, under torchrun and alone: what is reported, and how signals end them."""

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from conftest import HERE, ROOT, TIMEOUT, TORCHRUN, arguments, shell, train_here
from outcomes import assert_same_outcome, differences, model_of, rows_of, starts_of

SLOW = HERE / "slow.py"
FAULTY = HERE / "faulty.py"


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


@pytest.fixture
def begin(tmp_path):
    """begin(slow, words, launcher): a process of slow.py, when that has come to its slow part."""
    processes = []

    def call(slow, words="", launcher=()):
        mark = tmp_path / "started"
        command = (*launcher, SLOW, *arguments(tmp_path / "run", words))
        process = started(*command, SLOW=slow, STARTED=str(mark))
        processes.append(process)
        wait_until(lambda: mark.exists() or process.poll() is not None)
        assert process.poll() is None, process.stdout.read()
        return process

    yield call
    for process in processes:
        process.kill()
    for pid in pids_with(str(tmp_path / "run")):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


# An error is found in torchrun's report, and in the log of the rank.


def test_an_exception_on_one_rank_is_in_its_log_and_is_the_root_cause(tmp_path):
    done = shell(*TORCHRUN, FAULTY, *arguments(tmp_path / "run"), FAULT="bug")
    assert done.returncode == 1
    cause = done.stderr.partition("Root Cause")[2]
    assert re.search(r"rank\s*: 1 ", cause)
    assert "KeyError: 'a bug on rank 1'" in cause
    log = (tmp_path / "run/log.txt.rank1").read_text()
    assert "Traceback (most recent call last)" in log
    assert "KeyError: 'a bug on rank 1'" in log.splitlines()[-1]


def test_torchrun_shows_the_line_of_a_loss_that_is_not_finite_once(tmp_path):
    words = "LOG_PERIOD 20 SOLVER.CHECKPOINT_PERIOD 3 TEST.EVAL_PERIOD 7"
    done = shell(*TORCHRUN, FAULTY, *arguments(tmp_path / "run", words), FAULT="nan")
    assert done.returncode != 0
    message = "the loss is not finite at iteration 5 on rank 1: "
    assert done.stderr.count(f"\nerror: {message}") + done.stderr.startswith("error: ") == 1
    assert message in done.stderr.partition("Root Cause")[2]
    for name in ("log.txt", "log.txt.rank1"):
        assert message in (tmp_path / "run" / name).read_text()
    assert [path.name for path in (tmp_path / "run").glob("*.pth")] == ["model_0000002.pth"]


def test_an_exception_of_a_single_process_is_in_its_log(tmp_path):
    done = shell("-c", BUG, *arguments(tmp_path / "run"))
    assert done.returncode == 1
    assert "KeyError: 'a bug'" in done.stderr
    log = (tmp_path / "run/log.txt").read_text()
    assert "KeyError: 'a bug'" in log.splitlines()[-1]


BUG = """
import train
train.clip_grad_norm_ = lambda *_: {}["a bug"]
train.launch(train.main, train.parse_args(""))
"""


# Signals.  Nothing is lost, and a second one ends what is stuck.

EVALUATION = """
    SOLVER.MAX_ITER 20 TEST.EVAL_PERIOD 10 TEST.BATCH_SIZE 2 SOLVER.CHECKPOINT_PERIOD 100
"""


def test_a_signal_in_an_evaluation_loses_nothing_and_the_resume_evaluates_again(
    begin, on_ranks, tmp_path
):
    """The evaluation would take 45 s, and torchrun kills its ranks 30 s after the signal."""
    run = tmp_path / "run"
    process = begin("evaluation", EVALUATION, TORCHRUN)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=25)
    assert pids_with(str(run)) == []
    for name in ("log.txt", "log.txt.rank1"):
        assert (run / name).read_text().count("All ranks stop here") == 1
    assert [path.name for path in run.glob("*.pth")] == ["model_0000009.pth"]
    assert not (run / "results.json").exists()
    assert "model_0000009.pth" in (run / "log.txt").read_text().splitlines()[-1]

    for ranks in (
        on_ranks(2, train_here, run, f"{EVALUATION} --resume"),
        on_ranks(2, train_here, tmp_path / "whole", EVALUATION),
    ):
        assert [rank.code for rank in ranks] == [0, 0], ranks
    assert starts_of(run) == [10]
    assert_same_outcome(tmp_path / "whole", run)
    assert "digits_test/accuracy" in {row["iteration"]: row for row in rows_of(run)}[9]


STUCK = {
    "a sample in a worker": ("sample", "DATALOADER.NUM_WORKERS 2"),
    "an iteration": ("iteration", ""),
}


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize(("slow", "words"), STUCK.values(), ids=STUCK)
def test_a_second_signal_ends_a_run_that_is_stuck_and_its_workers(
    slow, words, number, begin, tmp_path
):
    process = begin(slow, words)
    process.send_signal(number)
    time.sleep(2.2)
    assert process.poll() is None
    process.send_signal(number)
    printed, _ = process.communicate(timeout=10)
    assert process.returncode == 128 + number
    assert f"{number.name} again: this run ends at once" in printed
    wait_until(lambda: pids_with(str(tmp_path / "run")) == [], seconds=10)


def test_a_worker_that_never_answers_ends_the_run_with_one_line(begin, tmp_path):
    process = begin("sample", "DATALOADER.NUM_WORKERS 2 TIMEOUT_SECONDS 3")
    printed, _ = process.communicate(timeout=TIMEOUT)
    assert process.returncode == 2
    (line,) = [line for line in printed.splitlines() if line.startswith("error: ")]
    for words in ("training loader", "TIMEOUT_SECONDS", "3"):
        assert words in line
    assert "Traceback" not in printed
    wait_until(lambda: pids_with(str(tmp_path / "run")) == [], seconds=10)


def test_a_closed_terminal_saves_the_run(begin, tmp_path):
    process = begin("all iterations", "SOLVER.MAX_ITER 1000 SOLVER.CHECKPOINT_PERIOD 1000")
    process.send_signal(signal.SIGHUP)
    process.communicate(timeout=TIMEOUT)
    assert process.returncode == 0
    run = tmp_path / "run"
    saved = (run / "last_checkpoint").read_text()
    assert torch.load(run / saved)["iteration"] == rows_of(run)[-1]["iteration"] < 999


def test_a_folder_in_use_is_refused_by_its_holder_and_ranks_without_torchrun_stop_and_save(
    begin, on_ranks, tmp_path
):
    """Only torchrun is killed: its ranks agree on an iteration, and a resume is exact."""
    run = tmp_path / "run"
    words = """SOLVER.CHECKPOINT_PERIOD 10000 TEST.EVAL_PERIOD -1 LOG_PERIOD 100
        SOLVER.LR_SCHEDULER_NAME constant"""
    process = begin("all iterations", f"{words} SOLVER.MAX_ITER 10000", TORCHRUN)
    ranks = [pid for pid in pids_with(str(run)) if pid != process.pid]
    refused = shell("train.py", *arguments(run, f"{words} --resume"))
    assert refused.returncode == 2
    holder = re.search(rf"{run} is in use by another job \((\d+) on (\S+)\)", refused.stderr)
    assert int(holder[1]) in ranks
    assert holder[2] == socket.gethostname()
    process.kill()
    wait_until(lambda: pids_with(str(run)) == [])
    logs = [(run / name).read_text() for name in ("log.txt", "log.txt.rank1")]
    assert "torchrun is gone" in "".join(logs)  # one of them may be the first to notice
    assert [log.count("All ranks stop here") for log in logs] == [1, 1]
    iteration = torch.load(run / (run / "last_checkpoint").read_text())["iteration"]
    words += f" SOLVER.MAX_ITER {iteration + 5}"
    for output, more in ((run, " --resume"), (tmp_path / "whole", "")):
        ranks = on_ranks(2, train_here, output, words + more)
        assert [rank.code for rank in ranks] == [0, 0], ranks
    assert differences(model_of(run), model_of(tmp_path / "whole")) == []


# Two launchers, as on two machines.


def free_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def on_two_nodes(tmp_path, words_of_node):
    """What the two launchers print together, each in a folder of its own; both have to fail."""
    rendezvous = ("--rdzv_backend", "c10d", "--rdzv_endpoint", f"127.0.0.1:{free_port()}")
    launcher = ("-m", "torch.distributed.run", "--nnodes", "2", "--nproc_per_node", "1")
    nodes = []
    for number, words in enumerate(words_of_node):
        folder = tmp_path / f"node {number}"
        folder.mkdir()
        command = (*launcher, *rendezvous, SLOW, *words)
        env = {"SLOW": "disk", "STARTED": str(tmp_path / "started")}
        nodes.append(started(*command, cwd=folder, **env))
    printed = [node.communicate(timeout=TIMEOUT)[0] for node in nodes]
    assert [node.returncode for node in nodes] == [1, 1], printed
    # The line stands on the node of rank 0.  The other one may only say that its peer is gone.
    return "\n".join(printed)


def test_other_settings_on_another_node_are_refused_before_anything_is_trained(tmp_path):
    output = tmp_path / "run"
    words = (arguments(output), arguments(output, "SOLVER.BASE_LR 0.05"))
    printed = on_two_nodes(tmp_path, words)
    # Either node may have rank 0.
    for values in (("0.3", "0.05"), ("0.05", "0.3")):
        line = "error: SOLVER.BASE_LR: {} on rank 0, but {} on rank 1: start all".format(*values)
        if line in printed:
            break
    else:
        pytest.fail(printed)
    assert not output.exists()


@pytest.mark.parametrize("resume", ["", "--resume"])
def test_a_disk_of_its_own_on_another_node_is_refused_before_anything_is_trained(tmp_path, resume):
    words = arguments("output", resume)
    printed = on_two_nodes(tmp_path, (words, words))
    assert "error: OUTPUT_DIR must be a folder that all nodes share: rank 1 on " in printed
    assert list(tmp_path.rglob("*.pth")) == []
    assert list(tmp_path.rglob("metrics.json")) == []
