"""How a process begins and ends: device, other ranks, errors in one line, the end of the log."""

import errno
import json
import logging
import os
import subprocess
import sys
import time

import pytest
import torch
import torch.distributed as dist
from conftest import ROOT, TIMEOUT, TORCHRUN
from plumbing import comm, launch, preemption, run_folder
from plumbing.errors import NonFiniteError, SettingsError, StoppedBySignal

# Device


def test_the_device_is_the_cpu_without_a_gpu_or_if_chosen(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert launch.choose_device("auto") == launch.choose_device("cpu") == torch.device("cpu")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    assert launch.choose_device("cpu") == torch.device("cpu")


@pytest.mark.parametrize("name", ["auto", "cuda"])
def test_each_rank_has_the_gpu_of_its_local_rank(monkeypatch, name):
    chosen = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    monkeypatch.setenv("LOCAL_RANK", "3")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert launch.choose_device(name) == torch.device("cuda", 3)
    assert chosen == [torch.device("cuda", 3)]


@pytest.mark.parametrize("name", ["auto", "cuda"])
def test_more_ranks_than_gpus_is_an_error_that_counts_both(monkeypatch, name):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    with pytest.raises(SettingsError, match=r"4 ranks.*2 GPUs.*MODEL\.DEVICE"):
        launch.choose_device(name)


@pytest.mark.parametrize("cuda", [None, "13.0"])
def test_cuda_without_a_gpu_is_an_error_that_says_so(monkeypatch, cuda):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    with pytest.raises(SettingsError, match=r"^MODEL\.DEVICE: cuda, but there is no GPU") as caught:
        launch.choose_device("cuda")
    assert "nproc_per_node" not in str(caught.value)
    assert ("built without CUDA" in str(caught.value)) == (cuda is None)


# Other ranks


def test_a_rank_that_never_comes_is_waited_for_until_the_time_is_over(monkeypatch, capsys):
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "RANK": "0"}
    for name, value in {**address, "WORLD_SIZE": "2", "TORCHELASTIC_USE_AGENT_STORE": "1"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(TimeoutError, match="2 ranks.*TIMEOUT_SECONDS"):
        launch.init_process_group(torch.device("cpu"), timeout_seconds=1)
    with pytest.raises(SystemExit):
        launch.launch(launch.init_process_group, torch.device("cpu"), 1)
    assert capsys.readouterr().err.count("\n") == 1


def test_a_world_size_that_no_launcher_has_set_is_an_error_in_one_line(monkeypatch):
    for name in ("RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(SettingsError, match=r"WORLD_SIZE=2.*torchrun.*unset WORLD_SIZE") as caught:
        launch.init_process_group(torch.device("cpu"), timeout_seconds=1)
    assert "\n" not in str(caught.value)


def wait_for_a_slow_rank():
    launch._MARGIN_SECONDS = 0.0
    launch.init_process_group(torch.device("cpu"), timeout_seconds=3)
    comm.synchronize()
    if comm.get_rank() == 0:
        time.sleep(8)
    comm.synchronize()


def test_a_rank_that_waits_too_long_names_the_setting_in_one_line(on_ranks):
    _, waited = on_ranks(2, wait_for_a_slow_rank)
    assert waited.code == 2
    assert "Traceback" not in waited.printed
    (line,) = [line for line in waited.printed.splitlines() if line.startswith("error: ")]
    assert line.startswith("error: rank 1 has waited")
    assert "TIMEOUT_SECONDS" in line


def wait_for_a_key():
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    store.set_timeout(launch.timedelta(seconds=1))
    store.get("a key that nobody sets")


def test_torch_words_a_time_out_of_the_store_as_we_expect(capsys):
    with pytest.raises(SystemExit):
        launch.launch(wait_for_a_key)
    assert "TIMEOUT_SECONDS" in capsys.readouterr().err


def test_a_rank_that_has_lost_another_one_is_not_the_root_cause(on_ranks):
    lost, _ = on_ranks(2, lose_a_rank)
    assert lost.result


def lose_a_rank():
    launch.init_process_group(torch.device("cpu"), timeout_seconds=60)
    comm.synchronize()
    if comm.get_rank() == 1:
        os._exit(1)
    with pytest.raises(RuntimeError) as caught:
        comm.synchronize()
    return comm.has_lost_a_rank(caught.value)


# Errors


@pytest.fixture
def log_file(tmp_path, monkeypatch):
    """The file that the log of this process goes to."""
    path = tmp_path / "log.txt"
    handler = logging.FileHandler(path)
    monkeypatch.setattr(logging.getLogger(), "handlers", [handler])
    yield path
    handler.close()


@pytest.fixture
def error_file(tmp_path, monkeypatch):
    """The file in which torchrun looks for the exception of a rank."""
    path = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(path))
    return path


@pytest.mark.parametrize("kind", [SettingsError, NonFiniteError])
def test_an_error_for_the_user_ends_the_program_with_one_line(kind, monkeypatch, capsys):
    def fail(word):
        raise kind(f"the {word} is wrong")

    for rank, expected in (("0", "error: the key is wrong\n"), ("1", "")):
        monkeypatch.setenv("RANK", rank)
        with pytest.raises(SystemExit) as caught:
            launch.launch(fail, "key")
        assert caught.value.code == 2
        assert capsys.readouterr() == ("", expected)


@pytest.mark.parametrize("kind", [SettingsError, NonFiniteError])
def test_an_error_for_the_user_is_one_line_in_the_log_and_in_the_report_of_torchrun(
    kind, log_file, error_file
):
    def fail():
        try:
            raise KeyError("a cause")
        except KeyError:
            raise kind("the key is wrong") from None

    with pytest.raises(SystemExit):
        launch.launch(fail)
    (line,) = log_file.read_text().splitlines()
    assert line == "error: the key is wrong"
    report = json.loads(error_file.read_text())["message"]["extraInfo"]["py_callstack"]
    assert report == f"plumbing.errors.{kind.__name__}: the key is wrong\n"


def test_another_error_keeps_its_traceback_which_is_in_the_log_too(log_file, error_file, capsys):
    with pytest.raises(ZeroDivisionError):
        launch.launch(lambda: 1 / 0)
    assert "ZeroDivisionError: division by zero" in log_file.read_text()
    assert "Traceback (most recent call last)" in log_file.read_text()
    report = json.loads(error_file.read_text())["message"]["extraInfo"]["py_callstack"]
    assert "ZeroDivisionError" in report
    assert capsys.readouterr() == ("", "")  # Python prints it, once


def test_a_full_disk_is_one_line_with_the_remedy(capsys):
    def fail():
        raise OSError(errno.ENOSPC, "No space left on device", "model.pth")

    with pytest.raises(SystemExit):
        launch.launch(fail)
    assert capsys.readouterr().err.endswith("'model.pth': make room, then --resume\n")


def test_without_an_error_the_program_goes_on():
    done = []
    launch.launch(done.append, 5)
    assert done == [5]


def test_a_run_that_a_signal_stopped_in_an_evaluation_ends_well():
    def stop():
        raise StoppedBySignal

    launch.launch(stop)


def test_the_ranks_part_at_the_end(monkeypatch):
    events = []
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "destroy_process_group", lambda: events.append("part"))
    launch.launch(events.append, "train")
    assert events == ["train", "part"]


