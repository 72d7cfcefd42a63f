"""What torchrun does to a run, and what becomes of it: restarts, signals, a full disk."""

import contextlib
import json
import os
import re
import resource
import signal
import subprocess
import sys
import tempfile
import time

import pytest
import torch
from conftest import descendants

CLOCK = {"time", "data_time", "samples_per_second", "eta_seconds"}
WORDS = """
    --config cfg.yaml MODEL.DEVICE cpu MODEL.WIDTH 8 SOLVER.MAX_ITER 40 LOG_PERIOD 4
    SOLVER.CHECKPOINT_PERIOD 10 TEST.EVAL_PERIOD 15 DATALOADER.NUM_WORKERS 2
"""
DRIVER = """
import os, signal, sys
sys.path.insert(0, os.getcwd())
import train

set_random_state = train.set_random_state

def faulty(seed, iteration=0, rank=0):
    first_try = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
    if (iteration, rank) == (24, 1) and first_try:
        os.kill(os.getpid(), signal.SIGKILL)
    set_random_state(seed, iteration, rank)

train.set_random_state = faulty
train.launch(train.main, train.parse_args(""))
"""


def torchrun(script, *options, output, words=WORDS):
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", *options]
    words = [*words.split(), "OUTPUT_DIR", str(output)]
    return [*launcher, "--nproc_per_node", "2", str(script), *words]


def environment():
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}


def run(project, command, seconds=400, **kwargs):
    """Run a command in a project; one that hangs is an error that says where its processes are."""
    with tempfile.TemporaryFile("w+") as printed, tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(
            command,
            cwd=project,
            env=environment(),
            stdout=printed,
            stderr=errors,
            **kwargs,
        )
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            show_stacks(process)
            pytest.fail(f"not done in {seconds} s\n{text_of(printed)}\n{text_of(errors)}")
        texts = (text_of(printed), text_of(errors))
        return subprocess.CompletedProcess(command, process.returncode, *texts)


def text_of(file):
    file.seek(0)
    return file.read()


def show_stacks(launcher):
    """End a launcher and what it has started; ranks and loader workers print their stacks."""
    pids = descendants(launcher.pid)
    launcher.kill()
    launcher.wait()
    # Workers come after their rank, and so they are asked first.
    for pid in reversed(pids):
        with contextlib.suppress(ProcessLookupError):
            # The ranks have enabled faulthandler, which prints at this signal.
            os.kill(pid, signal.SIGABRT)
        time.sleep(0.5)


def outcome(output):
    """What two runs must have in common to the bit."""
    model = torch.load(output / "model_final.pth")["model"]
    rows = [json.loads(line) for line in (output / "metrics.json").read_text().splitlines()]
    rows = [{k: v for k, v in row.items() if k not in CLOCK} for row in rows]
    return {name: value.tolist() for name, value in model.items()}, rows


@pytest.fixture(scope="module")
def undisturbed(project, tmp_path_factory):
    output = tmp_path_factory.mktemp("undisturbed") / "output"
    done = run(project, torchrun("train.py", output=output))
    assert done.returncode == 0, done.stderr
    return outcome(output)


def test_a_run_that_torchrun_restarts_goes_on_by_itself_and_ends_the_same(
    project, undisturbed, tmp_path
):
    driver = tmp_path / "driver.py"
    driver.write_text(DRIVER)
    done = run(project, torchrun(driver, "--max-restarts", "1", output=tmp_path / "output"))
    assert done.returncode == 0, done.stderr
    log = (tmp_path / "output" / "log.txt").read_text()
    assert re.findall(r"Resuming from .*model_(\d+)\.pth", log) == ["0000019"]
    assert outcome(tmp_path / "output") == undisturbed


def test_a_restart_does_not_take_the_run_of_somebody_else(project, tmp_path):
    (tmp_path / "model_0000009.pth").write_bytes(b"precious")
    done = run(project, torchrun("train.py", "--max-restarts", "1", output=tmp_path))
    assert done.returncode != 0
    assert "holds a run" in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["model_0000009.pth"]


def test_a_signal_to_torchrun_saves_ends_all_processes_and_a_resume_ends_the_same(
    project, undisturbed, tmp_path
):
    output = tmp_path / "output"
    slow = tmp_path / "slow.py"
    slow.write_text(
        DRIVER.replace("os.kill(os.getpid(), signal.SIGKILL)", "pass").replace(
            "    first_try", "    import time; time.sleep(0.2)\n    first_try"
        )
    )
    command = torchrun(slow, output=output)
    process = subprocess.Popen(command, cwd=project, env=environment(), stderr=subprocess.PIPE)
    deadline = time.monotonic() + 300
    while not (output / "metrics.json").exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=300)
    for name in ("log.txt", "log.txt.rank1"):
        assert (output / name).read_text().count("All ranks stop here") == 1
    saved = (output / "last_checkpoint").read_text()
    assert re.fullmatch(r"model_\d{7}\.pth", saved)
    assert (output / saved).is_file()
    left = subprocess.run(["pgrep", "-f", str(output)], capture_output=True, text=True)
    assert left.stdout == ""
    done = run(project, [*torchrun("train.py", output=output), "--resume"])
    assert done.returncode == 0, done.stderr
    model, rows = outcome(output)
    stop = int(re.search(r"\d+", saved).group())
    due = [row["iteration"] for row in undisturbed[1]]
    # The iteration after which the run stopped is logged as well.
    rows = [row for row in rows if row["iteration"] != stop or stop in due]
    assert (model, rows) == undisturbed


