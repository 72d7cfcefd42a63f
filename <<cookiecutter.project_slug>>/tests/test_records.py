"""What a run leaves behind."""

import contextlib
import json

import pytest
import torch
from conftest import read_events

from defaults import get_cfg
from plumbing import comm
from plumbing.events import EventStorage, EventWriter
from records import open_writers


def writers_in(folder, start_iter=0, max_iter=10):
    cfg = get_cfg()
    cfg.OUTPUT_DIR, cfg.SOLVER.MAX_ITER = str(folder), max_iter
    return open_writers(cfg, start_iter)


def read_rows(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def scalar(value):
    return torch.tensor(float(value))


def test_what_is_left_is_written_at_the_end(tmp_path, lines):
    with EventStorage() as storage, writers_in(tmp_path) as writers:
        assert all(isinstance(writer, EventWriter) for writer in writers)
        storage.put_scalar("loss", scalar(1.5))
    assert read_rows(tmp_path / "metrics.json")[0]["loss"] == 1.5
    assert read_events(tmp_path).Scalars("loss")[0].value == 1.5
    assert len(lines()) == 1


def test_the_remaining_time_that_the_printer_finds_is_written_too(tmp_path, lines):
    with EventStorage() as storage, writers_in(tmp_path, max_iter=101):
        storage.put_scalar("time", 0.5)
    assert read_rows(tmp_path / "metrics.json") == [
        {"eta_seconds": 50.0, "iteration": 0, "time": 0.5}
    ]
    assert "eta: 0:00:50" in lines()[0]


def test_what_is_left_is_written_after_an_exception_too(tmp_path, lines):
    with (
        contextlib.suppress(KeyError),
        EventStorage(7) as storage,
        writers_in(tmp_path),
    ):
        storage.put_scalar("loss", scalar(1.5))
        raise KeyError
    assert read_rows(tmp_path / "metrics.json") == [{"iteration": 7, "loss": 1.5}]
    assert len(lines()) == 1


def test_a_writer_that_fails_at_the_end_keeps_no_other_from_writing(tmp_path):
    class Failing(EventWriter):
        def write(self):
            raise OSError("disk full")

    with EventStorage() as storage:
        storage.put_scalar("loss", scalar(1.5))
        (tmp_path / "metrics.json").mkdir()  # so that JSONWriter fails
        with pytest.raises(OSError, match="metrics"), writers_in(tmp_path):
            pass
    assert read_events(tmp_path).Scalars("loss")[0].value == 1.5


def test_a_resumed_run_replaces_the_last_iteration_and_what_came_after(tmp_path):
    for start_iter, iterations, value in ((0, range(6), 1.0), (4, range(3, 8), 2.0)):
        with (
            EventStorage(start_iter) as storage,
            writers_in(tmp_path, start_iter) as writers,
        ):
            for storage.iter in iterations:
                storage.put_scalar("loss", value, smoothing_hint=False)
                for writer in writers:
                    writer.write()
    expected = [(i, 1.0) for i in range(3)] + [(i, 2.0) for i in range(3, 8)]
    rows = read_rows(tmp_path / "metrics.json")
    assert [(row["iteration"], row["loss"]) for row in rows] == expected
    assert [(e.step, e.value) for e in read_events(tmp_path).Scalars("loss")] == expected


def test_only_the_main_process_has_writers(tmp_path, monkeypatch):
    monkeypatch.setattr(comm, "is_main_process", lambda: False)
    with EventStorage() as storage, writers_in(tmp_path) as writers:
        storage.put_scalar("loss", 1.0)
    assert writers == []
    assert list(tmp_path.iterdir()) == []