def test_the_last_line_of_the_log_says_where_the_results_are(monkeypatch, caplog):
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(run_folder, "_output_dir", "output/first")
    monkeypatch.setattr(launch, "last_checkpoint", lambda: "output/first/model_final.pth")
    launch.launch(lambda: None)
    for words in ("output/first", "model_final.pth", "tensorboard --logdir output/first"):
        assert words in caplog.messages[-1]


def test_the_last_line_of_a_stopped_run_says_how_to_continue(monkeypatch, caplog):
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(run_folder, "_output_dir", "output/first")
    monkeypatch.setattr(preemption, "_was_stopped", True)
    monkeypatch.setattr(launch, "last_checkpoint", lambda: "output/first/model_0000007.pth")
    launch.launch(lambda: None)
    assert "Stopped by a signal" in caplog.messages[-1]
    assert "--resume continues from output/first/model_0000007.pth" in caplog.messages[-1]


SCRIPT = """
import sys
sys.path.insert(0, {root!r})
import os
from plumbing.launch import launch
from plumbing.errors import SettingsError

def main():
    raise {error}

launch(main)
"""


@pytest.mark.parametrize(
    ("error", "root_cause"),
    [
        ("SettingsError('the key is wrong')", "plumbing.errors.SettingsError: the key is wrong"),
        ("KeyError('lost')", "KeyError: 'lost'"),
    ],
)
def test_torchrun_reports_the_error_as_root_cause(tmp_path, error, root_cause):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(root=str(ROOT), error=error))
    done = subprocess.run(
        [sys.executable, *TORCHRUN, str(script)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
    )
    assert done.returncode != 0
    _, _, report = done.stderr.partition("Root Cause")
    assert root_cause in report
    if "SettingsError" in error:
        lines = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
        assert lines == ["error: the key is wrong"]
        assert "most recent call last" not in report
