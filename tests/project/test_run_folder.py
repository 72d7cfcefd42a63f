"""The folder of a run: who may use it, restarts, nodes that do not share it, and the log."""

import errno
import fcntl
import logging
import multiprocessing
import os
import platform
import re
import signal
import time

import pytest
import torch
from plumbing import comm, run_folder
from plumbing.errors import SettingsError
from plumbing.run_folder import open_run
from ranks import run_on_ranks


@pytest.fixture
def start(tmp_path, monkeypatch):
    """start(folder, resume, eval_only): open a run; afterwards the log is as before."""
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    monkeypatch.setattr(run_folder, "_output_dir", None)
    root = logging.getLogger()
    handlers, level, root.handlers = root.handlers[:], root.level, []

    def run(folder=tmp_path / "run", resume=False, eval_only=False):
        open_run(str(folder), resume, eval_only)
        return folder

    yield run
    for handler in root.handlers:
        handler.close()
    root.handlers = handlers
    root.setLevel(level)


# The log


def test_the_folder_is_made_and_the_log_goes_to_it_and_to_the_screen(start, capsys, tmp_path):
    folder = start(tmp_path / "new" / "run")
    logging.getLogger("some.name").info("a message")
    logging.getLogger("some.name").debug("a detail")
    log = (folder / "log.txt").read_text()
    assert "some.name]: a message" in log
    assert "a detail" not in log
    assert "a message" in capsys.readouterr().out
    assert run_folder.output_dir() == str(folder)


def test_a_log_that_cannot_be_written_is_no_traceback_a_line(start, monkeypatch, capsys):
    def full(_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(logging, "raiseExceptions", True)
    start()
    monkeypatch.setattr(logging.getLogger().handlers[0].stream, "write", full, raising=False)
    logging.getLogger().info("a message")
    assert capsys.readouterr().err == ""


def test_the_log_of_a_resumed_run_is_appended_to_and_each_line_stands_once(start):
    start()
    folder = start(resume=True)
    logging.getLogger("name").info("only once")
    log = (folder / "log.txt").read_text()
    assert log.count("only once") == 1


def test_another_rank_has_a_log_of_its_own_and_no_screen(start, tmp_path, monkeypatch, capsys):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "launcher.txt").write_text("token: abc\n")
    opened = run_folder._Opened(is_restart=False, token="abc", warning="")
    monkeypatch.setattr(comm, "get_rank", lambda: 3)
    monkeypatch.setattr(comm, "from_main_process", lambda function: opened)
    folder = start()
    logging.getLogger("name").info("a message")
    assert "a message" in (folder / "log.txt.rank3").read_text()
    assert not (folder / "log.txt").exists()
    assert "a message" not in capsys.readouterr().out


# What stands in the folder


def test_the_answer_is_whether_to_resume(tmp_path, start):
    start()
    folder = str(tmp_path / "run")
    assert open_run(folder, True, False) is True
    assert open_run(folder, False, True) is False


@pytest.mark.parametrize(
    "name", ["model_0000009.pth", "last_checkpoint", "metrics.json", "results.json"]
)
def test_a_folder_that_holds_a_run_is_refused_unless_it_may(start, tmp_path, name):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / name).write_text("kept")
    with pytest.raises(SettingsError, match=rf"OUTPUT_DIR.*run.*{name}.*--resume"):
        start()
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == [name]
    for flags in ({"resume": True}, {"eval_only": True}):
        folder = start(**flags)
        assert (folder / name).read_text() == "kept"


def test_a_folder_that_holds_no_run_is_taken(start, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "notes.txt").write_text("kept")
    folder = start()
    names = sorted(path.name for path in folder.iterdir())
    assert names == ["launcher.txt", "log.txt", "notes.txt"]


def test_a_folder_that_cannot_be_made_is_an_error_in_one_line(start, tmp_path):
    (tmp_path / "file").touch()
    for folder in (tmp_path / "file", tmp_path / "file" / "run"):
        with pytest.raises(SettingsError, match=rf"OUTPUT_DIR.*{folder}") as caught:
            start(folder)
        assert "\n" not in str(caught.value)


