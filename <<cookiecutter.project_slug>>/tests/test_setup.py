"""Before training: arguments, errors that are for the user, device, folder, random state."""

import errno
import fcntl
import logging
import multiprocessing
import os
import random
import signal
import time

import numpy as np
import pytest
import torch

from plumbing import comm
from plumbing.comm import NonFiniteError, SettingsError
from plumbing.setup import launch, set_random_state, setup_run
from train import parse_args

# Arguments


def parse(text):
    return parse_args(text.split())


@pytest.mark.parametrize(
    "text",
    [
        "--config c.yaml --resume --eval-only SEED -1 SOLVER.BASE_LR 0.1",
        "SEED -1 SOLVER.BASE_LR 0.1 --eval-only --resume --config c.yaml",
        "SEED -1 --resume --config c.yaml SOLVER.BASE_LR 0.1 --eval-only",
    ],
)
def test_flags_stand_in_any_order(text):
    args = parse(text)
    assert (args.config, args.resume, args.eval_only) == ("c.yaml", True, True)
    assert args.opts == ["SEED", "-1", "SOLVER.BASE_LR", "0.1"]


def test_flags_are_off_and_settings_none_unless_given():
    args = parse("--config c.yaml")
    assert (args.resume, args.eval_only, args.opts) == (False, False, [])


@pytest.mark.parametrize(
    "text", ["", "SEED 1", "--config", "--config c.yaml --unknown", "--config c.yaml --resum"]
)
def test_a_missing_file_or_an_unknown_flag_ends_the_program(text, capsys):
    with pytest.raises(SystemExit) as caught:
        parse(text)
    assert caught.value.code == 2
    assert "--config" in capsys.readouterr().err


# launch


@pytest.mark.parametrize("kind", [SettingsError, NonFiniteError])
def test_an_error_for_the_user_ends_the_program_with_one_line(kind, monkeypatch, capsys):
    def fail(word):
        raise kind(f"the {word} is wrong")

    for rank, expected in (("0", "error: the key is wrong\n"), ("1", "")):
        monkeypatch.setenv("RANK", rank)
        with pytest.raises(SystemExit) as caught:
            launch(fail, "key")
        assert caught.value.code == 2
        assert capsys.readouterr() == ("", expected)


def test_another_error_keeps_its_traceback():
    with pytest.raises(ZeroDivisionError):
        launch(lambda: 1 / 0)


def test_without_an_error_the_program_goes_on():
    done = []
    launch(done.append, 5)
    assert done == [5]


def test_the_ranks_part_at_the_end(monkeypatch):
    events = []
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "destroy_process_group", lambda: events.append("part"))
    launch(events.append, "train")
    assert events == ["train", "part"]


# Random state


def draws():
    return (torch.rand(3).tolist(), np.random.rand(3).tolist(), [random.random() for _ in range(3)])


def test_all_generators_are_a_function_of_seed_iteration_and_rank():
    seen = []
    for numbers in ((0, 0, 0), (0, 0, 1), (0, 1, 0), (1, 0, 0), (0, 1, 1), (2**40, 10**9, 999)):
        set_random_state(*numbers)
        first = draws()
        draws()
        set_random_state(*numbers)
        assert draws() == first
        seen.append(first)
    for values in zip(*seen):
        assert len({tuple(each) for each in values}) == len(seen)


def test_iteration_and_rank_are_0_by_default():
    set_random_state(3)
    first = draws()
    set_random_state(3, 0, 0)
    assert draws() == first


def test_generators_of_neighbouring_iterations_and_ranks_are_unrelated():
    values = []
    for iteration in range(100):
        for rank in range(10):
            set_random_state(0, iteration, rank)
            values.append([torch.rand(()).item(), np.random.rand(), random.random()])
    values = np.array(values)
    assert np.all(abs(values.mean(axis=0) - 0.5) < 0.05)
    for column in values.T:
        assert len(set(column)) == 1000
        assert abs(np.corrcoef(column[1:], column[:-1])[0, 1]) < 0.15


# Folder and log


@pytest.fixture
def start(tmp_path, monkeypatch):
    """start(folder, may_exist): set up a run; afterwards the log is as before."""
    root = logging.getLogger()
    handlers, level, root.handlers = root.handlers[:], root.level, []

    def run(folder=tmp_path / "run", may_exist=False):
        setup_run(str(folder), may_exist)
        return folder

    yield run
    for handler in root.handlers:
        handler.close()
    root.handlers = handlers
    root.setLevel(level)


def test_the_folder_is_made_and_the_log_goes_to_it_and_to_the_screen(start, capsys, tmp_path):
    folder = start(tmp_path / "new" / "run")
    logging.getLogger("some.name").info("a message")
    logging.getLogger("some.name").debug("a detail")
    log = (folder / "log.txt").read_text()
    assert "some.name]: a message" in log
    assert "a detail" not in log
    assert "a message" in capsys.readouterr().out


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
    folder = start(may_exist=True)
    logging.getLogger("name").info("only once")
    log = (folder / "log.txt").read_text()
    assert log.count("only once") == 1


def test_another_rank_has_a_log_of_its_own_and_no_screen(start, tmp_path, monkeypatch, capsys):
    (tmp_path / "run").mkdir()
    monkeypatch.setattr(comm, "get_rank", lambda: 3)
    monkeypatch.setattr(comm, "from_main_process", lambda function: None)
    folder = start()
    logging.getLogger("name").info("a message")
    assert "a message" in (folder / "log.txt.rank3").read_text()
    assert not (folder / "log.txt").exists()
    assert "a message" not in capsys.readouterr().out


@pytest.mark.parametrize(
    "name", ["model_0000009.pth", "last_checkpoint", "metrics.json", "results.json"]
)
def test_a_folder_that_holds_a_run_is_refused_unless_it_may(start, tmp_path, name):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / name).write_text("kept")
    with pytest.raises(SettingsError, match=rf"OUTPUT_DIR.*run.*{name}.*--resume"):
        start()
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == [name]
    folder = start(may_exist=True)
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


def train_for_ever(folder, may_exist, child_pid, at_work):
    """Set up a run and have a process of its own, as a loader worker is."""
    setup_run(folder, may_exist)
    child = os.fork()
    if child:
        child_pid.value = child
        at_work.set()
    time.sleep(100)


@pytest.mark.parametrize("may_exist", [False, True])
def test_a_folder_in_use_is_refused_untouched_until_that_job_is_dead(start, tmp_path, may_exist):
    context = multiprocessing.get_context("forkserver")
    child_pid, at_work = context.Value("i"), context.Event()
    args = str(tmp_path / "run"), False, child_pid, at_work
    job = context.Process(target=train_for_ever, args=args)
    job.start()
    assert at_work.wait(timeout=60)
    before = {path: path.read_bytes() for path in (tmp_path / "run").iterdir()}
    with pytest.raises(SettingsError, match=r"OUTPUT_DIR.*run is in use by another job") as caught:
        start(may_exist=may_exist)
    assert "\n" not in str(caught.value)
    assert {path: path.read_bytes() for path in (tmp_path / "run").iterdir()} == before
    job.kill()
    job.join()
    start(may_exist=may_exist)  # although its child lives on
    os.kill(child_pid.value, signal.SIGKILL)


def test_a_folder_that_cannot_be_locked_is_used_with_a_warning(start, monkeypatch, caplog):
    def lockf(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "lockf", lockf)
    start()
    (warning,) = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert "one job at a time" in warning


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
        start(may_exist=True)
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
            start(may_exist=True)
    else:
        start(may_exist=True)
