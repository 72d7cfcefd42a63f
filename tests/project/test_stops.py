"""Signals to runs from the shell: nothing is lost, and a second one ends what is stuck."""

import contextlib
import os
import re
import signal
import socket
import time

import pytest
import torch
from conftest import HERE, TIMEOUT, TORCHRUN, arguments, shell, train_here
from outcomes import assert_same_outcome, differences, model_of, rows_of, starts_of
from shells import pids_with, started, wait_until

SLOW = HERE / "slow.py"


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
    process.communicate(timeout=TIMEOUT)
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
    "a sample in a worker": ("sample", "DATALOADER.NUM_WORKERS 2", signal.SIGINT),
    "an iteration": ("iteration", "", signal.SIGTERM),
}


@pytest.mark.parametrize(("slow", "words", "number"), STUCK.values(), ids=STUCK)
def test_a_second_signal_ends_a_run_that_is_stuck_and_its_workers(
    slow, words, number, begin, tmp_path
):
    process = begin(slow, words)
    process.send_signal(number)
    time.sleep(2.2)
    assert process.poll() is None
    process.send_signal(number)
    printed, _ = process.communicate(timeout=TIMEOUT)
    assert process.returncode == 128 + number
    assert f"{number.name} again: this run ends at once" in printed
    wait_until(lambda: pids_with(str(tmp_path / "run")) == [])


def test_a_worker_that_never_answers_ends_the_run_with_one_line(begin, tmp_path):
    process = begin("sample", "DATALOADER.NUM_WORKERS 2 TIMEOUT_SECONDS 3")
    printed, _ = process.communicate(timeout=TIMEOUT)
    assert process.returncode == 2
    (line,) = [line for line in printed.splitlines() if line.startswith("error: ")]
    for words in ("training loader", "TIMEOUT_SECONDS", "3"):
        assert words in line
    assert "Traceback" not in printed
    wait_until(lambda: pids_with(str(tmp_path / "run")) == [])


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
