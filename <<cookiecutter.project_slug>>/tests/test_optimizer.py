"""Parameter groups, resuming the optimizer, mixed precision, the sum of losses."""

import copy
import math

import pytest
import torch
from torch import nn

from defaults import get_cfg
from hardware import build_autocast
from model import sum_losses
from optimizer import (
    build_grad_scaler,
    build_optimizer,
)
from plumbing.comm import SettingsError


def settings(**solver):
    cfg = get_cfg()
    cfg.MODEL.DEVICE = "cpu"
    for key, value in solver.items():
        cfg.SOLVER[key] = value
    return cfg


def groups_of(model, **solver):
    """{name: (learning rate, weight decay)}"""
    decays = {"WEIGHT_DECAY": 1.0, "WEIGHT_DECAY_NORM": 0.5, "WEIGHT_DECAY_BIAS": 0.25}
    cfg = settings(**{"BASE_LR": 0.1, "BIAS_LR_FACTOR": 2.0, **decays, **solver})
    return {
        name: (group["lr"], group["weight_decay"])
        for group in build_optimizer(cfg, model).param_groups
        for name in group["param_names"]
    }


# Parameter groups


def test_norms_biases_and_the_rest_have_a_decay_of_their_own():
    model = nn.Sequential(nn.Conv1d(1, 2, 1), nn.BatchNorm1d(2), nn.Linear(2, 2))
    assert groups_of(model) == {
        "0.weight": (0.1, 1.0),
        "0.bias": (0.2, 0.25),
        "1.weight": (0.1, 0.5),
        "1.bias": (0.2, 0.5),
        "2.weight": (0.1, 1.0),
        "2.bias": (0.2, 0.25),
    }


@pytest.mark.parametrize(
    "norm",
    [
        nn.BatchNorm2d(2),
        nn.SyncBatchNorm(2),
        nn.GroupNorm(1, 2),
        nn.LayerNorm(2),
        nn.InstanceNorm2d(2, affine=True),
        nn.RMSNorm(2),
    ],
    ids=lambda norm: type(norm).__name__,
)
def test_every_kind_of_norm_is_known(norm):
    groups = groups_of(nn.ModuleDict({"norm": norm}))
    assert groups["norm.weight"] == (0.1, 0.5)
    assert {decay for _, decay in groups.values()} == {0.5}


def test_equal_settings_share_a_group():
    model = nn.Sequential(*[nn.Linear(2, 2) for _ in range(5)])
    for bias_decay, number in ((0.0, 2), (1.0, 1), (-1.0, 1)):
        cfg = settings(WEIGHT_DECAY=1.0, WEIGHT_DECAY_BIAS=bias_decay)
        assert len(build_optimizer(cfg, model).param_groups) == number


def test_frozen_parameters_are_left_out_and_shared_ones_count_once():
    model = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2), "c": nn.Linear(2, 2)})
    model["b"].weight = model["a"].weight
    model["c"].weight.requires_grad_(False)
    assert set(groups_of(model)) == {"a.weight", "a.bias", "b.bias", "c.bias"}


def test_names_are_those_of_the_bare_model_and_parameters_at_the_top_are_found():
    model = nn.DataParallel(nn.Linear(2, 2))
    assert set(groups_of(model)) == {"weight", "bias"}
    assert set(groups_of(nn.Linear(2, 2))) == {"weight", "bias"}


@pytest.mark.parametrize("name", ["SGD", "AdamW"])
def test_the_optimizer_has_the_settings(name):
    solver = {"BASE_LR": 0.5, "WEIGHT_DECAY": 0.125, "MOMENTUM": 0.75, "NESTEROV": True}
    cfg = settings(OPTIMIZER=name, BETAS=(0.5, 0.75), **solver)
    (group,) = build_optimizer(cfg, nn.Linear(2, 2, bias=False)).param_groups
    assert (group["lr"], group["weight_decay"]) == (0.5, 0.125)
    if name == "SGD":
        assert (group["momentum"], group["nesterov"]) == (0.75, True)
    else:
        assert group["betas"] == (0.5, 0.75)


# Resuming the optimizer


