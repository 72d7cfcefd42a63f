"""Buffers that differ between ranks: means inside, each rank's own afterwards."""

import contextlib

import pytest
import torch
from plumbing import comm
from plumbing.buffers import averaged_buffers, load_buffers
from ranks import run_on_ranks
from torch import nn


def averages_buffers():
    """Statistics inside, after an exception inside, and after load_buffers."""
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    statistics = model[1]
    with torch.no_grad():
        statistics.running_mean.fill_(comm.get_rank())
        statistics.running_var += comm.get_rank()
    statistics.num_batches_tracked += 7
    states = []
    with contextlib.suppress(KeyError), averaged_buffers(model) as every:
        states.append({name: buffer.tolist() for name, buffer in model.named_buffers()})
        raise KeyError
    states.append({name: buffer.tolist() for name, buffer in model.named_buffers()})
    load_buffers(model, every, 1 - comm.get_rank())
    states.append({name: buffer.tolist() for name, buffer in model.named_buffers()})
    with averaged_buffers(nn.Linear(2, 2)):  # has none
        return states


def keeps_buffers_of_all_types():
    """Of this rank inside, afterwards, and after those of the other rank were loaded."""
    model, rank = nn.Module(), comm.get_rank()
    model.register_buffer("mean", torch.tensor([0.5 + rank], dtype=torch.bfloat16))
    model.register_buffer("flag", torch.tensor([rank == 0, True, False]))
    model.register_buffer("none", torch.zeros(0, 3, dtype=torch.int64))
    model.register_buffer("count", torch.tensor(2**60 + rank))
    model.register_buffer("wave", torch.tensor([[1j * rank], [2]]).T)

    def values():
        return [buffer.tolist() for buffer in model.buffers()]

    states = []
    with averaged_buffers(model) as every:
        states.append(values())
    states.append(values())
    load_buffers(model, every, 1 - rank)
    return [*states, values()]


def keeps_buffers_by_name():
    """Those of this rank, after the model has changed inside, or registers them otherwise."""
    rank = torch.tensor([1.0 + comm.get_rank()])
    model = nn.Module()
    model.register_buffer("first", rank.clone())
    model.register_buffer("second", 10 * rank)
    model.register_buffer("cache", torch.ones(2 + comm.get_rank()), persistent=False)
    model.register_buffer("sparse", torch.eye(2).to_sparse())
    with averaged_buffers(model) as every:
        model.second = torch.zeros(3)
        model.register_buffer("late", 100 * rank)
    states = [[buffer.tolist() for buffer in (model.first, model.second, model.cache, model.late)]]
    other = nn.Module()
    other.register_buffer("second", torch.zeros(1))
    other.register_buffer("first", torch.zeros(1))
    load_buffers(other, every, 1 - comm.get_rank())
    return [*states, [other.first.tolist(), other.second.tolist()]]


@pytest.fixture(scope="module")
def both():
    """{name of a check: [what rank 0 returned, what rank 1 returned]}"""
    ranks = run_on_ranks(averages_buffers, keeps_buffers_of_all_types, keeps_buffers_by_name)
    return {name: [rank[name] for rank in ranks] for name in ranks[0]}


def test_buffers_are_the_mean_inside_only_also_after_an_exception(both):
    for rank, (inside, after, _) in enumerate(both["averages_buffers"]):
        assert inside["1.running_mean"] == [0.5, 0.5]
        assert inside["1.running_var"] == [1.5, 1.5]
        assert inside["1.num_batches_tracked"] == 7
        assert after["1.running_mean"] == [rank, rank]
        assert after["1.running_var"] == [1 + rank, 1 + rank]


def test_buffers_of_any_rank_can_be_loaded(both):
    for rank, (*_, loaded) in enumerate(both["averages_buffers"]):
        assert loaded["1.running_mean"] == [1 - rank, 1 - rank]
        assert loaded["1.running_var"] == [2 - rank, 2 - rank]


def test_each_rank_keeps_its_own_buffers_of_any_type_and_only_floats_are_averaged(both):
    def own(rank):
        return [[0.5 + rank], [rank == 0, True, False], [], 2**60 + rank, [[1j * rank, 2]]]

    for rank, (inside, after, other) in enumerate(both["keeps_buffers_of_all_types"]):
        assert inside == [[1.0], *own(rank)[1:]]
        assert after == own(rank)
        assert other == own(1 - rank)


def test_buffers_go_by_name_and_caches_are_left_alone(both):
    mine = [[[1.0], [0.0] * 3, [1.0] * 2, [100.0]], [[2.0], [0.0] * 3, [1.0] * 3, [200.0]]]
    others = [[[2.0], [20.0]], [[1.0], [10.0]]]
    assert both["keeps_buffers_by_name"] == [list(pair) for pair in zip(mine, others)]


def test_a_single_process_keeps_its_buffers():
    model = nn.BatchNorm1d(2)
    model.running_mean += 3
    with averaged_buffers(model) as every:
        assert every == {}
        assert model.running_mean.tolist() == [3, 3]
    assert model.running_mean.tolist() == [3, 3]