def test_a_full_disk_ends_in_one_line_and_leaves_the_files_as_they_were(project, tmp_path):
    output = tmp_path / "output"
    words = [*WORDS.split(), "OUTPUT_DIR", str(output), "SOLVER.CHECKPOINTS_TO_KEEP", "9"]
    words += ["DATALOADER.NUM_WORKERS", "0"]  # their shared memory would be limited as well
    assert run(project, [sys.executable, "train.py", *words]).returncode == 0
    before = {path: path.read_bytes() for path in output.glob("*.pth")}
    limit = 20 * 2**10  # bytes in a file: too few for a checkpoint

    done = run(
        project,
        [sys.executable, "train.py", *words, "--resume", "SOLVER.MAX_ITER", "60"],
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit)),
    )
    assert done.returncode == 2
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert "make room, then --resume" in line
    assert "Traceback" not in done.stderr
    assert {path: path.read_bytes() for path in output.glob("*.pth")} == before
    assert not list(output.glob("*.tmp"))


RANK_ONE = """
import os, signal, sys, time
sys.path.insert(0, os.getcwd())
import train

set_random_state = train.set_random_state

def faulty(seed, iteration=0, rank=0):
    if (iteration, rank) == (3, 1):
        FAULT
    set_random_state(seed, iteration, rank)

train.set_random_state = faulty
train.launch(train.main, train.parse_args(""))
"""


def run_with_fault(project, tmp_path, fault, words=WORDS):
    """Rank 1 does this in iteration 3: the finished torchrun, and the processes it left."""
    driver = tmp_path / "driver.py"
    driver.write_text(RANK_ONE.replace("FAULT", fault))
    done = run(project, torchrun(driver, output=tmp_path / "output", words=words))
    left = subprocess.run(["pgrep", "-f", str(driver)], capture_output=True, text=True)
    return done, left.stdout


def test_an_exception_on_one_rank_ends_the_job_and_is_shown_as_the_cause(project, tmp_path):
    done, left = run_with_fault(project, tmp_path, 'raise KeyError("lost by rank 1")')
    assert done.returncode == 1
    cause = done.stderr.partition("Root Cause")[2]
    assert re.search(r"rank\s*: 1 ", cause)
    assert "in faulty" in cause  # its traceback
    assert "KeyError: 'lost by rank 1'" in cause
    assert left == ""


STUCK_SAMPLE = """
import os, sys, time
sys.path.insert(0, os.getcwd())
import data, train

load = data.Digits.__getitem__

def faulty(self, index):
    if os.environ["RANK"] == "1" and time.time() - BEGAN > 5:
        time.sleep(1000)
    return load(self, index)

data.Digits.__getitem__ = faulty
BEGAN = time.time()
train.launch(train.main, train.parse_args(""))
"""


def test_a_sample_that_never_comes_is_the_cause_and_not_the_rank_that_waits(project, tmp_path):
    driver = tmp_path / "driver.py"
    driver.write_text(STUCK_SAMPLE)
    words = f"{WORDS} TIMEOUT_SECONDS 8 SOLVER.MAX_ITER 1000000 TEST.EVAL_PERIOD -1"
    done = run(project, torchrun(driver, output=tmp_path / "output", words=words))
    assert done.returncode == 1
    cause = done.stderr.partition("Root Cause")[2]
    assert re.search(r"rank\s*: 1 ", cause)
    assert "on rank 1 gave a batch within 8 s" in cause


def test_a_rank_that_hangs_ends_the_job_when_the_time_is_over(project, tmp_path):
    words = f"{WORDS} TIMEOUT_SECONDS 5"
    fault = "signal.signal(signal.SIGTERM, signal.SIG_DFL); time.sleep(1000)"  # else torchrun has
    done, left = run_with_fault(project, tmp_path, fault, words)  # to kill it, 30 s later
    assert done.returncode == 1
    cause = done.stderr.partition("Root Cause")[2]
    assert re.search(r"rank\s*: 0 ", cause)
    assert "for as long as TIMEOUT_SECONDS allows" in cause
    assert left == ""
