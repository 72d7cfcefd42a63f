"""What the writers leave behind: lines in the log, the settings in TensorBoard, results.json."""

import contextlib
import json
import logging
import math
import os
import re
import time

import pytest
import torch
from conftest import read_events
from plumbing import comm
from plumbing.events import (
    CommonMetricPrinter,
    EventStorage,
    EventWriter,
    JSONWriter,
    TensorboardXWriter,
    default_writers,
    load_results,
    open_writers,
    remove_results,
    save_results,
)


@pytest.fixture
def lines(caplog):
    """Call it for what the printer logged so far."""
    caplog.set_level(logging.INFO, logger="plumbing.events.printer")
    return lambda: caplog.messages


def writers_in(folder, start_iter=0, max_iter=10):
    return open_writers(default_writers(str(folder), max_iter, start_iter))


def read_rows(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def scalar(value):
    return torch.tensor(float(value))


# The writers of a run


def test_what_is_left_is_written_at_the_end(tmp_path, lines):
    with EventStorage() as storage, writers_in(tmp_path) as writers:
        assert all(isinstance(writer, EventWriter) for writer in writers)
        storage.put_scalar("loss", scalar(1.5))
    assert read_rows(tmp_path / "metrics.json")[0]["loss"] == 1.5
    assert read_events(tmp_path).Scalars("loss")[0].value == 1.5
    assert len(lines()) == 1


def test_what_is_left_is_written_after_an_exception_too(tmp_path, lines):
    with contextlib.suppress(KeyError), EventStorage(7) as storage, writers_in(tmp_path):
        storage.put_scalar("loss", scalar(1.5))
        raise KeyError
    assert read_rows(tmp_path / "metrics.json") == [{"iteration": 7, "loss": 1.5}]
    assert len(lines()) == 1


def test_the_remaining_time_that_the_printer_finds_is_written_too(tmp_path, lines):
    with EventStorage() as storage, writers_in(tmp_path, max_iter=101):
        storage.put_scalar("time", 0.5)
    assert read_rows(tmp_path / "metrics.json") == [
        {"eta_seconds": 50.0, "iteration": 0, "time": 0.5}
    ]
    assert "eta: 0:00:50" in lines()[0]


def test_a_writer_that_fails_at_the_end_keeps_no_other_from_writing(tmp_path):
    with EventStorage() as storage:
        storage.put_scalar("loss", scalar(1.5))
        (tmp_path / "metrics.json").mkdir()  # so that JSONWriter fails
        with pytest.raises(OSError, match="metrics"), writers_in(tmp_path):
            pass
    assert read_events(tmp_path).Scalars("loss")[0].value == 1.5


def test_a_resumed_run_replaces_the_last_iteration_and_what_came_after(tmp_path):
    for start_iter, iterations, value in ((0, range(6), 1.0), (4, range(3, 8), 2.0)):
        with EventStorage(start_iter) as storage, writers_in(tmp_path, start_iter) as writers:
            for storage.iter in iterations:
                storage.put_scalar("loss", value, smoothing_hint=False)
                for writer in writers:
                    writer.write()
    expected = [(i, 1.0) for i in range(3)] + [(i, 2.0) for i in range(3, 8)]
    rows = read_rows(tmp_path / "metrics.json")
    assert [(row["iteration"], row["loss"]) for row in rows] == expected
    assert [(e.step, e.value) for e in read_events(tmp_path).Scalars("loss")] == expected


@pytest.mark.parametrize("make", [default_writers, lambda folder, _: [JSONWriter(folder + "/m")]])
def test_only_the_main_process_has_writers(tmp_path, monkeypatch, make):
    monkeypatch.setattr(comm, "is_main_process", lambda: False)
    with EventStorage() as storage, open_writers(make(str(tmp_path), 10)) as writers:
        storage.put_scalar("loss", 1.0)
    assert list(writers) == []
    assert list(tmp_path.iterdir()) == []


def test_tensorboard_is_not_imported_before_there_is_something_to_write(tmp_path):
    with EventStorage(), writers_in(tmp_path) as writers:
        for writer in writers:
            writer.write()
    assert list(tmp_path.iterdir()) == []


def test_a_text_is_shown_once_for_each_start_of_a_run(tmp_path):
    def write_run(start_iter, text):
        writer = TensorboardXWriter(str(tmp_path), purge_step=start_iter, text=text)
        with EventStorage(start_iter) as storage:
            for storage.iter in range(start_iter, 6):
                storage.put_scalar("loss", 1.0)
                writer.write()
        writer.close()
        events = read_events(tmp_path).Tensors("settings/text_summary")
        return {event.step: event.tensor_proto.string_val[0].decode() for event in events}

    assert write_run(0, "A:\n  B: 1") == {0: "    A:\n      B: 1\n"}
    assert write_run(3, "C: 2") == {0: "    A:\n      B: 1\n", 3: "    C: 2\n"}


# CommonMetricPrinter


def test_the_printer_shows_the_fields_in_order(lines):
    with EventStorage() as storage:
        for iteration in range(9, 12):
            storage.iter = iteration
            storage.put_scalars(loss_cls=scalar(iteration / 3), grad_norm=scalar(2))
            storage.put_scalars({"loss_mask": scalar(1), "[metric]x": scalar(0.123456)})
            storage.reduce()
            storage.put_scalars(hidden=1.0, time=0.25 * iteration, data_time=0.5)
            storage.put_scalars(samples_per_second=1234.4, lr=1e-3, smoothing_hint=False)
        CommonMetricPrinter(max_iter=112, window_size=2).write()
        assert storage.latest()["eta_seconds"] == (275.0, 11)
    assert lines() == [
        " eta: 0:04:35  iter: 11  loss_cls: 3.5  grad_norm: 2  loss_mask: 1  [metric]x: 0.1235"
        "  time: 2.5000  last_time: 2.7500  data_time: 0.5000  last_data_time: 0.5000"
        "  sample/s: 1234  lr: 0.001"
    ]


def test_missing_fields_show_nothing_and_a_missing_rate_shows_as_such(lines):
    with EventStorage(3) as storage:
        storage.put_scalar("loss", scalar(1.5))
        CommonMetricPrinter().write()
    assert lines() == [" iter: 3  loss: 1.5  lr: N/A"]


def test_the_printer_shows_nothing_before_anything_was_put(lines):
    with EventStorage():
        CommonMetricPrinter(10).write()
    assert lines() == []


def test_the_printer_ends_with_the_memory_of_a_gpu(lines):
    with EventStorage() as storage:
        storage.put_scalars(loss=scalar(1))
        storage.put_scalars(lr=0.1, max_mem=1234.5, smoothing_hint=False)
        CommonMetricPrinter().write()
    assert lines() == [" iter: 0  loss: 1  lr: 0.1  max_mem: 1234M"]


def test_without_times_the_eta_comes_from_the_lines_before(lines, monkeypatch):
    with EventStorage(0) as storage:
        printer = CommonMetricPrinter(max_iter=26)
        for storage.iter, now in ((0, 100.0), (5, 110.0)):
            storage.put_scalar("loss", scalar(1))
            monkeypatch.setattr(time, "perf_counter", lambda now=now: now)
            printer.write()
            monkeypatch.undo()
    assert "eta" not in lines()[0]
    assert lines()[1].startswith(" eta: 0:00:40  iter: 5")


@pytest.mark.parametrize("seconds", [math.nan, math.inf])
def test_a_time_that_is_not_finite_gives_no_eta_and_ends_no_run(lines, seconds):
    with EventStorage() as storage:
        storage.put_scalar("time", seconds)
        CommonMetricPrinter(max_iter=10).write()
    assert lines()[0].startswith(" iter: 0  time: ")
    assert "eta_seconds" not in storage.latest()


def test_a_run_without_end_has_an_eta(lines):
    with EventStorage() as storage:
        storage.put_scalar("time", 0.5)
        CommonMetricPrinter(max_iter=10**18).write()
    assert re.match(r" eta: \d+ days, 0:00:00  iter: 0 ", lines()[0])


def test_no_iteration_is_printed_twice_nor_one_past_the_last(lines):
    with EventStorage(8) as storage:
        printer = CommonMetricPrinter(max_iter=10)
        for iteration in (8, 8, 9, 9, 10, 11):
            storage.iter = iteration
            storage.put_scalar("loss", scalar(1))
            printer.write()
    assert [line.partition("iter: ")[2].split()[0] for line in lines()] == ["8", "9"]
    assert lines()[1].startswith(" eta: 0:00:00")


def resumed_storage():
    """A storage whose earlier session, on a slow machine with a GPU, logged iterations 0 to 29."""
    storage, other = EventStorage(), EventStorage()
    for storage.iter in range(30):
        storage.put_scalar("total_loss", storage.iter)
        storage.put_scalars(
            dict.fromkeys(["time", "data_time", "samples_per_second", "max_mem"], 9.0),
            smoothing_hint=False,
        )
    other.load_state_dict(storage.state_dict())
    return other


def test_the_times_in_the_log_are_those_of_this_session(lines):
    with resumed_storage() as storage:
        printer = CommonMetricPrinter(max_iter=133)
        for storage.iter, seconds in ((30, 1.0), (31, 3.0)):
            storage.put_scalar("total_loss", storage.iter)
            storage.put_scalars(time=seconds, data_time=0.5, smoothing_hint=False)
            printer.write()
    first, second = (line.split("  ") for line in lines())
    assert first == [
        *(" eta: 0:01:42", "iter: 30", "total_loss: 20.5", "time: 1.0000", "last_time: 1.0000"),
        *("data_time: 0.5000", "last_data_time: 0.5000", "lr: N/A"),
    ]
    assert second[3:5] == ["time: 2.0000", "last_time: 3.0000"]


def test_before_the_first_time_of_a_session_there_is_no_eta(lines):
    with resumed_storage() as storage:
        storage.iter = 30
        storage.put_scalar("total_loss", 1.0)
        CommonMetricPrinter(max_iter=100).write()
    assert lines() == [" iter: 30  total_loss: 19.5  lr: N/A"]


@pytest.mark.parametrize("iteration", [29, 30])
def test_a_session_that_ends_before_its_first_iteration_prints_no_old_line(lines, iteration):
    with resumed_storage() as storage:
        storage.iter = iteration
        CommonMetricPrinter(max_iter=100).write()
    assert lines() == []


# results.json


def test_results_are_kept_and_those_that_are_not_finite_become_null(tmp_path):
    results = {"digits_test/accuracy": 0.75, "digits_test/nll": math.inf, "count": 3}
    save_results(str(tmp_path), 99, results)
    assert json.loads((tmp_path / "results.json").read_text()) == {
        "iteration": 99,
        "digits_test/accuracy": 0.75,
        "digits_test/nll": None,
        "count": 3.0,
    }
    loaded = load_results(str(tmp_path), 99)
    assert math.isnan(loaded.pop("digits_test/nll"))
    assert loaded == {"digits_test/accuracy": 0.75, "count": 3.0}


def test_a_shorter_run_has_no_results_of_a_longer_one(tmp_path):
    save_results(str(tmp_path), 9, {"x": 1.0})
    assert load_results(str(tmp_path), 5) == {"x": 1.0}
    assert load_results(str(tmp_path), 10) is None


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"iteration": 9, "x": "much"}', '{"iteration"'])
def test_results_that_were_damaged_are_as_good_as_none(tmp_path, text):
    assert load_results(str(tmp_path), 9) is None
    (tmp_path / "results.json").write_text(text)
    assert load_results(str(tmp_path), 9) is None


def test_a_run_that_continues_has_no_results_of_a_shorter_one(tmp_path):
    save_results(str(tmp_path), 3, {"x": 1.0})
    with EventStorage(4), writers_in(tmp_path, 4):
        assert not (tmp_path / "results.json").exists()
    remove_results(str(tmp_path))  # without one too


def test_only_the_main_process_writes_and_removes_results(tmp_path, monkeypatch):
    save_results(str(tmp_path), 3, {"x": 1.0})
    monkeypatch.setattr(comm, "is_main_process", lambda: False)
    save_results(str(tmp_path), 4, {"x": 2.0})
    remove_results(str(tmp_path))
    assert json.loads((tmp_path / "results.json").read_text())["x"] == 1.0
    assert os.listdir(tmp_path) == ["results.json"]


# The tests of these classes in detectron2's tests/test_events.py, in short


def test_rows_are_written_for_names_that_are_put_with_different_periods(tmp_path):
    path = tmp_path / "metrics.json"
    with EventStorage() as storage:
        writer = JSONWriter(str(path))
        for k in range(60):
            if k % 17 == 0:
                storage.put_scalar("key2", k, smoothing_hint=False)
            storage.put_scalar("key", k, smoothing_hint=False)
            if (k + 1) % 20 == 0:
                writer.write()
            storage.step()
        writer.close()
    rows = read_rows(path)
    assert [row["iteration"] for row in rows] == [17, 19, 34, 39, 51, 59]
    assert [row.get("key2", 0) for row in rows] == [17, 0, 34, 0, 51, 0]
    assert [row.get("key", 0) for row in rows] == [0, 19, 0, 39, 0, 59]


def test_medians_are_over_iterations_for_names_that_are_put_with_different_periods(tmp_path):
    path = tmp_path / "metrics.json"
    with EventStorage() as storage:
        writer = JSONWriter(str(path), window_size=10)
        for k in range(20):
            storage.put_scalar("key1", k)
            if (k + 1) % 2 == 0:
                storage.put_scalar("key2", k)
            if (k + 1) % 5 == 0:
                storage.put_scalar("key3", k)
            if (k + 1) % 10 == 0:
                writer.write()
            storage.step()
        writer.close()
        counts = [storage.count_samples(name, 10) for name in ("key1", "key2", "key3")]
    rows = read_rows(path)
    assert counts == [10, 5, 2]
    assert [row["key1"] for row in rows] == [4.5, 14.5]
    assert [row["key2"] for row in rows] == [5, 15]
    assert [row["key3"] for row in rows] == [6.5, 16.5]


def test_an_eta_needs_the_length_of_the_run(lines):
    with EventStorage() as storage:
        for _ in range(2):
            storage.put_scalars({"time": 1.0, "[metric]bn_stat": 1.0})
            storage.step()
        CommonMetricPrinter(10).write()
        CommonMetricPrinter().write()
    with_length, without = lines()
    assert "eta" in with_length
    assert "eta" not in without
    assert "[metric]bn_stat" in without
