"""What a run puts: kept exactly, read late, reduced once; and written by the writers."""

import contextlib
import io
import json
import math
import weakref

import numpy as np
import pytest
import torch
from conftest import read_events
from ranks import run_on_ranks
from torch.utils._python_dispatch import TorchDispatchMode

from plumbing import comm
from plumbing.comm import NonFiniteError
from plumbing.events import (
    EventStorage,
    HistoryBuffer,
    JSONWriter,
    TensorboardXWriter,
    get_event_storage,
    has_event_storage,
)


def scalar(value):
    return torch.tensor(float(value))


def saved(state):
    """A file in memory."""
    torch.save(state, file := io.BytesIO())
    file.seek(0)
    return file


# HistoryBuffer


def filled(*values, **kwargs):
    history = HistoryBuffer(**kwargs)
    for value in values:
        history.update(value)
    return history


def test_a_history_tells_median_and_mean_of_its_newest_values():
    history = filled(5.0, 1.0, 2.0, 9.0)
    assert history.latest() == 9.0
    assert (history.median(3), history.avg(3)) == (2.0, 4.0)
    assert (history.median(2), history.avg(1)) == (5.5, 9.0)
    assert (history.median(99), history.avg(99)) == (3.5, 4.25)
    assert history.global_avg() == 4.25
    assert history.values() == [(5.0, 0), (1.0, 1), (2.0, 2), (9.0, 3)]


def test_a_full_history_drops_the_oldest_but_its_global_mean_covers_all():
    history = filled(*range(10), max_length=3)
    assert history.values() == [(7, 7), (8, 8), (9, 9)]
    assert history.global_avg() == 4.5


def test_a_history_takes_iterations_that_are_given():
    history = HistoryBuffer()
    history.update(1.0, 20)
    assert (history.values(), history.latest_iteration()) == ([(1.0, 20)], 20)


def test_statistics_of_nothing_are_nan_and_of_a_window_without_width_an_error():
    history = HistoryBuffer()
    assert all(map(math.isnan, (history.median(1), history.avg(1), history.global_avg())))
    assert history.latest_iteration() == -1
    for statistic in (history.median, history.avg):
        with pytest.raises(ValueError, match="window_size"):
            statistic(0)


def test_a_nan_in_the_window_makes_its_median_nan():
    history = filled(1.0, math.nan, 2.0, 3.0)
    assert math.isnan(history.median(3))
    assert history.median(2) == 2.5


# EventStorage


def test_the_current_storage_is_that_of_the_innermost_open_with_block():
    assert not has_event_storage()
    with pytest.raises(AssertionError, match="with EventStorage"):
        get_event_storage()
    with EventStorage() as outer:
        with contextlib.suppress(KeyError), EventStorage() as inner:
            assert get_event_storage() is inner
            raise KeyError
        assert get_event_storage() is outer
    assert not has_event_storage()


def test_the_iteration_starts_steps_and_is_set():
    storage = EventStorage(5)
    storage.step()
    assert storage.iter == storage.iteration == 6
    storage.iter = 99
    storage.put_scalar("x", 1.0)
    storage.put_scalar("y", 2.0, cur_iter=7)
    assert storage.latest() == {"x": (1.0, 99), "y": (2.0, 7)}


@pytest.mark.parametrize(
    "value",
    [3, 3.0, np.float32(3), torch.tensor(3), torch.tensor([[3.0]]), torch.tensor(3.0).half()],
)
def test_a_scalar_may_be_a_number_or_a_tensor_of_one_element(value):
    storage = EventStorage()
    storage.put_scalar("x", value)
    ((kept, _),) = storage.latest().values()
    assert kept == 3.0
    assert type(kept) is float


def test_a_tensor_of_several_elements_is_an_error_that_names_it():
    with pytest.raises(ValueError, match=r"x.*\(2,\)"):
        EventStorage().put_scalar("x", torch.zeros(2))


def test_put_scalars_takes_keywords_and_in_a_dict_any_name():
    storage = EventStorage(3)
    names = ["scalars", "self", "smoothing_hint", "cur_iter", "digits test/accuracy"]
    storage.put_scalars({name: scalar(i) for i, name in enumerate(names)}, loss=scalar(9))
    expected = {name: (i, 3) for i, name in enumerate(names)}
    assert storage.latest() == {**expected, "loss": (9.0, 3)}
    storage.put_scalars({"lr": 1.0}, smoothing_hint=False, cur_iter=8, other=2.0)
    assert storage.latest()["lr"] == (1.0, 8)
    assert storage.latest()["other"] == (2.0, 8)
    assert storage.smoothing_hints()["other"] is False
    assert storage.smoothing_hints()["loss"] is True