def test_a_run_that_was_made_between_the_look_and_the_lock_is_refused(start, tmp_path, monkeypatch):
    lockf = fcntl.lockf

    def late(*args):
        (tmp_path / "run" / "metrics.json").touch()
        lockf(*args)

    monkeypatch.setattr(fcntl, "lockf", late)
    with pytest.raises(SettingsError, match=r"holds a run \(metrics.json\)"):
        start()


@pytest.mark.parametrize(
    "name",
    [
        *("log.txt", "log.txt.rank1", "metrics.json", "config.yaml"),
        *("results.json", "last_checkpoint", "model_final.pth", "model_0000009.pth.tmp"),
        *("model_best.json", "config.yaml.tmp"),
    ],
)
def test_a_folder_in_place_of_a_file_of_the_run_is_refused_in_one_line(start, tmp_path, name):
    (tmp_path / "run" / name).mkdir(parents=True)
    with pytest.raises(SettingsError, match=f"OUTPUT_DIR: .*{name}") as caught:
        start(resume=True)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "refused"), [("log.txt", True), ("model_final.pth", False), ("run", True)]
)
def test_a_file_that_cannot_be_written_is_refused_where_it_is_written_to(
    start, tmp_path, monkeypatch, name, refused
):
    (tmp_path / "run").mkdir()
    if name != "run":
        (tmp_path / "run" / name).touch()
    access = os.access  # root may do anything

    def forbidden(path, mode):
        return access(path, mode) and not (mode & os.W_OK and path.endswith(name))

    monkeypatch.setattr(os, "access", forbidden)
    if refused:
        with pytest.raises(SettingsError, match=f"OUTPUT_DIR: .*{name}"):
            start(resume=True)
    else:
        start(resume=True)


# One job at a time


def train_for_ever(folder, child_pid, at_work):
    """Open a run and have a process of its own, as a loader worker is."""
    open_run(folder, False, False)
    child = os.fork()
    if child:
        child_pid.value = child
        at_work.set()
    time.sleep(100)


@pytest.mark.parametrize("resume", [False, True])
def test_a_folder_in_use_is_refused_untouched_until_that_job_is_dead(start, tmp_path, resume):
    context = multiprocessing.get_context("forkserver")
    child_pid, at_work = context.Value("i"), context.Event()
    job = context.Process(target=train_for_ever, args=(str(tmp_path / "run"), child_pid, at_work))
    job.start()
    assert at_work.wait(timeout=300)
    before = {path: path.read_bytes() for path in (tmp_path / "run").iterdir()}
    with pytest.raises(SettingsError, match=r"OUTPUT_DIR.*run is in use by another job") as caught:
        start(resume=resume)
    assert "\n" not in str(caught.value)
    assert f"({job.pid} on {platform.node()})" in str(caught.value)
    assert {path: path.read_bytes() for path in (tmp_path / "run").iterdir()} == before
    job.kill()
    job.join()
    start(resume=resume)  # although its child lives on
    os.kill(child_pid.value, signal.SIGKILL)


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EIO])
def test_a_folder_that_cannot_be_locked_is_used_with_a_warning_in_the_log(
    start, monkeypatch, number
):
    def lockf(*_):
        raise OSError(number, "No locks available")

    monkeypatch.setattr(fcntl, "lockf", lockf)
    log = (start() / "log.txt").read_text()
    assert log.count("WARNING") == 1
    assert "only one job at a time" in log


def test_a_folder_where_fsync_is_refused_is_used(start, monkeypatch):
    def fsync(descriptor):
        raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr(os, "fsync", fsync)
    assert (start() / "launcher.txt").read_text().startswith("process: ")


# Restarts by torchrun


@pytest.fixture
def as_launched(monkeypatch):
    """as_launched(process, run_id): be a rank that this torchrun has started."""

    def be(process, run_id="none"):
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", run_id)
        monkeypatch.setattr(os, "getppid", lambda: process)

    return be


def test_a_restart_by_the_same_torchrun_is_a_resume(start, as_launched, tmp_path):
    folder = str(tmp_path / "run")
    as_launched(os.getpid())
    assert open_run(folder, False, False) is False
    (tmp_path / "run" / "metrics.json").touch()
    assert open_run(folder, False, False) is True
    assert open_run(folder, False, False) is True  # and once again


