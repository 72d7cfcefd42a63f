"""What a run puts: kept exactly, read late, reduced once; and written by the writers."""

import contextlib
import importlib
import io
import json
import math
import sys
import weakref

import numpy as np
import pytest
import torch
from conftest import read_events
from plumbing import comm
from plumbing.errors import NonFiniteError, remember_checkpoint
from plumbing.events import (
    EventStorage,
    HistoryBuffer,
    JSONWriter,
    TensorboardXWriter,
    get_event_storage,
    has_event_storage,
)
from ranks import run_on_ranks
from torch.utils._python_dispatch import TorchDispatchMode


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


def test_infinities_of_both_signs_have_a_median():
    assert filled(math.inf, 1.0, -math.inf).median(3) == 1.0


def test_a_history_without_its_newest_value_is_as_it_was_before():
    history = filled(1.0, 2.0, 4.0)
    history.pop()
    assert history.values() == [(1.0, 0), (2.0, 1)]
    assert history.global_avg() == 1.5


def test_a_copy_of_a_history_changes_alone():
    history = filled(1.0, 2.0, max_length=2)
    other = history.copy()
    other.update(3.0)
    assert history.values() == [(1.0, 0), (2.0, 1)]
    assert (other.values(), other.global_avg()) == ([(2.0, 1), (3.0, 2)], 2.0)


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
    [
        3,
        3.0,
        np.float32(3),
        np.array(3),
        torch.tensor(3),
        torch.tensor([[3.0]]),
        torch.tensor(3.0).half(),
        torch.tensor(3.0).bfloat16(),
        torch.nn.Parameter(torch.tensor(3.0)),
    ],
)
def test_a_scalar_may_be_a_number_or_a_tensor_of_one_element(value):
    storage = EventStorage()
    storage.put_scalar("x", value)
    ((kept, _),) = storage.latest().values()
    assert kept == 3.0
    assert type(kept) is float


@pytest.mark.parametrize("value", [True, np.bool_(True), torch.tensor(True)])
def test_a_bool_counts_as_a_number(value):
    storage = EventStorage()
    storage.put_scalar("x", value)
    assert storage.latest() == {"x": (1.0, 0)}


def test_a_tensor_of_several_elements_is_an_error_that_names_it():
    storage = EventStorage()
    with pytest.raises(ValueError, match=r"x.*\(2,\)"):
        storage.put_scalar("x", torch.zeros(2))
    storage.put_scalar("x", torch.zeros(1))
    with pytest.raises(ValueError, match=r"x.*\(0,\)"):
        storage.put_scalar("x", torch.zeros(0))


@pytest.mark.parametrize("value", [None, "much", [1.0], {}, np.zeros(2), torch.tensor(1j)])
def test_what_is_not_a_number_is_an_error_that_names_it(value):
    storage = EventStorage()
    with pytest.raises(ValueError, match="scalar x: needs"):
        storage.put_scalar("x", value)
    assert storage.latest() == {}


class Sharded(torch.Tensor):
    """Looks like a DTensor."""

    def full_tensor(self):
        raise AssertionError("a collective")


def test_a_dtensor_is_refused_with_the_remedy():
    tensor = torch.ones(()).as_subclass(Sharded)
    storage = EventStorage()
    for put in (storage.put_scalar, storage.put_histogram, storage.put_image):
        with pytest.raises(ValueError, match=r"x: is a DTensor; put tensor.full_tensor\(\)"):
            put("x", tensor)


def test_dtensors_are_recognised_by_a_method_that_torch_gives_them():
    from torch.distributed.tensor import DTensor

    assert hasattr(DTensor, "full_tensor")
    assert issubclass(DTensor, torch.Tensor)


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


def test_a_name_that_is_put_twice_in_one_call_is_an_error():
    storage, loss_dict = EventStorage(), {"total_loss": scalar(1)}
    with pytest.raises(TypeError, match="total_loss"):
        storage.put_scalars(total_loss=scalar(2), **loss_dict)
    with pytest.raises(TypeError, match="total_loss"):
        storage.put_scalars(loss_dict, total_loss=scalar(2))
    assert storage.latest() == {}


def test_a_scalar_that_would_be_taken_as_an_argument_is_an_error():
    for name in ("smoothing_hint", "cur_iter"):
        with pytest.raises(TypeError, match=name):
            EventStorage().put_scalars(**{name: scalar(1)})


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