@pytest.mark.parametrize("convert", [float, scalar])
def test_a_changed_hint_is_an_error_before_anything_is_recorded(convert):
    storage = EventStorage()
    storage.put_scalar("x", convert(1))
    with pytest.raises(ValueError, match="x.*smoothing_hint"):
        storage.put_scalar("x", convert(100), smoothing_hint=False)
    assert storage.history("x").values() == [(1.0, 0)]
    assert storage.smoothing_hints() == {"x": True}


def test_a_refused_value_leaves_no_hint():
    storage = EventStorage()
    with pytest.raises(ValueError, match="x"):
        storage.put_scalar("x", torch.zeros(2))
    storage.put_scalar("x", 1.0, smoothing_hint=False)
    assert storage.latest() == {"x": (1.0, 0)}


def test_scopes_nest_survive_exceptions_and_cover_images_and_histograms(tmp_path):
    with EventStorage() as storage:
        with contextlib.suppress(KeyError), storage.name_scope("a"), storage.name_scope("b/"):
            storage.put_scalars(number=1.0, tensor=scalar(2))
            storage.put_image("image", torch.zeros(1, 2, 2))
            storage.put_histogram("histogram", torch.ones(2))
            raise KeyError
        storage.put_scalar("outside", 3.0)
        assert set(storage.latest()) == {"a/b/number", "a/b/tensor", "outside"}
        writer = TensorboardXWriter(str(tmp_path))
        writer.write()
        writer.close()
    events = read_events(tmp_path)
    assert events.Tags()["images"] == ["a/b/image"]
    assert events.Tags()["histograms"] == ["a/b/histogram"]


class CountReads(TorchDispatchMode):
    """Counts how often a tensor is read as a number."""

    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += function in (
            torch.ops.aten._local_scalar_dense.default,
            torch.ops.aten.item.default,
            torch.ops.aten.equal.default,
            torch.ops.aten.is_nonzero.default,
        )
        return function(*args, **(kwargs or {}))


def test_tensors_are_not_read_when_put():
    weight = torch.ones(3, requires_grad=True)
    with CountReads() as reads:
        assert float(torch.ones(())) == 1.0
        assert reads.count == 1
        storage = EventStorage()
        for iteration in range(5):
            storage.iter = iteration
            with storage.name_scope("train"):
                storage.put_scalars(loss=weight.sum(), count=torch.tensor(2), one=torch.ones(1))
        assert reads.count == 1
    assert storage.history("train/loss").values() == [(3.0, i) for i in range(5)]


def test_a_tensor_that_its_owner_changes_later_is_kept_as_it_was_put():
    buffer, parameter = torch.ones(1), torch.nn.Parameter(torch.ones(2))
    storage = EventStorage()
    storage.put_scalars(whole=buffer, part=buffer[0], detached=buffer.detach().view(()))
    buffer.fill_(9.0)
    with torch.no_grad():
        parameter.fill_(9.0)
    storage.reduce()
    assert {value for value, _ in storage.latest().values()} == {1.0}


def test_a_parameter_that_the_optimizer_changes_later_is_kept_as_it_was_put():
    scale, weight = torch.nn.Parameter(torch.ones(())), torch.nn.Parameter(torch.ones(2))
    storage = EventStorage()
    storage.put_scalars(leaf=scale, view=weight[0])
    with torch.no_grad():
        scale.fill_(9.0)
        weight.fill_(9.0)
    assert storage.latest() == {"leaf": (1.0, 0), "view": (1.0, 0)}


def test_a_kept_tensor_holds_no_graph():
    activation = torch.ones(9, requires_grad=True) * 2
    alive = weakref.ref(activation)
    loss = activation.square().sum()
    storage = EventStorage()
    storage.put_scalar("loss", loss)
    del activation
    assert alive() is not None
    del loss
    assert alive() is None
    assert storage.latest() == {"loss": (36.0, 0)}