class Net(nn.Module):
    """Four parameters of one shape; gradients are told by ``marked``."""

    def __init__(self, *names):
        super().__init__()
        for name in names:
            norm = name.startswith("norm")
            self.add_module(name, nn.LayerNorm(1, bias=False) if norm else nn.Linear(1, 1, False))


def trained(cfg, model, gradients):
    """An optimizer after one step with these gradients, by name."""
    optimizer = build_optimizer(cfg, model)
    for name, parameter in model.named_parameters():
        parameter.grad = torch.full_like(parameter, gradients[name])
    optimizer.step()
    return optimizer


def momenta(optimizer, model):
    """{name: its momentum, rounded}"""
    states = {name: optimizer.state[parameter] for name, parameter in model.named_parameters()}
    return {
        name: round(state["momentum_buffer"].item())
        for name, state in states.items()
        if state.get("momentum_buffer") is not None
    }


GRADIENTS = {"a.weight": 10.0, "norm.weight": 20.0, "b.weight": 30.0, "c.weight": 40.0}


def test_momenta_are_restored_by_name_even_if_groups_and_order_changed():
    model = Net("a", "norm", "b", "c")
    saved = trained(settings(WEIGHT_DECAY_NORM=0.0), model, GRADIENTS).state_dict()
    for names, decay in ((("a", "norm", "b", "c"), 1e-4), (("c", "norm", "a", "b"), 0.5)):
        other = Net(*names)
        optimizer = build_optimizer(settings(WEIGHT_DECAY_NORM=decay), other)
        optimizer.load_state_dict(copy.deepcopy(saved))
        assert momenta(optimizer, other) == GRADIENTS


def test_a_parameter_that_is_new_starts_anew_with_a_warning(caplog):
    saved = trained(settings(), Net("a", "b"), GRADIENTS).state_dict()
    other = Net("a", "new", "b")
    optimizer = build_optimizer(settings(), other)
    optimizer.load_state_dict(saved)
    assert momenta(optimizer, other) == {"a.weight": 10, "new.weight": 0, "b.weight": 30}
    assert "new.weight" in caplog.text
    assert "a.weight" not in caplog.text


@pytest.mark.parametrize("name", ["SGD", "AdamW"])
def test_a_parameter_that_was_frozen_before_a_resume_is_trained_after_it(name):
    cfg, model = settings(OPTIMIZER=name), Net("a", "b")
    model.b.requires_grad_(False)
    gradients = {"a.weight": 10.0, "b.weight": 0.0}
    saved = trained(cfg, model, gradients).state_dict()
    model.b.requires_grad_(True)
    before = model.b.weight.item()
    optimizer = build_optimizer(cfg, model)
    optimizer.load_state_dict(saved)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    assert model.b.weight.item() < before


def test_a_parameter_that_is_frozen_now_is_no_error():
    saved = trained(settings(), Net("a", "b", "c"), GRADIENTS).state_dict()
    other = Net("a", "b", "c")
    other.b.requires_grad_(False)
    optimizer = build_optimizer(settings(), other)
    optimizer.load_state_dict(saved)
    assert momenta(optimizer, other) == {"a.weight": 10, "c.weight": 40}


def test_a_parameter_that_is_frozen_now_gives_its_state_to_no_other_in_the_next_resume():
    saved = trained(settings(), Net("a", "b", "norm"), GRADIENTS).state_dict()
    other = Net("norm", "a", "b")
    other.b.requires_grad_(False)
    for _ in range(2):
        optimizer = build_optimizer(settings(), other)
        optimizer.load_state_dict(saved)
        saved = copy.deepcopy(optimizer.state_dict())
    assert momenta(optimizer, other) == {"norm.weight": 20, "a.weight": 10}


def test_edited_settings_win_over_those_of_the_file():
    model = Net("a", "b")
    saved = trained(settings(), model, GRADIENTS).state_dict()
    cfg = settings(BASE_LR=0.75, WEIGHT_DECAY=0.25, MOMENTUM=0.5, NESTEROV=True)
    optimizer = build_optimizer(cfg, model)
    optimizer.load_state_dict(saved)
    (group,) = optimizer.param_groups
    assert (group["lr"], group["weight_decay"]) == (0.75, 0.25)
    assert (group["momentum"], group["nesterov"]) == (0.5, True)
    assert momenta(optimizer, model) == {"a.weight": 10, "b.weight": 30}