def test_a_loss_that_is_changed_in_place_after_the_put_is_an_error_and_never_a_wrong_value():
    weight = torch.ones(2, requires_grad=True)
    storage = EventStorage()
    loss = weight.sum()
    storage.put_scalar("loss_raw", loss)
    storage.put_scalar("loss_copy", loss.clone())
    loss *= 3
    with pytest.raises(ValueError, match="loss_raw.*in place"):
        storage.latest()
    with pytest.raises(ValueError, match="loss_raw.*in place"):
        storage.reduce()


def test_tensors_may_be_put_in_inference_mode():
    storage = EventStorage()
    with torch.inference_mode():
        value = torch.ones(())
        storage.put_scalar("x", value)
        value += 1
    assert storage.latest() == {"x": (1.0, 0)}


class Measured(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(3, 3)

    def forward(self, data):
        outputs = self.layer(data)
        storage = get_event_storage()
        storage.put_scalar("activation", outputs.abs().mean())
        storage.put_scalars(loss_extra=outputs.sum(), count=1.0)
        storage.put_image("outputs", outputs[None])
        storage.put_histogram("outputs", outputs)
        return outputs.sum()


def test_a_compiled_model_may_put_and_is_not_compiled_anew_in_each_iteration():
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Measured()
    compiled = torch.compile(model, backend="eager")
    with EventStorage() as storage, EventStorage() as other:
        for storage.iter in range(12):
            other.iter = storage.iter
            data = torch.full((2, 3), float(storage.iter))
            with storage:
                model(data)
            if storage.iter == 2:
                compiled_so_far = torch._dynamo.utils.counters["stats"]["unique_graphs"]
            compiled(data).backward()
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == compiled_so_far
    storage.reduce()
    other.reduce()
    for name, history in storage.histories().items():
        assert len(history.values()) == 12
        for (one, _), (two, _) in zip(history.values(), other.history(name).values()):
            assert two == pytest.approx(one, rel=1e-5)
    assert len(other._vis_data) == len(other._histograms) == 12


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


def test_a_history_that_someone_holds_is_the_same_after_the_reduction():
    storage = EventStorage()
    storage.put_scalar("x", scalar(1))
    history = storage.history("x")
    storage.reduce()
    storage.put_scalar("x", 2.0, cur_iter=1)
    assert history.values() == [(1.0, 0), (2.0, 1)]


def test_reading_in_each_iteration_gives_what_reading_late_gives():
    def fill(storage, read):
        for storage.iter in range(1100):
            storage.put_scalars(a=scalar(storage.iter), b=2.0 * storage.iter)
            storage.put_scalar("a", storage.iter + 1.0)
            if read:
                assert storage.latest()["a"] == (storage.iter + 0.5, storage.iter)
        storage.reduce()
        return {name: history.values() for name, history in storage.histories().items()}

    assert fill(EventStorage(), True) == fill(EventStorage(), False)


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


def test_smoothed_scalars_leave_out_what_is_not_finite_unless_nothing_else_is_there():
    storage = EventStorage()
    for storage.iter, value in enumerate((1, math.nan, 2, math.inf, 6)):
        storage.put_scalar("grad_norm", scalar(value))
        storage.put_scalar("bad", math.nan)
        storage.put_scalar("raw", math.inf, smoothing_hint=False)
    assert storage.latest_with_smoothing_hint(20)["grad_norm"] == (2.0, 4)
    assert storage.latest_with_smoothing_hint(2)["grad_norm"] == (6.0, 4)
    assert math.isnan(storage.latest_with_smoothing_hint(20)["bad"][0])
    assert storage.latest_with_smoothing_hint(20)["raw"] == (math.inf, 4)
    assert math.isnan(storage.history("grad_norm").median(20))


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


def test_a_restored_storage_knows_its_iteration_and_forgets_what_it_had():
    storage, other = EventStorage(), EventStorage()
    storage.iter = 7
    storage.put_scalar("loss", scalar(1))
    other.put_scalars(old=1.0, loss=scalar(9))
    other.put_image("image", torch.zeros(1, 1, 1))
    other.load_state_dict(storage.state_dict())
    other.reduce()
    assert (other.iter, other.start_iter) == (7, 8)
    assert other.latest() == {"loss": (1.0, 7)}
    assert list(other._vis_data) == []


def test_a_loss_that_is_not_finite_is_an_error_that_tells_when_and_where():
    remember_checkpoint("output/model_0000004.pth")
    for name, bad in (("loss_cls", math.nan), ("total_loss", math.inf)):
        storage = EventStorage()
        for iteration in range(7, 10):
            storage.iter = iteration
            storage.put_scalars({name: scalar(bad if iteration > 7 else 1)})
            storage.put_scalar("accuracy", scalar(iteration / 16))
            storage.put_scalar("lr", iteration / 64, smoothing_hint=False)
        with pytest.raises(NonFiniteError, match=rf"iteration 8 on rank 0.*{name}") as caught:
            storage.reduce()
        assert str(caught.value) == (
            f"the loss is not finite at iteration 8 on rank 0: {name} {bad}, accuracy 0.5, "
            "lr 0.125; last good checkpoint: output/model_0000004.pth; lower SOLVER.BASE_LR or "
            "set SOLVER.CLIP_GRAD_NORM, or check the data"
        )
        assert storage.history("accuracy").values() == [(i / 16, i) for i in range(7, 10)]


def test_other_values_may_be_infinite_and_a_float16_gradient_too():
    storage = EventStorage()
    storage.put_scalars(accuracy=scalar(math.nan), grad_norm=scalar(math.inf), loss=scalar(1))
    storage.put_scalar("digits_test/loss", math.nan)  # of an evaluation
    storage.reduce()
    assert storage.latest()["grad_norm"] == (math.inf, 0)
    storage.put_scalar("loss", scalar(math.inf))
    with pytest.raises(NonFiniteError):
        storage.reduce()


@pytest.mark.parametrize("read", [False, True])
def test_a_loss_that_was_looked_at_before_is_checked_as_well(read):
    storage = EventStorage()
    storage.put_scalar("loss", scalar(math.nan))
    if read:
        storage.latest()
    with pytest.raises(NonFiniteError):
        storage.reduce()
    storage.reduce()  # says it once


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

    is_cpu = property(lambda self: False)

    def item(self):
        pytest.fail("a copy for each value")


def test_values_on_a_gpu_are_read_together_each_type_exactly():
    storage = EventStorage()
    count, double = torch.tensor(2**40 + 1), scalar(7).double()
    for name, value in {"loss": torch.tensor([2.5]), "count": count, "double": double}.items():
        storage.put_scalar(name, value.as_subclass(OnGpu))
    storage.put_scalar("cpu", scalar(1))
    expected = {"loss": 2.5, "count": 2**40 + 1, "double": 7.0, "cpu": 1.0}
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


def keeps_numbers_of_its_own():
    rank = comm.get_rank()
    storage = EventStorage()
    for storage.iter in range(3):
        storage.put_scalar("x", scalar(2 * rank))
        if rank == 0:
            storage.put_scalar("x", 0.1, cur_iter=storage.iter + 10)  # behind a tensor
            storage.put_scalar("only", 7.0)
    storage.reduce()
    return {name: history.values() for name, history in storage.histories().items()}


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
        keeps_numbers_of_its_own,
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


def test_numbers_stay_those_of_the_rank(both):
    first, second = both["keeps_numbers_of_its_own"]
    assert second == {"x": [(1.0, 0), (1.0, 1), (1.0, 2)]}
    assert sorted(first["x"], key=lambda pair: pair[1]) == [
        *second["x"],
        (0.1, 10),
        (0.1, 11),
        (0.1, 12),
    ]
    assert first["only"] == [(7.0, 0), (7.0, 1), (7.0, 2)]


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


def test_a_resume_needs_no_mmap_and_reads_a_long_file_from_its_end(metrics, monkeypatch):
    lines = [b'{"iteration": %d, "x": "%s"}\n' % (i, b"y" * 5000) for i in range(400)]
    metrics.write_bytes(b"".join(lines) + b"\0" * 20_000)  # as after a power cut
    monkeypatch.setitem(sys.modules, "mmap", None)
    json_writer = importlib.reload(sys.modules["plumbing.events.json_writer"])
    sizes = []

    class Counted(io.BufferedRandom):
        def read(self, size=-1):
            data = super().read(size)
            sizes.append(len(data))
            return data

    with Counted(open(metrics, "r+b", buffering=0)) as file:
        end = json_writer._end_of_rows_before(file, 397)
    assert end == sum(map(len, lines[:397]))
    assert sum(sizes) < 100_000


def test_a_file_in_which_every_line_is_dropped_becomes_empty(metrics):
    metrics.write_bytes(b'x\n\n{"iteration": 8}\n[]\n')
    write_rows(metrics, {3: {"x": 1.0}}, start_iter=3)
    assert metrics.read_bytes() == b'{"iteration": 3, "x": 1.0}\n'


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


def test_one_skipped_step_does_not_hide_the_losses_of_a_window(metrics):
    with EventStorage() as storage:
        writer = JSONWriter(str(metrics), window_size=3)
        for storage.iter, value in enumerate((1.0, math.nan, 3.0, math.nan, math.nan, math.nan)):
            storage.put_scalar("total_loss", value)
            writer.write()
        writer.close()
    values = [row["total_loss"] for row in read_rows(metrics)]
    assert values == [1.0, 1.0, 2.0, 3.0, 3.0, None]


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


def histogram_of(tensor):
    storage = EventStorage()
    storage.put_histogram("x", tensor, bins=4)
    return storage._histograms[0].content


SPARSE = torch.tensor([[0.0, 1.0, 0.0], [3.0, 0.0, 2.0]])


@pytest.mark.parametrize("convert", [SPARSE.to_sparse, SPARSE.to_sparse_csr, SPARSE.to_sparse_csc])
def test_a_histogram_of_a_sparse_tensor_shows_the_elements_that_are_stored(convert):
    histogram = histogram_of(convert())
    assert (histogram["num"], histogram["sum"]) == (3, 6.0)
    assert (histogram["min"], histogram["max"]) == (1.0, 3.0)


def test_elements_of_a_sparse_tensor_that_are_stored_twice_are_added_up():
    tensor = torch.sparse_coo_tensor([[1, 1]], [2.0, 3.0], (4,), check_invariants=True)
    assert (histogram_of(tensor)["num"], histogram_of(tensor)["max"]) == (1, 5.0)


def test_a_histogram_of_a_complex_tensor_shows_the_magnitudes():
    histogram = histogram_of(torch.tensor([3 + 4j, -1j, math.nan]))
    assert (histogram["num"], histogram["min"], histogram["max"]) == (2, 1.0, 5.0)


def test_a_histogram_takes_the_whole_range_of_float32():
    histogram = histogram_of(torch.tensor([-3e38, 3e38]))
    assert sum(histogram["bucket_counts"]) == 2


def test_an_image_of_a_wrong_shape_is_an_error_that_names_it():
    with pytest.raises(ValueError, match=r"image x.*\(4, 5\)"):
        EventStorage().put_image("x", torch.zeros(4, 5))


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


def test_more_images_of_one_iteration_than_may_wait_are_all_written(tmp_path):
    writer = TensorboardXWriter(str(tmp_path))
    with EventStorage() as storage:
        for part in range(3):
            for number in range(600):
                storage.put_image(f"{part}/{number}", torch.zeros(1, 1, 1))
            writer.write()
    writer.close()
    assert len(read_events(tmp_path).Tags()["images"]) == 1800


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
    assert storage._histograms[0].content["max"] == 0


def test_many_images_and_histograms_may_wait_and_on_other_ranks_none(as_rank):
    for rank, num_kept in ((0, 500), (1, 0)):
        as_rank(rank, 2)
        storage = EventStorage()
        for number in range(500):
            storage.put_image(f"{number}", torch.zeros(1, 1, 1))
            storage.put_histogram(f"{number}", torch.zeros(1))
        assert (len(storage._vis_data), len(storage._histograms)) == (num_kept, num_kept)


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
    storage.put_scalar("loss", scalar(1))
    storage.put_scalar("loss", scalar(math.nan))
    with pytest.raises(NonFiniteError, match="iteration 0"):
        storage.put_scalar("loss", scalar(1))  # more than may wait


@pytest.mark.parametrize("value", [torch.zeros(()), torch.zeros(64, 10), [torch.zeros(())], 1.0])
def test_a_model_that_does_not_return_a_dict_of_losses_is_an_error_that_says_so(value):
    with EventStorage() as storage, pytest.raises(TypeError, match="a dict of losses"):
        storage.put_scalars(value)