@pytest.mark.parametrize("convert", [float, scalar])
def test_several_puts_of_one_iteration_are_averaged(convert):
    storage = EventStorage()
    for iteration in range(2):
        storage.iter = iteration
        for value in (1, 2, 6):
            storage.put_scalar("x", convert(value + iteration))
    storage.reduce()
    assert storage.history("x").values() == [(3.0, 0), (4.0, 1)]
    assert storage.history("x").global_avg() == 3.5


def test_reading_between_two_puts_of_an_iteration_changes_nothing():
    storage = EventStorage()
    for value in (1, 2, 6):
        storage.put_scalar("x", scalar(value))
        storage.latest()
    assert storage.history("x").values() == [(3.0, 0)]
    storage.reduce()
    assert storage.history("x").values() == [(3.0, 0)]
    assert storage.history("x").global_avg() == 3.0


def test_a_value_that_was_read_and_then_reduced_counts_once():
    storage = EventStorage()
    for iteration in range(3):
        storage.iter = iteration
        storage.put_scalar("x", scalar(iteration))
    assert storage.latest() == {"x": (2.0, 2)}
    storage.reduce()
    storage.reduce()
    assert storage.history("x").values() == [(0.0, 0), (1.0, 1), (2.0, 2)]
    assert storage.history("x").global_avg() == 1.0


@pytest.mark.parametrize("read", [False, True])
def test_numbers_and_tensors_of_one_name_are_averaged_read_between_or_not(read):
    storage = EventStorage()
    storage.put_scalar("x", 1.0)
    storage.put_scalar("x", scalar(3))
    if read:
        storage.latest()
    storage.reduce()
    assert storage.history("x").values() == [(2.0, 0)]


@pytest.mark.parametrize("read", [False, True])
def test_a_number_is_not_lost_when_an_older_tensor_is_reduced(read):
    storage = EventStorage()
    storage.put_scalar("x", scalar(3))
    storage.iter = 1
    storage.put_scalar("x", 4.0)
    if read:
        storage.latest()
    storage.reduce()
    assert sorted(storage.history("x").values()) == [(3.0, 0), (4.0, 1)]


def test_every_iteration_keeps_its_own_value():
    storage = EventStorage()
    for iteration in range(50):
        storage.iter = iteration
        storage.put_scalars(a=scalar(iteration), b=torch.tensor(2 * iteration))
    storage.reduce()
    assert storage.history("a").values() == [(float(i), i) for i in range(50)]
    assert storage.history("b").values() == [(2.0 * i, i) for i in range(50)]


def test_a_history_is_bounded_however_long_the_run():
    storage = EventStorage()
    for iteration in range(1500):
        storage.iter = iteration
        storage.put_scalars(number=1.0, tensor=scalar(iteration))
    storage.reduce()
    for name in ("number", "tensor"):
        iterations = [iteration for _, iteration in storage.history(name).values()]
        assert iterations == list(range(500, 1500))


def test_waiting_images_and_histograms_are_bounded(tmp_path):
    with EventStorage() as storage:
        for iteration in range(1050):
            storage.iter = iteration
            storage.put_image("image", torch.zeros(1, 1, 1))
            storage.put_histogram("histogram", torch.ones(1), bins=1)
        writer = TensorboardXWriter(str(tmp_path))
        writer.write()
        writer.close()
    events = read_events(tmp_path)
    assert [event.step for event in events.Images("image")] == list(range(50, 1050))
    assert [event.step for event in events.Histograms("histogram")] == list(range(50, 1050))


def test_a_name_that_was_never_put_is_an_error_and_counts_no_samples():
    storage = EventStorage()
    assert storage.count_samples("x") == 0
    assert storage.histories() == {}
    assert storage.smoothing_hints() == {}
    with pytest.raises(KeyError):
        storage.history("x")


def test_samples_are_counted_in_iterations_before_the_newest():
    storage = EventStorage()
    for iteration in range(0, 50, 5):
        storage.iter = iteration
        storage.put_scalar("x", scalar(iteration))
    storage.iter = 1000
    assert [storage.count_samples("x", window) for window in (1, 5, 6, 10, 11)] == [1, 1, 2, 2, 3]
    assert storage.count_samples("x", 10_000) == 10
    for window in (0, -1):
        with pytest.raises(ValueError, match="window_size"):
            storage.count_samples("x", window)