def test_the_state_of_another_optimizer_is_refused_in_one_line():
    model = Net("a")
    saved = trained(settings(), model, GRADIENTS).state_dict()
    with pytest.raises(SettingsError, match="AdamW") as caught:
        build_optimizer(settings(OPTIMIZER="AdamW"), model).load_state_dict(saved)
    assert "\n" not in str(caught.value)


def test_a_resumed_adamw_goes_on_as_if_it_had_not_stopped():
    cfg, model = settings(OPTIMIZER="AdamW"), nn.Linear(3, 2)
    optimizer = build_optimizer(cfg, model)

    def step(model, optimizer):
        optimizer.zero_grad()
        model(torch.arange(3.0)).square().sum().backward()
        optimizer.step()

    step(model, optimizer)
    other = copy.deepcopy(model)
    resumed = build_optimizer(cfg, other)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for each in ((model, optimizer), (other, resumed)):
        step(*each)
    assert torch.equal(model.weight, other.weight)
    assert torch.equal(model.bias, other.bias)


# Gradients


def test_a_scaler_that_is_off_passes_everything_through():
    model = nn.Linear(1, 1, bias=False)
    for amp, dtype in ((False, "float16"), (True, "bfloat16")):
        cfg = settings(MOMENTUM=0.0, BASE_LR=1.0, WEIGHT_DECAY=0.0)
        cfg.SOLVER.AMP.ENABLED, cfg.SOLVER.AMP.DTYPE = amp, dtype
        scaler = build_grad_scaler(cfg, model)
        loss = model(torch.ones(1)).sum()
        assert scaler.scale(loss) is loss
        optimizer = build_optimizer(cfg, model)
        before = model.weight.item()
        loss.backward()
        scaler.unscale_(optimizer)
        assert model.weight.grad.item() == 1.0
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        assert model.weight.item() == pytest.approx(before - 1.0)
        assert scaler.state_dict() == {}


def test_float16_scales_the_loss_and_skips_a_step_that_overflows():
    cfg = settings(MOMENTUM=0.0, BASE_LR=1.0)
    cfg.SOLVER.AMP.ENABLED, cfg.SOLVER.AMP.DTYPE = True, "float16"
    model = nn.Linear(1, 1, bias=False)
    scaler = build_grad_scaler(cfg, model)
    optimizer, before = build_optimizer(cfg, model), model.weight.item()
    scaler.scale(model(torch.full((1,), math.inf)).sum()).backward()
    scaler.unscale_(optimizer)
    scale = scaler.get_scale()
    scaler.step(optimizer)
    scaler.update()
    assert scale > 1
    assert scaler.get_scale() < scale
    assert model.weight.item() == before


@pytest.mark.parametrize(
    ("enabled", "name", "dtype"),
    [
        (False, "float16", torch.float32),
        (True, "float16", torch.float16),
        (True, "bfloat16", torch.bfloat16),
    ],
)
def test_mixed_precision_is_of_the_chosen_type_again_and_again(enabled, name, dtype):
    cfg = settings()
    cfg.SOLVER.AMP.ENABLED, cfg.SOLVER.AMP.DTYPE = enabled, name
    autocast = build_autocast(cfg)
    for _ in range(2):
        with autocast:
            assert nn.functional.linear(torch.ones(1, 1), torch.ones(1, 1)).dtype == dtype
        assert nn.functional.linear(torch.ones(1, 1), torch.ones(1, 1)).dtype == torch.float32


def test_only_entries_with_loss_in_their_name_are_summed():
    values = {"loss_cls": 1.0, "aux_loss": 2.0, "accuracy": 9.0}
    assert sum_losses({name: torch.tensor(v) for name, v in values.items()}).item() == 3.0
    assert sum_losses({"loss": torch.tensor(4.0)}).item() == 4.0


@pytest.mark.parametrize(
    "losses", [{}, {"acc": torch.tensor(1.0)}, {"total_loss": torch.tensor(1.0)}]
)
def test_a_dict_without_losses_or_with_their_sum_is_an_error_that_shows_it(losses):
    with pytest.raises(ValueError, match="total_loss") as caught:
        sum_losses(losses)
    assert all(name in str(caught.value) for name in losses)
