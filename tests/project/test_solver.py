"""The optimizer, its parameter groups and the learning rates of solver.py, by hand."""

import math

import pytest
import torch
from defaults import get_cfg
from plumbing.errors import SettingsError
from solver import (
    build_autocast,
    build_lr_scheduler,
    build_optimizer,
    check_solver,
    lr_multiplier,
)
from torch import nn


def settings(**solver):
    cfg = get_cfg()
    for key, value in solver.items():
        cfg.SOLVER[key] = value
    return cfg


def multipliers(iterations, **solver):
    cfg = settings(**solver)
    return [lr_multiplier(cfg.SOLVER, iteration) for iteration in iterations]


@pytest.mark.parametrize("name", ["SGD", "AdamW"])
def test_each_optimizer_has_the_settings(name):
    cfg = settings(OPTIMIZER=name, BASE_LR=0.3, MOMENTUM=0.8, BETAS=(0.5, 0.6), WEIGHT_DECAY=0.2)
    optimizer = build_optimizer(cfg, nn.Linear(2, 1))
    (group,) = optimizer.param_groups
    assert type(optimizer) is getattr(torch.optim, name)
    assert group["lr"] == 0.3
    assert group["weight_decay"] == 0.2
    assert group["fused"]
    expected = {"SGD": ("momentum", 0.8), "AdamW": ("betas", (0.5, 0.6))}
    key, value = expected[name]
    assert group[key] == value


def test_an_unknown_optimizer_is_refused_before_anything_is_written():
    with pytest.raises(SettingsError, match="'Adam' must be SGD or AdamW"):
        check_solver(settings(OPTIMIZER="Adam"))


def test_what_the_optimizer_of_torch_refuses_is_one_line():
    with pytest.raises(SettingsError, match=r"SOLVER: .*beta"):
        check_solver(settings(OPTIMIZER="AdamW", BETAS=(2.0, 0.9)))


@pytest.mark.parametrize(
    ("enabled", "dtype", "expected"),
    [
        (False, "float16", torch.float32),
        (True, "float16", torch.float16),
        (True, "bfloat16", torch.bfloat16),
    ],
)
def test_autocast_is_mixed_precision_of_the_chosen_type_again_and_again(enabled, dtype, expected):
    cfg = get_cfg()
    cfg.MODEL.DEVICE = "cpu"
    cfg.SOLVER.AMP.ENABLED = enabled
    cfg.SOLVER.AMP.DTYPE = dtype
    autocast = build_autocast(cfg)
    for _ in range(2):
        with autocast:
            assert nn.functional.linear(torch.ones(1, 1), torch.ones(1, 1)).dtype == expected
        assert nn.functional.linear(torch.ones(1, 1), torch.ones(1, 1)).dtype == torch.float32


class MyNorm(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))


@pytest.mark.parametrize(
    "norm",
    [
        nn.BatchNorm1d(4),
        nn.BatchNorm2d(4),
        nn.BatchNorm3d(4),
        nn.SyncBatchNorm(4),
        nn.InstanceNorm2d(4, affine=True),
        nn.GroupNorm(2, 4),
        nn.LayerNorm(4),
        nn.RMSNorm(4),
        MyNorm(4),
    ],
    ids=lambda norm: type(norm).__name__,
)
def test_every_kind_of_norm_has_a_weight_decay_of_its_own(norm):
    model = nn.Sequential(nn.Linear(4, 4), norm)
    optimizer = build_optimizer(settings(WEIGHT_DECAY=0.1, WEIGHT_DECAY_NORM=0.02), model)
    decays = {
        id(parameter): group["weight_decay"]
        for group in optimizer.param_groups
        for parameter in group["params"]
    }
    assert all(decays[id(parameter)] == 0.02 for parameter in norm.parameters())
    assert all(decays[id(parameter)] == 0.1 for parameter in model[0].parameters())