def test_smoothed_scalars_show_the_median_of_a_window_of_iterations_others_the_newest():
    storage = EventStorage()
    for iteration, value in enumerate((100, 1, 2, 6)):
        storage.iter = iteration
        storage.put_scalar("smooth", scalar(value))
        storage.put_scalar("raw", scalar(value), smoothing_hint=False)
        if iteration % 2 == 0:
            storage.put_scalar("seldom", scalar(value))
    latest = storage.latest_with_smoothing_hint(3)
    assert latest == {"smooth": (2.0, 3), "raw": (6.0, 3), "seldom": (51.0, 2)}
    assert storage.latest_with_smoothing_hint()["smooth"] == (4.0, 3)


def test_a_restored_storage_shows_the_same_smoothed_values_and_goes_on(tmp_path):
    storage, other = EventStorage(), EventStorage()
    for iteration in range(1200):
        storage.iter = iteration
        storage.put_scalar("loss", scalar(math.sin(iteration)))
        storage.put_scalar("lr", 1 / (iteration + 1), smoothing_hint=False)
    torch.save(storage.state_dict(), tmp_path / "state.pth")
    other.load_state_dict(torch.load(tmp_path / "state.pth", weights_only=True))
    for each in (storage, other):
        each.iter = 1200
        each.put_scalars({"loss": scalar(5), "new": 1.0})
        with pytest.raises(ValueError, match="lr"):
            each.put_scalar("lr", 1.0)
    for window in (1, 20, 1000):
        shown = [each.latest_with_smoothing_hint(window) for each in (storage, other)]
        assert shown[0] == shown[1]
    for name, history in storage.histories().items():
        assert other.history(name).values() == history.values()
        assert other.history(name).global_avg() == history.global_avg()
    other.iter = 1201
    other.put_scalar("loss", 1.0)
    assert len(other.history("loss").values()) == 1000


def test_a_restored_iteration_that_runs_again_replaces_its_value():
    storage, other = EventStorage(3), EventStorage(3)
    storage.put_scalar("accuracy", 0.5, smoothing_hint=False)
    other.load_state_dict(storage.state_dict())
    other.put_scalar("accuracy", 0.75, smoothing_hint=False)
    assert other.history("accuracy").values() == [(0.75, 3)]


def test_a_loss_or_gradient_that_is_not_finite_is_an_error_that_tells_when_and_where():
    for name, bad in (("loss_cls", math.nan), ("grad_norm", math.inf)):
        storage = EventStorage()
        for iteration in range(7, 10):
            storage.iter = iteration
            storage.put_scalars({name: scalar(bad if iteration > 7 else 1)})
            storage.put_scalar("accuracy", scalar(iteration / 16))
            storage.put_scalar("lr", iteration / 64, smoothing_hint=False)
        with pytest.raises(NonFiniteError, match=rf"iteration 8 on rank 0.*{name}") as caught:
            storage.reduce()
        assert "accuracy 0.5" in str(caught.value)
        assert "0.125" in str(caught.value)


def test_other_values_may_be_infinite_and_a_float16_gradient_too():
    storage = EventStorage()
    storage.put_scalars(accuracy=scalar(math.nan), grad_norm=scalar(math.inf), loss=scalar(1))
    storage.reduce(finite=("loss",))
    assert storage.latest()["grad_norm"] == (math.inf, 0)
    storage.put_scalar("loss", scalar(math.inf))
    with pytest.raises(NonFiniteError):
        storage.reduce(finite=("loss",))


def test_tensors_are_read_in_time_even_if_nothing_is_ever_due():
    storage, loss = EventStorage(), scalar(1)
    storage.put_scalar("loss", scalar(math.nan))

    def put_forever():
        for storage.iter in range(1, 200_000):
            storage.put_scalar("loss", loss)

    with pytest.raises(NonFiniteError, match="iteration 0 "):
        put_forever()


class OnGpu(torch.Tensor):
    """Says so, and cannot be read alone."""

    is_cuda = property(lambda self: True)

    def item(self):
        pytest.fail("a copy for each value")


