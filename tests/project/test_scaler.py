"""The scaler of float16 losses."""

import math

import pytest
import torch
from conftest import counted_waits
from plumbing.errors import NonFiniteError
from plumbing.gradients import GradScaler, set_missing_momentum_to_zero
from torch import nn
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)


def step(scaler, optimizer, model, value):
    """One iteration with the gradient ``value``."""
    scaler.scale(model(torch.full((1,), value)).sum()).backward()
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()


def build(optimizer="SGD", enabled=True, **options):
    model = nn.Linear(1, 1, bias=False)
    options = {"lr": 1.0, "fused": True, **options}
    made = getattr(torch.optim, optimizer)(model.parameters(), **options)
    return GradScaler("cpu", enabled=enabled), made, model


@pytest.mark.parametrize("enabled", [True, False])
def test_a_sum_of_no_losses_is_an_error_that_says_so(enabled):
    scaler, _, _ = build(enabled=enabled)
    with pytest.raises(TypeError, match="a model has to return a dict with at least one loss"):
        scaler.scale(sum({}.values()) / 2)


def test_a_scaler_that_is_not_enabled_passes_everything_through():
    scaler, optimizer, model = build(enabled=False)
    loss = model(torch.ones(1)).sum()
    assert scaler.scale(loss) is loss
    before = model.weight.item()
    loss.backward()
    scaler.unscale_(optimizer)
    assert model.weight.grad.item() == 1.0
    scaler.step(optimizer)
    scaler.update()
    assert model.weight.item() == pytest.approx(before - 1.0)
    assert scaler.state_dict() == {}
    assert scaler.scale_tensor.item() == 1.0


def test_a_step_whose_gradients_overflow_is_skipped_and_the_scale_is_halved():
    scaler, optimizer, model = build()
    before = model.weight.item()
    step(scaler, optimizer, model, math.inf)
    assert scaler.get_scale() == 2.0**15
    assert model.weight.item() == before
    step(scaler, optimizer, model, 1.0)
    assert scaler.get_scale() == 2.0**15
    assert model.weight.item() == pytest.approx(before - 1.0)


def test_the_gradients_are_the_true_ones_after_unscale():
    scaler, optimizer, model = build()
    scaler.scale(model(torch.full((1,), 3.0)).sum()).backward()
    assert model.weight.grad.item() == 3.0 * 2**16
    scaler.unscale_(optimizer)
    assert model.weight.grad.item() == 3.0
    with pytest.raises(RuntimeError, match="unscale_.. has already been called"):
        scaler.unscale_(optimizer)


def test_the_scale_can_be_logged_without_reading_it_and_keeps_its_value():
    scaler, optimizer, model = build()
    with counted_waits() as counts:
        before = scaler.scale_tensor
        step(scaler, optimizer, model, math.inf)
        after = scaler.scale_tensor
    assert counts["reads"] == 0
    assert (before.item(), after.item()) == (2.0**16, 2.0**15)
    assert before.dtype == torch.float32
    assert before.shape == ()


@pytest.mark.parametrize("saved", [False, True])
@pytest.mark.parametrize("loading", [False, True])
def test_a_state_is_loaded_whether_or_not_the_scalers_are_enabled(saved, loading):
    scaler, optimizer, model = build(enabled=saved)
    step(scaler, optimizer, model, math.inf if saved else 1.0)
    other, optimizer, model = build(enabled=loading)
    other.load_state_dict(scaler.state_dict())
    expected = {(False, False): 1.0, (True, False): 1.0, (False, True): 2.0**16}
    assert other.get_scale() == expected.get((saved, loading), 2.0**15)
    step(other, optimizer, model, 1.0)


def test_the_steps_since_the_last_overflow_are_loaded_too():
    scaler, optimizer, model = build()
    for _ in range(3):
        step(scaler, optimizer, model, 1.0)
    other, _, _ = build()
    other.load_state_dict(scaler.state_dict())
    assert other.state_dict() == scaler.state_dict()
    assert scaler.state_dict()["_growth_tracker"] == 3


def test_a_scale_that_has_vanished_is_an_error_when_it_is_saved():
    scaler, optimizer, model = build()
    for _ in range(50):
        step(scaler, optimizer, model, math.nan)
    assert scaler.state_dict()["scale"] == 2.0**-34
    for _ in range(10):
        step(scaler, optimizer, model, math.nan)
    with pytest.raises(NonFiniteError, match="float16: .*last good checkpoint: .*bfloat16"):
        scaler.state_dict()