def test_frozen_parameters_are_left_out_and_shared_ones_count_once():
    first = nn.Linear(3, 3)
    last = nn.Linear(3, 3)
    last.weight = first.weight
    last.bias.requires_grad_(False)
    optimizer = build_optimizer(settings(), nn.Sequential(first, last))
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    assert [id(parameter) for parameter in held] == [id(first.weight), id(first.bias)]


def test_the_warm_up_is_linear_from_the_factor_to_the_full_rate():
    found = multipliers(
        range(6), LR_SCHEDULER_NAME="constant", WARMUP_ITERS=4, WARMUP_FACTOR=0.2, MAX_ITER=100
    )
    assert found == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0, 1.0])


@pytest.mark.parametrize("name", ["constant", "multistep", "cosine"])
def test_a_warm_up_longer_than_the_run_is_no_error(name):
    found = multipliers(
        range(12), LR_SCHEDULER_NAME=name, WARMUP_ITERS=20, WARMUP_FACTOR=0.0, MAX_ITER=10
    )
    assert found[:10] == pytest.approx([iteration / 20 for iteration in range(10)])


def test_a_cosine_falls_from_the_end_of_the_warm_up_to_its_end_and_stays_there():
    found = multipliers(
        range(16),
        LR_SCHEDULER_NAME="cosine",
        WARMUP_ITERS=4,
        MAX_ITER=14,
        BASE_LR=0.1,
        BASE_LR_END=0.02,
    )
    expected = [0.2 + 0.8 * (1 + math.cos(math.pi * i / 10)) / 2 for i in range(11)]
    assert found[4:15] == pytest.approx(expected)
    assert found[4] == 1.0
    assert found[15] == pytest.approx(0.2)


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        ((2, 4), [1, 1, 0.5, 0.5, 0.25, 0.25]),
        ((4, 2), [1, 1, 0.5, 0.5, 0.25, 0.25]),
        ((0,), [0.5] * 6),
        ((3, 3), [1, 1, 1, 0.25, 0.25, 0.25]),
        ((5, 9), [1, 1, 1, 1, 1, 0.5]),
        ((), [1] * 6),
    ],
)
def test_steps_may_be_zero_equal_at_the_end_or_past_it(steps, expected):
    found = multipliers(range(6), LR_SCHEDULER_NAME="multistep", STEPS=steps, GAMMA=0.5, MAX_ITER=6)
    assert found == expected


def test_steps_of_a_long_run_are_exact():
    found = multipliers(
        (4_999_999, 5_000_000),
        LR_SCHEDULER_NAME="multistep",
        STEPS=(5_000_000,),
        GAMMA=0.1,
        MAX_ITER=10_000_000,
    )
    assert found == [1, 0.1]


@pytest.mark.parametrize("name", ["constant", "multistep", "cosine"])
def test_past_the_end_the_rate_stays_and_does_not_climb(name):
    at_end, *later = multipliers((10, 11, 15, 20, 1000), LR_SCHEDULER_NAME=name, MAX_ITER=10)
    assert later == [at_end] * 4


def test_a_constant_rate_is_constant_and_an_unknown_name_is_refused():
    assert multipliers(range(5), LR_SCHEDULER_NAME="constant", MAX_ITER=5) == [1.0] * 5
    with pytest.raises(SettingsError, match="'step' must be constant, multistep or cosine"):
        check_solver(settings(LR_SCHEDULER_NAME="step"))


def test_the_scheduler_multiplies_the_base_learning_rate():
    cfg = settings(BASE_LR=0.4, LR_SCHEDULER_NAME="multistep", STEPS=(1,), GAMMA=0.5)
    optimizer = build_optimizer(cfg, nn.Linear(1, 1))
    scheduler = build_lr_scheduler(cfg, optimizer)
    found = []
    for _ in range(3):
        found.append(optimizer.param_groups[0]["lr"])
        scheduler.step()
    assert found == [0.4, 0.2, 0.2]