def test_values_on_a_gpu_are_read_together_each_type_exactly():
    storage = EventStorage()
    count, double = torch.tensor(2**40 + 1), scalar(7).double()
    for name, value in {"loss": torch.tensor([2.5]), "count": count, "double": double}.items():
        storage.put_scalar(name, value.as_subclass(OnGpu))
    storage.put_norm("norm", [scalar(3).as_subclass(OnGpu), scalar(4).as_subclass(OnGpu)])
    storage.put_scalar("cpu", scalar(1))
    expected = {"loss": 2.5, "count": 2**40 + 1, "double": 7.0, "norm": 5.0, "cpu": 1.0}
    assert {name: value for name, (value, _) in storage.latest().items()} == expected


def test_a_large_count_is_kept_exactly():
    storage = EventStorage()
    storage.put_scalars(count=torch.tensor(2**24 + 1), loss=scalar(1))
    assert storage.latest() == {"count": (2**24 + 1, 0), "loss": (1.0, 0)}


# On two ranks


def averages_over_ranks():
    rank = comm.get_rank()
    storage = EventStorage()
    for iteration in range(2):
        storage.iter = iteration
        storage.put_scalars(loss=scalar(10 * rank + iteration), step_time=scalar(rank))
        storage.put_scalars(count=torch.tensor(rank), double=scalar(rank).double(), own=rank)
        storage.put_scalar("micro", scalar(rank))
        storage.put_scalar("micro", scalar(4))
    local = storage.latest()
    storage.reduce()
    storage.reduce()
    return local, {name: history.values() for name, history in storage.histories().items()}


def averages_many_values():
    storage = EventStorage()
    for i in range(2500):
        storage.iter = i // 5
        storage.put_scalar(f"x{i % 5}", scalar(i + comm.get_rank()))
    storage.reduce()
    return {name: history.values() for name, history in storage.histories().items()}


def stops_all_ranks():
    storage = EventStorage()
    for iteration in range(5, 9):
        storage.iter = iteration
        bad = iteration >= 7 and comm.get_rank() == 1
        storage.put_scalar("loss", scalar(math.nan if bad else 1))
    with pytest.raises(NonFiniteError) as caught:
        storage.reduce()
    return str(caught.value)


def tells_different_names():
    storage = EventStorage()
    storage.put_scalar("loss", scalar(1))
    storage.put_scalar(f"only_{comm.get_rank()}", scalar(1))
    with pytest.raises(ValueError, match="same") as caught:
        storage.reduce()
    return str(caught.value)


def tells_different_numbers_of_values():
    storage = EventStorage()
    for i in range(3000 if comm.get_rank() else 10):
        storage.put_scalar(f"x{i}", scalar(i))
    with pytest.raises(ValueError, match="same") as caught:
        storage.reduce()
    return str(caught.value)


@pytest.fixture(scope="module")
def both():
    """{name of a check: [what rank 0 returned, what rank 1 returned]}"""
    ranks = run_on_ranks(
        averages_over_ranks,
        averages_many_values,
        stops_all_ranks,
        tells_different_names,
        tells_different_numbers_of_values,
    )
    return {name: [rank[name] for rank in ranks] for name in ranks[0]}


def test_reduced_values_are_the_mean_over_ranks_and_times_the_largest(both):
    for rank, (_, values) in enumerate(both["averages_over_ranks"]):
        assert values["loss"] == [(5.0, 0), (6.0, 1)]
        assert values["step_time"] == [(1.0, 0), (1.0, 1)]
        assert values["count"] == values["double"] == [(0.5, 0), (0.5, 1)]
        assert values["micro"] == [(2.25, 0), (2.25, 1)]
        assert values["own"] == [(rank, 0), (rank, 1)]


def test_before_the_reduction_each_rank_reads_its_own_values(both):
    for rank, (local, _) in enumerate(both["averages_over_ranks"]):
        assert local["loss"] == (10 * rank + 1, 1)
        assert local["step_time"] == (rank, 1)
        assert local["micro"] == (2 + rank / 2, 1)


def test_more_values_than_one_message_holds_are_reduced_as_well(both):
    expected = {f"x{k}": [(5 * i + k + 0.5, i) for i in range(500)] for k in range(5)}
    assert both["averages_many_values"] == [expected, expected]


def test_all_ranks_stop_together_and_name_the_rank_and_the_iteration(both):
    first, second = both["stops_all_ranks"]
    assert first == second
    assert "iteration 7 on rank 1" in first


def test_ranks_that_put_different_names_are_told_which(both):
    for message in both["tells_different_names"]:
        assert "only_0" in message
        assert "only_1" in message