def test_the_fused_sgd_has_no_arbitrary_momentum_after_a_first_step_that_was_skipped():
    for _ in range(20):
        rubbish = [torch.full((64, 64), 1e3) for _ in range(20)]
        del rubbish  # so that memory that is not initialized is not zero
        model = nn.Linear(64, 64, bias=False)
        before = model.weight.detach().clone()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9, fused=True)
        scaler = GradScaler("cpu")
        for value in (math.inf, 0.0):
            scaler.scale((model.weight * value).sum()).backward()
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        assert torch.equal(model.weight, before)


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("fused", [False, True])
def test_momentum_that_begins_at_zero_gives_the_steps_of_torch(nesterov, fused):
    models = [nn.Linear(3, 2) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    optimizers = [
        torch.optim.SGD(m.parameters(), 0.1, momentum=0.9, nesterov=nesterov, fused=fused)
        for m in models
    ]
    set_missing_momentum_to_zero(optimizers[0])
    for _ in range(3):
        for model, optimizer in zip(models, optimizers):
            model(torch.ones(3)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert torch.equal(models[0].weight, models[1].weight)
    assert torch.equal(models[0].bias, models[1].bias)


def test_a_parameter_whose_first_gradient_comes_late_is_trained_by_the_fused_sgd():
    early, late = (nn.Parameter(torch.ones(2)) for _ in range(2))
    optimizer = torch.optim.SGD([early, late], lr=1.0, momentum=0.9, fused=True)
    set_missing_momentum_to_zero(optimizer)
    early.grad = torch.ones(2)
    optimizer.step()
    assert late.tolist() == [1.0, 1.0]
    late.grad = torch.ones(2)
    optimizer.step()
    assert late.tolist() == [0.0, 0.0]


def test_optimizers_without_momentum_of_that_kind_are_left_alone():
    for name, options in {
        "SGD": {"momentum": 0.0},
        "AdamW": {},
        "RMSprop": {"momentum": 0.9, "fused": None},
    }.items():
        options = {key: value for key, value in options.items() if value is not None}
        model = nn.Linear(1, 1)
        optimizer = getattr(torch.optim, name)(model.parameters(), lr=0.1, **options)
        set_missing_momentum_to_zero(optimizer)
        assert not optimizer.state


@pytest.mark.parametrize("name", ["SGD", "Adam", "AdamW", "Adagrad"])
def test_every_fused_optimizer_skips_the_steps_of_bad_gradients(name):
    scaler, optimizer, model = build(name)
    moved = []
    for value in (math.nan, 1.0, math.nan, 1.0):
        before = model.weight.item()
        step(scaler, optimizer, model, value)
        moved.append(model.weight.item() != before)
    assert moved == [False, True, False, True]
    assert model.weight.isfinite().all()


def test_an_optimizer_that_is_not_fused_skips_them_too():
    scaler, optimizer, model = build(fused=False, momentum=0.9)
    before = model.weight.item()
    step(scaler, optimizer, model, math.nan)
    assert model.weight.item() == before
    step(scaler, optimizer, model, 1.0)
    assert model.weight.item() == pytest.approx(before - 1.0)


def names_of_profiled(scaler, optimizer):
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        scaler.step(optimizer)
    return {event.key for event in profile.key_averages()}


def test_a_step_is_seen_by_the_profiler_and_by_hooks():
    scaler, optimizer, model = build(enabled=False)
    model(torch.ones(1)).sum().backward()
    scaler.step(optimizer)
    assert "Optimizer.step#SGD.step" in names_of_profiled(scaler, optimizer)
    called = []
    for register in (
        optimizer.register_step_pre_hook,
        optimizer.register_step_post_hook,
        register_optimizer_step_pre_hook,
        register_optimizer_step_post_hook,
    ):
        handle = register(lambda *_: called.append(1))
        scaler.step(optimizer)
        handle.remove()
    assert len(called) == 4


@pytest.mark.parametrize("name", ["SGD", "AdamW", "Adagrad"])
def test_a_step_is_that_of_the_optimizer_also_with_a_scheduler_of_torch(name):
    weights = []
    for step in (lambda scaler, optimizer: scaler.step(optimizer), lambda _, each: each.step()):
        torch.manual_seed(0)
        scaler, optimizer, model = build(name, enabled=False, fused=name != "Adagrad")
        model(torch.ones(1)).sum().backward()
        step(scaler, optimizer)
        # It replaces the method of the object, and warns if that is not called.
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        step(scaler, optimizer)
        scheduler.step()
        step(scaler, optimizer)
        weights.append(model.weight.item())
    assert weights[0] == weights[1]
