"""The state of the random generators."""

import random

import numpy as np
import torch
from plumbing.random_state import set_random_state


def draws():
    return (torch.rand(3).tolist(), np.random.rand(3).tolist(), [random.random() for _ in range(3)])


def test_all_generators_are_a_function_of_seed_iteration_and_rank():
    seen = []
    for numbers in ((0, 0, 0), (0, 0, 1), (0, 1, 0), (1, 0, 0), (0, 1, 1), (2**40, 10**9, 999)):
        set_random_state(*numbers)
        first = draws()
        draws()
        set_random_state(*numbers)
        assert draws() == first
        seen.append(first)
    for values in zip(*seen):
        assert len({tuple(each) for each in values}) == len(seen)


def test_iteration_and_rank_are_0_by_default():
    set_random_state(3)
    first = draws()
    set_random_state(3, 0, 0)
    assert draws() == first


def test_generators_of_neighbouring_iterations_and_ranks_are_unrelated():
    values = []
    for iteration in range(100):
        for rank in range(10):
            set_random_state(0, iteration, rank)
            values.append([torch.rand(()).item(), np.random.rand(), random.random()])
    values = np.array(values)
    assert np.all(abs(values.mean(axis=0) - 0.5) < 0.05)
    for column in values.T:
        assert len(set(column)) == 1000
        assert abs(np.corrcoef(column[1:], column[:-1])[0, 1]) < 0.15