def test_ranks_that_put_different_numbers_of_values_are_told_and_do_not_hang(both):
    for message in both["tells_different_numbers_of_values"]:
        assert "x2999" in message


# JSONWriter


def parse(line):
    def refuse(constant):
        raise ValueError(f"{constant} is not JSON")

    return json.loads(line, parse_constant=refuse)


def read_rows(path):
    return [parse(line) for line in path.read_text().splitlines()]


@pytest.fixture
def metrics(tmp_path):
    return tmp_path / "metrics.json"


def write_rows(path, rows, **kwargs):
    """Write {iteration: {name: value}} through a storage, an iteration at a time."""
    writer = JSONWriter(str(path), **kwargs)
    with EventStorage() as storage:
        for iteration, row in rows.items():
            storage.iter = iteration
            storage.put_scalars(row, smoothing_hint=False)
            writer.write()
    writer.close()


def test_each_iteration_is_one_strict_json_object_on_a_line_with_sorted_names(metrics):
    write_rows(metrics, {4: {"z": 1.0, "a": scalar(2)}, 9: {"z": 3.0, "a": 4.0}})
    assert metrics.read_bytes() == (
        b'{"a": 2.0, "iteration": 4, "z": 1.0}\n{"a": 4.0, "iteration": 9, "z": 3.0}\n'
    )


def test_values_that_are_not_finite_are_null(metrics):
    write_rows(metrics, {0: {"a": math.nan, "b": math.inf, "c": scalar(-math.inf), "d": 1.0}})
    assert read_rows(metrics) == [{"a": None, "b": None, "c": None, "d": 1.0, "iteration": 0}]


def test_a_name_that_comes_after_its_iteration_was_written_joins_its_row(metrics):
    with EventStorage() as storage:
        writer = JSONWriter(str(metrics))
        for iteration in (3, 7):
            storage.iter = iteration
            storage.put_scalar("loss", float(iteration), smoothing_hint=False)
            writer.write()
        storage.put_scalar("accuracy", 0.5, smoothing_hint=False)
        writer.write()
        storage.put_scalar("late", 0.25, cur_iter=3)
        writer.write()
        writer.close()
    assert read_rows(metrics) == [
        {"iteration": 3, "late": 0.25, "loss": 3.0},
        {"accuracy": 0.5, "iteration": 7, "loss": 7.0},
    ]


def test_scalars_of_different_iterations_stand_on_their_own_rows_in_order(metrics):
    with EventStorage() as storage:
        storage.put_scalar("newer", 1.0, cur_iter=5)
        storage.put_scalar("older", 2.0, cur_iter=3)
        writer = JSONWriter(str(metrics))
        writer.write()
        writer.close()
    assert read_rows(metrics) == [{"iteration": 3, "older": 2.0}, {"iteration": 5, "newer": 1.0}]


def test_nothing_new_writes_nothing(metrics):
    with EventStorage() as storage:
        writer = JSONWriter(str(metrics))
        writer.write()
        assert not metrics.exists()
        storage.put_scalar("x", 1.0)
        writer.write()
        before = metrics.read_bytes()
        storage.iter = 5
        writer.write()
        writer.close()
        writer.close()
    assert metrics.read_bytes() == before


def test_smoothed_scalars_are_written_as_the_median_of_the_window(metrics):
    with EventStorage() as storage:
        for iteration, value in enumerate((50.0, 1.0, 3.0, 2.0)):
            storage.iter = iteration
            storage.put_scalar("loss", value)
        writer = JSONWriter(str(metrics), window_size=3)
        writer.write()
        writer.close()
    assert read_rows(metrics) == [{"iteration": 3, "loss": 2.0}]


def test_every_row_is_on_the_disk_once_it_is_written(metrics):
    with EventStorage() as storage:
        writer = JSONWriter(str(metrics))
        storage.put_scalar("x", 1.0)
        writer.write()
        assert read_rows(metrics) == [{"iteration": 0, "x": 1.0}]
        writer.close()


