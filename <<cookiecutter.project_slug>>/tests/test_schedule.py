"""The learning rate is a function of the iteration."""

import math

import pytest
import torch
from torch import nn

from defaults import get_cfg
from optimizer import build_optimizer
from schedule import LRMultiplier, build_lr_scheduler


def settings(**solver):
    cfg = get_cfg()
    cfg.MODEL.DEVICE = "cpu"
    for key, value in solver.items():
        cfg.SOLVER[key] = value
    return cfg


def rates(num=None, model=None, **solver):
    cfg = settings(**{"BASE_LR": 1.0, **solver})
    scheduler = build_lr_scheduler(cfg, build_optimizer(cfg, model or nn.Linear(1, 1, bias=False)))
    values = []
    for _ in range(cfg.SOLVER.MAX_ITER + 1 if num is None else num):
        values.append(scheduler.get_last_lr()[0])
        scheduler.step()
    return values


def test_the_warm_up_is_linear_from_the_factor_to_the_full_rate():
    values = rates(12, LR_SCHEDULER_NAME="constant", WARMUP_ITERS=10, WARMUP_FACTOR=0.001)
    expected = [0.001, 0.1009, 0.2008, 0.3007, 0.4006, 0.5005, 0.6004, 0.7003, 0.8002, 0.9001, 1, 1]
    assert values == pytest.approx(expected, abs=1e-12)


def test_a_constant_warm_up_stays_at_the_factor():
    warm_up = {"WARMUP_ITERS": 3, "WARMUP_FACTOR": 0.25, "WARMUP_METHOD": "constant"}
    assert rates(5, LR_SCHEDULER_NAME="constant", **warm_up) == [0.25, 0.25, 0.25, 1, 1]


def test_a_warm_up_ends_at_the_rate_of_the_schedule():
    values = rates(MAX_ITER=10, WARMUP_ITERS=5, WARMUP_FACTOR=0.0)
    plain = rates(MAX_ITER=10)
    assert values[5:] == plain[5:]
    assert values[:5] == pytest.approx([plain[i] * i / 5 for i in range(5)])
    stepped = {"LR_SCHEDULER_NAME": "multistep", "STEPS": (2,), "GAMMA": 0.5}
    values = rates(6, WARMUP_ITERS=4, WARMUP_FACTOR=0.0, **stepped)
    assert values == [0, 0.25, 0.25, 0.375, 0.5, 0.5]


def test_a_warm_up_longer_than_the_run_is_no_error():
    values = rates(MAX_ITER=4, WARMUP_ITERS=8, LR_SCHEDULER_NAME="constant", WARMUP_FACTOR=0.0)
    assert values == [0.0, 0.125, 0.25, 0.375, 0.5]


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        ((), [1, 1, 1, 1, 1, 1]),
        ((2, 4), [1, 1, 0.5, 0.5, 0.25, 0.25]),
        ((4, 2), [1, 1, 0.5, 0.5, 0.25, 0.25]),
        ((0,), [0.5, 0.5, 0.5, 0.5, 0.5, 0.5]),
        ((2, 2), [1, 1, 0.25, 0.25, 0.25, 0.25]),
        ((5,), [1, 1, 1, 1, 1, 0.5]),
        ((3, 99), [1, 1, 1, 0.5, 0.5, 0.5]),
    ],
)
def test_steps_may_be_zero_equal_at_the_end_or_past_it(steps, expected):
    schedule = {"LR_SCHEDULER_NAME": "multistep", "GAMMA": 0.5, "MAX_ITER": 5}
    assert rates(STEPS=steps, **schedule) == expected


def test_steps_of_a_long_run_are_exact():
    cfg = settings(LR_SCHEDULER_NAME="multistep", STEPS=(5_000_000,), MAX_ITER=10_000_000)
    scheduler = build_lr_scheduler(cfg, build_optimizer(cfg, nn.Linear(1, 1)))
    for iteration, expected in ((4_999_999, 0.1), (5_000_000, 0.01)):
        scheduler.load_state_dict({"iteration": iteration})
        assert scheduler.get_last_lr()[0] == pytest.approx(expected)


def test_a_cosine_falls_to_its_end_and_stays_there():
    values = rates(16, MAX_ITER=8, BASE_LR=2.0, BASE_LR_END=0.5)
    expected = [0.5 + 1.5 * (1 + math.cos(math.pi * i / 8)) / 2 for i in range(9)]
    assert values == pytest.approx(expected + [0.5] * 7)
    assert values[4] == pytest.approx(1.25)


def test_every_group_keeps_its_ratio():
    cfg = settings(BASE_LR=0.5, BIAS_LR_FACTOR=2.0, MAX_ITER=4, WEIGHT_DECAY_BIAS=0.0)
    scheduler = build_lr_scheduler(cfg, build_optimizer(cfg, nn.Linear(1, 1)))
    for _ in range(4):
        weight, bias = scheduler.get_last_lr()
        assert bias == 2 * weight > 0
        scheduler.step()


def test_any_function_of_the_iteration_is_a_schedule():
    optimizer = torch.optim.SGD([{"params": torch.zeros(1), "lr": 2.0}], lr=1.0)
    scheduler = LRMultiplier(optimizer, lambda iteration: iteration + 1)
    assert scheduler.get_last_lr() == [2.0]
    scheduler.step()
    assert scheduler.get_last_lr() == [optimizer.param_groups[0]["lr"]] == [4.0]


def test_a_state_of_the_schedule_is_its_iteration_alone():
    def build(max_iter):
        cfg = settings(BASE_LR=1.0, MAX_ITER=max_iter)
        optimizer = build_optimizer(cfg, nn.Linear(1, 1, bias=False))
        return build_lr_scheduler(cfg, optimizer), optimizer

    scheduler, _ = build(10)
    for _ in range(5):
        scheduler.step()
    longer, optimizer = build(20)
    longer.load_state_dict(scheduler.state_dict())
    assert longer.get_last_lr() == [group["lr"] for group in optimizer.param_groups]
    assert longer.get_last_lr() == pytest.approx([(1 + math.cos(math.pi / 4)) / 2])
    longer.step()
    assert longer.get_last_lr() == [rates(7, MAX_ITER=20)[6]]
    shorter, _ = build(3)
    shorter.load_state_dict(scheduler.state_dict())
    assert shorter.get_last_lr() == [0.0]
