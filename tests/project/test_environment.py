"""What the log says of the machine, and torch's switches."""

import logging
import subprocess
import sys

import numpy as np
import pytest
import torch
from plumbing import environment
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