def test_a_resume_drops_later_rows_and_a_torn_line_and_touches_no_earlier_byte(metrics):
    earlier = b'{"iteration": 3,   "x": 1.50}\n{"iteration": 9, "x": 2.0}\n'
    metrics.write_bytes(
        earlier + b'{"iteration": 10, "x": 3.0}\n{"iteration": 12, "x": 3.0}\n{"iterati'
    )
    write_rows(metrics, {10: {"x": 7.0}, 11: {"x": 8.0}}, start_iter=10)
    assert metrics.read_bytes() == (
        earlier + b'{"iteration": 10, "x": 7.0}\n{"iteration": 11, "x": 8.0}\n'
    )


@pytest.mark.parametrize("tail", [b'{"iteration"', b'{"iteration": 2, "x": 1.0}', b"12\n", b"\n"])
def test_a_last_line_that_is_no_whole_row_is_dropped(metrics, tail):
    row = b'{"iteration": 1, "x": 1.0}\n'
    metrics.write_bytes(row + tail)
    write_rows(metrics, {5: {"x": 2.0}}, start_iter=5)
    assert metrics.read_bytes() == row + b'{"iteration": 5, "x": 2.0}\n'


def test_without_a_start_the_file_is_appended_to(metrics):
    metrics.write_bytes(b'{"iteration": 7, "x": 1.0}\n')
    write_rows(metrics, {1: {"x": 2.0}})
    assert read_rows(metrics) == [{"iteration": 7, "x": 1.0}, {"iteration": 1, "x": 2.0}]


def test_what_a_resumed_storage_knows_from_before_is_not_written_again(metrics):
    with EventStorage(9) as storage:
        storage.put_scalar("old", 1.0, cur_iter=7)
        storage.put_scalar("x", 1.0, cur_iter=9)
        writer = JSONWriter(str(metrics), start_iter=9)
        writer.write()
        writer.close()
    assert read_rows(metrics) == [{"iteration": 9, "x": 1.0}]


# TensorboardXWriter


def test_scalars_images_and_histograms_land_under_their_steps_once(tmp_path):
    image = torch.zeros(3, 4, 5)
    image[0] = 1.0
    with EventStorage(4) as storage:
        writer = TensorboardXWriter(str(tmp_path))
        writer.write()
        assert list(tmp_path.iterdir()) == []
        storage.put_scalar("loss", scalar(2), smoothing_hint=False)
        storage.put_image("float", image)
        storage.iter = 5
        storage.put_image("bytes", (255 * image).to(torch.uint8))
        storage.put_histogram("weights", torch.tensor([[1.0, 2.0], [3.0, math.nan]]), bins=4)
        writer.write()
        storage.put_scalar("loss", scalar(3), smoothing_hint=False)
        writer.write()
        writer.write()
        writer.close()
    events = read_events(tmp_path)
    assert [(e.step, e.value) for e in events.Scalars("loss")] == [(4, 2.0), (5, 3.0)]
    assert [e.step for e in events.Images("float")] == [4]
    assert [e.step for e in events.Images("bytes")] == [5]
    assert events.Images("float")[0].encoded_image_string == (
        events.Images("bytes")[0].encoded_image_string
    )
    assert (events.Images("float")[0].height, events.Images("float")[0].width) == (4, 5)
    (histogram,) = events.Histograms("weights")
    assert histogram.step == 5
    value = histogram.histogram_value
    assert (value.num, value.min, value.max) == (3, 1.0, 3.0)
    assert (value.sum, value.sum_squares) == (6.0, 14.0)
    assert sum(value.bucket) == 3
    assert value.bucket_limit[-1] == 3.0


@pytest.mark.parametrize(
    "tensor",
    [
        torch.full((4, 5), 2),
        torch.zeros(3, dtype=torch.bool),
        torch.ones(3, requires_grad=True),
        torch.tensor([math.inf, 1.0]),
        torch.ones(3).half(),
        torch.tensor(7),
    ],
    ids=["int", "bool", "grad", "infinite", "half", "scalar"],
)
def test_histograms_take_any_shape_and_type_and_skip_what_is_not_finite(tmp_path, tensor):
    with EventStorage() as storage:
        storage.put_histogram("x", tensor)
        writer = TensorboardXWriter(str(tmp_path))
        writer.write()
        writer.close()
    (event,) = read_events(tmp_path).Histograms("x")
    value = event.histogram_value
    assert value.num == sum(value.bucket) == tensor.isfinite().sum()
    assert value.min == value.max == tensor.flatten()[-1]