def test_a_second_run_by_another_torchrun_or_from_the_same_shell_is_refused(
    start, as_launched, monkeypatch, tmp_path
):
    as_launched(os.getpid())
    folder = start()
    (folder / "metrics.json").touch()
    for process, run_id in ((1, "none"), (os.getpid(), "another")):
        as_launched(process, run_id)
        with pytest.raises(SettingsError, match="holds a run.*--resume"):
            start()
    monkeypatch.delenv("TORCHELASTIC_RUN_ID")
    start(tmp_path / "alone")
    (tmp_path / "alone" / "metrics.json").touch()
    with pytest.raises(SettingsError, match="holds a run.*--resume"):
        start(tmp_path / "alone")


def test_a_restart_with_rank_0_on_another_node_is_a_resume_if_one_node_lived_on(
    start, monkeypatch, tmp_path
):
    launchers = []
    monkeypatch.setattr(
        comm, "all_gather", lambda data: launchers if data == "some launcher" else [data]
    )
    monkeypatch.setattr(run_folder, "_launcher", lambda: "some launcher")
    monkeypatch.setattr(run_folder, "_require_shared", lambda folder, token: None)
    folder = str(tmp_path / "run")
    launchers[:] = ["node a", "node b"]
    assert open_run(folder, False, False) is False
    (tmp_path / "run" / "metrics.json").touch()
    launchers[:] = ["node b"]
    assert open_run(folder, False, False) is True
    launchers[:] = ["new c", "node b"]
    assert open_run(folder, False, False) is True
    launchers[:] = ["new d"]
    with pytest.raises(SettingsError, match="holds a run.*--resume"):
        open_run(folder, False, False)


# Several nodes


def shares_a_folder():
    return open_run(os.environ["FOLDER"], False, False), os.path.exists(
        os.path.join(os.environ["FOLDER"], f"log.txt.rank{comm.get_rank()}")
    )


def has_a_disk_of_its_own():
    """The rank's view of the folder is its own: the names of the paths are the same."""
    os.chdir(os.path.join(os.environ["FOLDER"], str(comm.get_rank())))
    run_folder._SECONDS_TO_SEE_A_FILE = 0.5
    with pytest.raises(SettingsError) as caught:
        open_run("run", False, False)
    return str(caught.value), sorted(os.listdir())


def has_another_version():
    if comm.get_rank() == 1:
        torch.__version__ = "1.2.3"
    with pytest.raises(SettingsError) as caught:
        open_run("run", False, False)
    return str(caught.value)


def resumes_on_one_rank_only():
    with pytest.raises(SettingsError) as caught:
        open_run("run", comm.get_rank() == 1, False)
    return str(caught.value)


def evaluates_on_one_rank_only():
    with pytest.raises(SettingsError) as caught:
        open_run("run", False, comm.get_rank() == 0)
    return str(caught.value)


def test_ranks_share_a_folder_and_one_that_does_not_is_named_on_all(tmp_path):
    (tmp_path / "0").mkdir()
    (tmp_path / "1" / "run").mkdir(parents=True)
    (tmp_path / "1" / "run" / "launcher.txt").write_text("token: of an earlier run\n")
    checks = (
        shares_a_folder,
        has_a_disk_of_its_own,
        has_another_version,
        resumes_on_one_rank_only,
        evaluates_on_one_rank_only,
    )
    ranks = run_on_ranks(*checks, FOLDER=str(tmp_path))
    assert ranks[0]["shares_a_folder"] == (False, False)
    assert ranks[1]["shares_a_folder"] == (False, True)
    messages = [rank["has_a_disk_of_its_own"][0] for rank in ranks]
    assert messages[0] == messages[1]
    assert re.match(
        r"OUTPUT_DIR must be a folder that all nodes share: rank 1 on \S+ does not see", messages[0]
    )
    assert "log.txt" not in os.listdir(tmp_path / "0" / "run")  # before anything was logged
    for rank in ranks:
        assert rank["has_another_version"].startswith("version of torch: '2.")
        assert "'1.2.3' on rank 1" in rank["has_another_version"]
        flag = "--resume: False on rank 0, but True on rank 1"
        assert rank["resumes_on_one_rank_only"].startswith(flag)
        flag = "--eval-only: True on rank 0, but False on rank 1"
        assert rank["evaluates_on_one_rank_only"].startswith(flag)
