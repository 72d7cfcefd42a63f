"""What a run leaves behind."""

import contextlib
import csv
import json
import logging
import math
import time

import pytest
import torch
from conftest import read_events

from defaults import get_cfg
from plumbing import comm
from plumbing.events import EventStorage, EventWriter
from records import CommonMetricPrinter, CSVWriter, log_results, open_writers, save_results


def writers_in(folder, start_iter=0, max_iter=10, rate=0.1):
    cfg = get_cfg()
    cfg.OUTPUT_DIR, cfg.SOLVER.MAX_ITER, cfg.SOLVER.BASE_LR = str(folder), max_iter, rate
    return open_writers(cfg, start_iter)


def read_rows(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def in_order(folder):
    """Name the files of events so that they sort as they were written, also within a second."""
    paths = sorted(folder.glob("events.*"), key=lambda path: path.stat().st_mtime_ns)
    for number, path in enumerate(paths):
        path.rename(folder / f"events.out.tfevents.{number}")


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


def test_a_run_that_goes_on_is_not_told_as_finished(tmp_path):
    save_results(str(tmp_path), 3, {"x": 1.0})
    with EventStorage(4), writers_in(tmp_path, 4):
        assert not (tmp_path / "results.json").exists()
    with EventStorage(4), writers_in(tmp_path, 4):  # without one too
        pass


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
        in_order(tmp_path)
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


# results.csv


def read_csv(path):
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def evaluate(path, evaluations, start_iter=0):
    """Write {iteration: results} as a run would that starts there; returns the writer."""
    writer = CSVWriter(str(path), ("set", "other"), start_iter)
    with EventStorage() as storage:
        for storage.iter, results in evaluations.items():
            storage.put_scalars(results, smoothing_hint=False)
            storage.put_scalar("loss", 1.0)
            writer.write()
            writer.write()
    writer.close()
    return writer


def test_results_csv_has_a_line_for_each_evaluation(tmp_path):
    path = tmp_path / "results.csv"
    evaluate(path, {1: {"set/b": 0.1 + 0.2, "set/a-1": 1}, 2: {}, 3: {"set/a-1": 1e-9, "set/b": 2}})
    assert path.read_text() == f"iteration,set/a-1,set/b\n1,1.0,{0.1 + 0.2!r}\n3,1e-09,2.0\n"
    assert path.read_bytes().count(b"\r") == 0


def test_a_metric_that_comes_later_gets_a_column_and_what_is_missing_an_empty_cell(tmp_path):
    path = tmp_path / "results.csv"
    evaluate(path, {1: {"set/b": 1.0}, 3: {"set/a": 2.0}, 5: {"other/c, d": math.nan}, 7: {}})
    assert path.read_text().splitlines() == [
        'iteration,"other/c, d",set/a,set/b',
        "1,,,1.0",
        "3,,2.0,",
        "5,nan,,",
    ]


def test_lines_from_the_resumed_iteration_on_are_replaced(tmp_path):
    path = tmp_path / "results.csv"
    evaluate(path, {i: {"set/a": float(i), **({"set/b": 1.0} if i > 3 else {})} for i in (1, 3, 5)})
    evaluate(path, {3: {"set/a": 30.0}, 5: {"set/a": 50.0}}, start_iter=3)
    assert path.read_text() == "iteration,set/a\n1,1.0\n3,30.0\n5,50.0\n"
    evaluate(path, {4: {}}, start_iter=4)  # also if there is no further evaluation
    assert path.read_text() == "iteration,set/a\n1,1.0\n3,30.0\n"
    evaluate(path, {0: {"set/a": 7.0}})
    assert path.read_text() == "iteration,set/a\n0,7.0\n"


@pytest.mark.parametrize("torn", ["3,0.", "3", "x,y\n", "3,1.0,2.0\n", "\n", "\xff\n"])
def test_a_damaged_line_is_dropped(torn, tmp_path):
    path = tmp_path / "results.csv"
    evaluate(path, {1: {"set/a": 1.0}})
    with open(path, "a", encoding="latin-1") as file:
        file.write(torn)
    evaluate(path, {5: {"set/a": 5.0}}, start_iter=5)
    assert path.read_text() == "iteration,set/a\n1,1.0\n5,5.0\n"


def test_without_an_evaluation_there_is_no_results_csv(tmp_path):
    evaluate(tmp_path / "results.csv", {1: {}, 2: {}})
    assert list(tmp_path.iterdir()) == []


# The log.


def test_results_are_logged_as_a_table_and_as_lines_to_copy(caplog):
    caplog.set_level(logging.INFO, logger="records")
    log_results("set", {"accuracy": 0.5, "accuracy-1": 1.0, "nll": 1e-5, "box/AP": 1234567.0})
    table, *lines = caplog.messages
    assert table.splitlines() == [
        "Results on set:",
        "| accuracy   | 0.5000 | nll | 1.000e-05 | box/AP | 1.235e+06 |",
        "| accuracy-1 | 1.0000 |     |           |        |           |",
    ]
    assert lines == [
        "copypaste: Task: set",
        "copypaste: accuracy,nll,box/AP",
        "copypaste: 0.5000,0.0000,1234567.0000",
    ]


MANY = {f"name-{i}": float(i) for i in range(7)}


@pytest.mark.parametrize("results", [{}, {"a": math.nan}, MANY])
def test_a_table_of_any_size_has_aligned_lines(results, caplog):
    caplog.set_level(logging.INFO, logger="records")
    log_results("set", results)
    rows = caplog.messages[0].splitlines()[1:]
    assert len({len(row) for row in rows}) == 1
    assert all(name in caplog.messages[0] for name in results)


# TensorBoard: which run this is.


RESULTS = {"digits_test/accuracy": 0.25, "digits_test/accuracy-3": 0.5, "digits_test/error": 2.0}


def write_run(folder, start_iter=0, stop_iter=10, rate=0.1, results=RESULTS):
    """A run of 10 iterations, evaluated after every second one."""
    folder.mkdir(exist_ok=True)
    with (
        EventStorage(start_iter) as storage,
        writers_in(folder, start_iter, rate=rate) as writers,
    ):
        for storage.iter in range(max(start_iter - 1, 0), stop_iter):
            storage.put_scalar("total_loss", scalar(1))
            for writer in writers:
                writer.write()
            if storage.iter % 2:
                storage.put_scalars(results, smoothing_hint=False)
    in_order(folder)


def session_groups(logdir):
    """What TensorBoard's tab HPARAMS shows: [session group, ...]."""
    from tensorboard.backend.event_processing.data_provider import MultiplexerDataProvider
    from tensorboard.backend.event_processing.plugin_event_multiplexer import EventMultiplexer
    from tensorboard.context import RequestContext
    from tensorboard.plugins import base_plugin
    from tensorboard.plugins.hparams import api_pb2, backend_context, list_session_groups

    multiplexer = EventMultiplexer(tensor_size_guidance={"scalars": 0, "text": 0})
    multiplexer.AddRunsFromDirectory(str(logdir))
    multiplexer.Reload()
    provider = MultiplexerDataProvider(multiplexer, str(logdir))
    request_context = RequestContext()
    context = backend_context.Context(base_plugin.TBContext(data_provider=provider))
    run_to_tag = context.hparams_metadata(request_context, "")
    experiment = context.experiment_from_metadata(request_context, "", True, run_to_tag, [])
    params = [
        api_pb2.ColParams(metric=info.name, include_in_result=True)
        for info in experiment.metric_infos
    ]
    params += [
        api_pb2.ColParams(hparam=info.name, include_in_result=True)
        for info in experiment.hparam_infos
    ]
    request = api_pb2.ListSessionGroupsRequest(
        col_params=params,
        allowed_statuses=[api_pb2.STATUS_SUCCESS, api_pb2.STATUS_UNKNOWN],
        slice_size=100,
        include_metrics=True,
    )
    handler = list_session_groups.Handler(request_context, context, "", request)
    return list(handler.run().session_groups)


def shown(groups, name):
    """[(setting, final value of a metric), ...]"""
    return [
        (
            group.hparams["SOLVER.BASE_LR"].number_value,
            *(m.value for m in group.metric_values if m.name.tag == name),
        )
        for group in groups
    ]


def test_hparams_compares_runs_by_settings_and_final_results(tmp_path):
    write_run(tmp_path / "one", rate=0.1)
    write_run(tmp_path / "two", rate=0.2, results={**RESULTS, "digits_test/accuracy": 0.75})
    groups = session_groups(tmp_path)
    assert sorted(shown(groups, "digits_test/accuracy")) == [(0.1, 0.25), (0.2, 0.75)]
    names = {metric.name.tag for group in groups for metric in group.metric_values}
    assert names == {"digits_test/accuracy", "digits_test/error"}
    sessions = [session for group in groups for session in group.sessions]
    assert sorted(session.name for session in sessions) == ["one", "two"]  # no folder within
    assert {session.status for session in sessions} == {1}  # STATUS_SUCCESS
    settings = groups[0].hparams
    assert settings["SOLVER.OPTIMIZER"].string_value == "SGD"
    assert settings["SOLVER.NESTEROV"].string_value == "False"
    assert settings["SOLVER.CLIP_GRAD_NORM"].string_value == "inf"
    assert "OUTPUT_DIR" not in settings


def test_a_resumed_run_is_one_session_with_the_results_of_the_resume(tmp_path):
    write_run(tmp_path / "run", stop_iter=7)
    (group,) = session_groups(tmp_path)
    assert group.sessions[0].status == 0  # STATUS_UNKNOWN: it did not come to its end
    new = {**RESULTS, "digits_test/accuracy": 0.75}
    write_run(tmp_path / "run", start_iter=4, results=new)
    groups = session_groups(tmp_path)
    assert shown(groups, "digits_test/accuracy") == [(0.1, 0.75)]
    assert [session.status for session in groups[0].sessions] == [1]
    tags = read_events(tmp_path / "run").SummaryMetadata
    assert tags("_hparams_/experiment").plugin_data.plugin_name == "hparams"


def settings_shown(folder):
    """{step: text}"""
    events = read_events(folder).Tensors("settings/text_summary")
    return {event.step: event.tensor_proto.string_val[0].decode() for event in events}


def test_the_settings_are_a_text_once_for_each_start(tmp_path):
    write_run(tmp_path, stop_iter=7, rate=0.1)
    (text,) = settings_shown(tmp_path).values()
    assert "\n      BASE_LR: 0.1\n" in text
    write_run(tmp_path, start_iter=4, rate=0.2)
    texts = settings_shown(tmp_path)
    assert list(texts) == [0, 3]
    assert "BASE_LR: 0.2" in texts[3]
    write_run(tmp_path, start_iter=4, rate=0.3)
    texts = settings_shown(tmp_path)
    assert list(texts) == [0, 3]
    assert "BASE_LR: 0.3" in texts[3]


def test_tensorboard_is_not_imported_before_there_is_something_to_write(tmp_path):
    with EventStorage(), writers_in(tmp_path) as writers:
        for writer in writers:
            writer.write()
    assert list(tmp_path.iterdir()) == []


# CommonMetricPrinter


def test_the_printer_shows_the_fields_in_order(lines, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
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


def test_missing_fields_show_nothing_and_a_missing_rate_shows_as_such(lines, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with EventStorage(3) as storage:
        storage.put_scalar("loss", scalar(1.5))
        CommonMetricPrinter().write()
    assert lines() == [" iter: 3  loss: 1.5  lr: N/A"]


def test_the_printer_shows_nothing_before_anything_was_put(lines):
    with EventStorage():
        CommonMetricPrinter(10).write()
    assert lines() == []


def test_without_times_the_eta_comes_from_the_lines_before(lines, monkeypatch):
    clock = iter((100.0, 110.0, 110.0, 110.0))
    with EventStorage(0) as storage:
        printer = CommonMetricPrinter(max_iter=26)
        for iteration in (0, 5):
            storage.iter = iteration
            storage.put_scalar("loss", scalar(1))
            monkeypatch.setattr(time, "perf_counter", lambda: next(clock))
            printer.write()
            monkeypatch.undo()
    assert "eta" not in lines()[0]
    assert lines()[1].startswith(" eta: 0:00:40  iter: 5")


def test_no_iteration_is_printed_twice_nor_one_past_the_last(lines):
    with EventStorage(8) as storage:
        printer = CommonMetricPrinter(max_iter=10)
        for iteration in (8, 8, 9, 9, 10, 11):
            storage.iter = iteration
            storage.put_scalar("loss", scalar(1))
            printer.write()
    assert [line.partition("iter: ")[2].split()[0] for line in lines()] == ["8", "9"]
    assert lines()[1].startswith(" eta: 0:00:00")


def test_the_printer_ends_with_the_memory_of_a_gpu(lines):
    with EventStorage() as storage:
        storage.put_scalars(loss=scalar(1))
        storage.put_scalars(lr=0.1, max_mem=1234.5, smoothing_hint=False)
        CommonMetricPrinter().write()
    assert lines() == [" iter: 0  loss: 1  lr: 0.1  max_mem: 1234M"]


@pytest.mark.parametrize(
    ("damage", "left", "num_lost"),
    [
        (("4,0.5", '4,"0.5'), ["9"], 1),
        (("4,0.5", "x,0.5"), ["9"], 1),
        (("iteration", 'iter"ation'), [], 2),
        (("4,0.5", "4,0.5,1"), ["9"], 1),
    ],
)
def test_lines_of_results_that_are_damaged_are_dropped_alone_and_told(
    tmp_path, caplog, damage, left, num_lost
):
    path = tmp_path / "results.csv"
    path.write_text("iteration,set/a\n4,0.5\n9,0.75\n".replace(*damage))
    evaluate(path, {14: {"set/a": 1.0}}, start_iter=14)
    assert [row["iteration"] for row in read_csv(path)] == [*left, "14"]
    assert f"{num_lost} lines are no results" in caplog.text