def test_a_histogram_of_nothing_is_not_kept(tmp_path):
    with EventStorage() as storage:
        storage.put_histogram("x", torch.empty(0))
        storage.put_histogram("y", torch.full((2,), math.nan))
        TensorboardXWriter(str(tmp_path)).write()
    assert list(tmp_path.iterdir()) == []


def test_images_and_histograms_of_the_iteration_of_a_checkpoint_are_there_after_a_resume(tmp_path):
    def write(storage, iterations):
        for storage.iter in iterations:
            storage.put_image("image", torch.full((1, 1, 1), storage.iter / 10))
            storage.put_histogram("weights", torch.ones(storage.iter + 1))
            writer.write()
            writer.write()

    writer = TensorboardXWriter(str(tmp_path))
    with EventStorage() as storage:
        write(storage, range(3))
        state = storage.state_dict()
        write(storage, [3])  # lost with what a kill cuts off
    writer.close()
    writer = TensorboardXWriter(str(tmp_path), purge_step=2)
    with EventStorage(3) as storage:
        storage.load_state_dict(torch.load(saved(state), weights_only=True))
        write(storage, [3, 4])
    writer.close()
    events = read_events(tmp_path)
    assert [each.step for each in events.Images("image")] == [0, 1, 2, 3, 4]
    weights = [(each.step, each.histogram_value.num) for each in events.Histograms("weights")]
    assert weights == [(step, step + 1) for step in range(5)]


def test_a_resumed_run_comes_after_the_old_one_though_the_clock_was_set_back(tmp_path, monkeypatch):
    for start, now in ((0, 1800000000.5), (2, 1700000000.5)):
        monkeypatch.setattr("time.time", lambda now=now: now)
        writer = TensorboardXWriter(str(tmp_path), purge_step=start)
        with EventStorage(start) as storage:
            for storage.iter in range(start, 4):
                storage.put_scalar("loss", start, smoothing_hint=False)
                writer.write()
        writer.close()
    monkeypatch.undo()
    scalars = [(each.step, each.value) for each in read_events(tmp_path).Scalars("loss")]
    assert scalars == [(0, 0.0), (1, 0.0), (2, 2.0), (3, 2.0)]


def test_an_image_stays_as_it_was_put_and_holds_no_more_than_itself():
    images, array = torch.zeros(50, 1, 2, 2), np.zeros((1, 2, 2))
    with EventStorage() as storage:
        storage.put_image("tensor", images[0])
        storage.put_image("array", array)
        storage.put_histogram("array", array)
        images += 1
        array += 1
        kept = [image for _, image, _ in storage._vis_data]
    assert [image.max() for image in kept] == [0, 0]
    assert kept[0].untyped_storage().nbytes() == 16
    assert storage._histogram_data[0][1]["max"] == 0


def test_many_images_and_histograms_may_wait_and_on_other_ranks_none(as_rank):
    for rank, num_kept in ((0, 500), (1, 0)):
        as_rank(rank, 2)
        storage = EventStorage()
        for number in range(500):
            storage.put_image(f"{number}", torch.zeros(1, 1, 1))
            storage.put_histogram(f"{number}", torch.zeros(1))
        assert (len(storage._vis_data), len(storage._histogram_data)) == (num_kept, num_kept)


def test_cleared_images_and_histograms_are_not_written(tmp_path):
    with EventStorage() as storage:
        storage.put_image("image", torch.zeros(1, 1, 1))
        storage.put_histogram("histogram", torch.ones(1))
        storage.clear_images()
        storage.clear_histograms()
        TensorboardXWriter(str(tmp_path)).write()
    assert list(tmp_path.iterdir()) == []


def test_a_state_survives_a_file_without_pickled_classes():
    storage = EventStorage()
    storage.put_scalars(a=1.0, b=scalar(2))
    state = torch.load(saved(storage.state_dict()), weights_only=True)
    assert state["histories"].keys() == {"a", "b"}


def test_what_is_read_early_because_too_much_waits_is_held_to_the_same_as_the_rest(monkeypatch):
    monkeypatch.setattr("plumbing.events.storage._WAITING_LENGTH", 3)
    storage = EventStorage()
    storage.reduce(finite=("skips",))
    for storage.iter in range(5):  # more than may wait
        storage.put_scalar("loss", scalar(math.nan))
    with pytest.raises(NonFiniteError):
        storage.reduce(finite=("loss",))
