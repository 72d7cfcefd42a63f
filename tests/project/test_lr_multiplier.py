"""The learning rate is a function of the iteration."""

import math

import pytest
import torch
from plumbing.errors import SettingsError
from plumbing.schedule import LRMultiplier
from torch import nn


def sgd(*lrs):
    return torch.optim.SGD([{"params": nn.Parameter(torch.zeros(1)), "lr": lr} for lr in lrs])


def cosine(max_iter):
    return lambda iteration: 0.5 * (1 + math.cos(math.pi * min(iteration / max_iter, 1.0)))


def test_any_function_of_the_iteration_is_a_schedule():
    optimizer = sgd(2.0)
    scheduler = LRMultiplier(optimizer, lambda iteration: iteration + 1)
    assert scheduler.get_last_lr() == [2.0]
    scheduler.step()
    assert scheduler.get_last_lr() == [optimizer.param_groups[0]["lr"]] == [4.0]


def test_the_multiplier_counts_in_the_first_iteration_already():
    optimizer = sgd(2.0)
    LRMultiplier(optimizer, lambda iteration: 0.5)
    assert optimizer.param_groups[0]["lr"] == 1.0


def test_every_group_keeps_its_ratio():
    optimizer = sgd(0.5, 1.0)
    scheduler = LRMultiplier(optimizer, cosine(4))
    for _ in range(4):
        weight, bias = scheduler.get_last_lr()
        assert bias == 2 * weight > 0
        scheduler.step()


def test_a_state_is_the_iteration_alone_so_that_edited_settings_take_effect():
    scheduler = LRMultiplier(sgd(1.0), cosine(10))
    for _ in range(5):
        scheduler.step()
    assert scheduler.state_dict() == {"iteration": 5}
    optimizer = sgd(3.0)
    longer = LRMultiplier(optimizer, cosine(20))
    longer.load_state_dict(scheduler.state_dict())
    assert longer.get_last_lr() == [optimizer.param_groups[0]["lr"]] == [3.0 * cosine(20)(5)]
    longer.step()
    assert longer.get_last_lr() == [3.0 * cosine(20)(6)]


def test_a_long_run_is_exact_in_every_iteration():
    scheduler = LRMultiplier(sgd(0.1), lambda iteration: 0.1 if iteration >= 5_000_000 else 1.0)
    for iteration, expected in ((4_999_999, 0.1), (5_000_000, 0.01)):
        scheduler.load_state_dict({"iteration": iteration})
        assert scheduler.get_last_lr()[0] == pytest.approx(expected)


@pytest.mark.parametrize("state", [{}, {"scheduler": {}, "groups": []}, "torch"])
def test_the_state_of_a_different_kind_of_scheduler_is_refused_in_one_line(state):
    if state == "torch":
        state = torch.optim.lr_scheduler.StepLR(sgd(1.0), 3).state_dict()
    scheduler = LRMultiplier(sgd(1.0), cosine(4))
    with pytest.raises(SettingsError, match="^--resume: .*different kind of learning rate sched"):
        scheduler.load_state_dict(state)
    assert scheduler.get_last_lr() == [1.0]


def test_the_groups_hold_nothing_that_is_not_theirs():
    optimizer = sgd(1.0)
    before = set(optimizer.param_groups[0])
    LRMultiplier(optimizer, cosine(4)).step()
    assert set(optimizer.param_groups[0]) == before


def test_a_learning_rate_that_is_a_tensor_stays_the_same_tensor():
    lr = torch.tensor(2.0)
    optimizer = sgd(lr)
    scheduler = LRMultiplier(optimizer, lambda iteration: 1 / (iteration + 1))
    kept = optimizer.param_groups[0]["lr"]
    scheduler.step()
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] is kept
    assert kept.item() == pytest.approx(2 / 3)
