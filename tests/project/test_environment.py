"""What the log says of the machine, torch's switches, and the limit of open files."""

import contextlib
import logging
import os
import resource
import subprocess
import sys

import numpy as np
import pytest
import torch
from plumbing import comm, environment, launch
from plumbing.environment import log_environment, setup_backends
from plumbing.errors import SettingsError

CPU = torch.device("cpu")


@pytest.fixture
def backends():
    """Afterwards they are as before."""
    precision, benchmark = torch.get_float32_matmul_precision(), torch.backends.cudnn.benchmark
    yield torch.backends.cudnn
    torch.set_float32_matmul_precision(precision)
    torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic = benchmark, False
    torch.backends.cudnn.allow_tf32 = True
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def log(caplog):
    caplog.set_level(logging.INFO)
    return lambda: caplog.messages[-1]


def test_the_backends_follow_the_settings(backends):
    setup_backends("medium", cudnn_benchmark=True, deterministic=False)
    assert torch.get_float32_matmul_precision() == "medium"
    assert (backends.benchmark, backends.deterministic, backends.allow_tf32) == (True, False, True)
    assert not torch.are_deterministic_algorithms_enabled()


def test_deterministic_kernels_prevail_over_the_choice_of_fast_ones(backends):
    setup_backends("highest", cudnn_benchmark=True, deterministic=True)
    assert (backends.benchmark, backends.deterministic, backends.allow_tf32) == (False, True, False)
    assert torch.are_deterministic_algorithms_enabled()


def test_the_log_tells_the_environment_in_a_few_lines(log, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["train.py", "--config", "c.yaml"])
    log_environment(CPU)
    version = ".".join(map(str, sys.version_info[:3]))
    for words in (f"Python {version}", torch.__version__, np.__version__, " ".join(sys.argv)):
        assert words in log()
    assert log().count("\n") < 10


def test_a_missing_tensorboard_is_told_at_the_start(monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    with pytest.raises(SettingsError, match="tensorboard is not installed"):
        log_environment(CPU)


def git(folder, *words):
    author = ["-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run(["git", "-C", folder, *author, *words], check=True, capture_output=True)


def test_the_log_names_the_commit_and_says_if_the_code_has_changed(log, monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "argv", [str(tmp_path / "train.py")])
    log_environment(CPU)
    assert "code: no commit" in log()
    (tmp_path / "train.py").touch()
    git(tmp_path, "init")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-m", "first")
    log_environment(CPU)
    assert "code: commit " in log()
    assert "with changes" not in log()
    (tmp_path / "train.py").write_text("pass")
    log_environment(CPU)
    assert "with changes" in log()
    # git itself refuses a folder of somebody else.
    monkeypatch.setenv("GIT_TEST_ASSUME_DIFFERENT_OWNER", "1")
    log_environment(CPU)
    assert "with changes" in log()


def test_without_git_there_is_no_commit(monkeypatch):
    monkeypatch.setenv("PATH", "")
    assert environment._commit() == "no commit"


@pytest.fixture
def files_limit(monkeypatch):
    """files_limit(soft, hard) is what the machine allows; returns the limits that are set."""

    def allow(*limits):
        changed = []
        monkeypatch.setattr(resource, "getrlimit", lambda _: limits)
        monkeypatch.setattr(resource, "setrlimit", lambda _, limits: changed.append(limits))
        return changed

    return allow


@pytest.mark.parametrize("hard", [4096, resource.RLIM_INFINITY])
def test_a_thousand_ranks_get_the_open_files_that_they_need(files_limit, hard):
    changed = files_limit(1024, hard)
    environment.allow_open_files(64)
    assert changed == []
    environment.allow_open_files(1024)
    assert changed == [(2 * 1024 + 512, hard)]


def test_a_limit_of_open_files_that_is_high_enough_stays(files_limit):
    for limit in (100_000, resource.RLIM_INFINITY):
        changed = files_limit(limit, resource.RLIM_INFINITY)
        environment.allow_open_files(1024)
        assert changed == []


def test_too_few_open_files_are_one_line_before_the_ranks_connect(files_limit, monkeypatch):
    files_limit(1024, 1024)
    monkeypatch.setenv("WORLD_SIZE", "1024")
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "1")
    with pytest.raises(SettingsError, match="1024 ranks need 2560 open files .* allows 1024"):
        launch.init_process_group(torch.device("cpu"), 1.0)


def count_sockets():
    """How many sockets a rank has while it trains."""
    from plumbing.preemption import StopRequest

    def num_sockets():
        count = 0
        for name in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):
                count += os.readlink(f"/proc/self/fd/{name}").startswith("socket:")
        return count

    launch.init_process_group(torch.device("cpu"), 60.0)
    with StopRequest():
        comm.synchronize()
        return num_sockets()


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux lists open files")
def test_each_further_rank_costs_two_connections(on_ranks):
    counts = {number: on_ranks(number, count_sockets)[1].result for number in (2, 5)}
    # If torch connects ranks only when they speak to each other, as it can already, this is less.
    assert (counts[5] - counts[2]) / 3 == environment._CONNECTIONS_PER_RANK
