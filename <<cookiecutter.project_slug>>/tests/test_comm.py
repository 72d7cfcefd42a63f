"""Ranks: what they do together, on two processes, and alone."""

import contextlib

import numpy as np
import pytest
import torch
import torch.distributed as dist
from ranks import run_on_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from hardware import gradient_sync
from plumbing import comm


def knows_its_place():
    return (
        comm.get_rank(),
        comm.get_world_size(),
        comm.get_local_rank(),
        comm.get_local_size(),
        comm.is_main_process(),
    )


def gathers():
    data = {"rank": comm.get_rank(), "text": "x" * (1 + 1000 * comm.get_rank())}
    comm.synchronize()
    return comm.all_gather(data), comm.gather(comm.get_rank()), comm.gather(comm.get_rank(), dst=1)


def gathers_tensors():
    return comm.gather_tensor(torch.full((2, 3), comm.get_rank()).T).tolist()


def reduces():
    values = {"b": torch.tensor(10.0 + comm.get_rank()), "a": torch.tensor(comm.get_rank())}
    if comm.get_rank() == 1:
        values = dict(reversed(values.items()))
    mean, total = comm.reduce_dict(values), comm.reduce_dict(values, average=False)
    return [{key: value.item() for key, value in each.items()} for each in (mean, total)]


def tells_different_keys():
    values = {"loss": torch.tensor(1.0), f"only_{comm.get_rank()}": torch.tensor(1.0)}
    with pytest.raises(ValueError, match="same") as caught:
        comm.reduce_dict(values)
    return str(caught.value)


def shares_a_seed():
    np.random.seed(comm.get_rank())
    return comm.shared_random_seed(), comm.shared_random_seed()


def returns_what_the_main_process_got():
    return comm.from_main_process(lambda: ["from", comm.get_rank()])


def raises_what_the_main_process_met():
    def function():
        raise comm.SettingsError(f"met by rank {comm.get_rank()}")

    with pytest.raises(comm.SettingsError) as caught:
        comm.from_main_process(function)
    return str(caught.value)


def averages_buffers():
    """Statistics inside, after an exception inside, and after load_buffers; then a bare model."""
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    statistics = model[1]
    with torch.no_grad():
        statistics.running_mean.fill_(comm.get_rank())
        statistics.running_var += comm.get_rank()
    statistics.num_batches_tracked += 7
    states = []
    with contextlib.suppress(KeyError), comm.averaged_buffers(model) as every:
        states.append({name: buffer.tolist() for name, buffer in model.named_buffers()})
        raise KeyError
    states.append({name: buffer.tolist() for name, buffer in model.named_buffers()})
    comm.load_buffers(model, every, 1 - comm.get_rank())
    states.append({name: buffer.tolist() for name, buffer in model.named_buffers()})
    with comm.averaged_buffers(nn.Linear(2, 2)):  # has none
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
    with comm.averaged_buffers(model) as every:
        states.append(values())
    states.append(values())
    comm.load_buffers(model, every, 1 - rank)
    return [*states, values()]


def keeps_buffers_by_name():
    """Those of this rank, after the model has changed inside, or registers them otherwise."""
    rank = torch.tensor([1.0 + comm.get_rank()])
    model = nn.Module()
    model.register_buffer("first", rank.clone())
    model.register_buffer("second", 10 * rank)
    model.register_buffer("cache", torch.ones(2 + comm.get_rank()), persistent=False)
    model.register_buffer("sparse", torch.eye(2).to_sparse())
    with comm.averaged_buffers(model) as every:
        model.second = torch.zeros(3)
        model.register_buffer("late", 100 * rank)
    states = [[buffer.tolist() for buffer in (model.first, model.second, model.cache, model.late)]]
    other = nn.Module()
    other.register_buffer("second", torch.zeros(1))
    other.register_buffer("first", torch.zeros(1))
    comm.load_buffers(other, every, 1 - comm.get_rank())
    return [*states, [other.first.tolist(), other.second.tolist()]]


def shares_gradients():
    """The gradient after a pass without and a pass with sharing."""
    model = DistributedDataParallel(nn.Linear(1, 1, bias=False))
    gradients = []
    for enabled in (False, True):
        with gradient_sync(model, enabled=enabled):
            model(torch.tensor([[1.0 + comm.get_rank()]])).sum().backward()
        gradients.append(model.module.weight.grad.item())
    return gradients


CHECKS = (
    knows_its_place,
    gathers,
    gathers_tensors,
    reduces,
    tells_different_keys,
    shares_a_seed,
    returns_what_the_main_process_got,
    raises_what_the_main_process_met,
    averages_buffers,
    keeps_buffers_of_all_types,
    keeps_buffers_by_name,
    shares_gradients,
)


@pytest.fixture(scope="module")
def both():
    """{name of a check: [what rank 0 returned, what rank 1 returned]}"""
    ranks = run_on_ranks(*CHECKS)
    return {name: [rank[name] for rank in ranks] for name in ranks[0]}


def test_each_rank_knows_its_place(both):
    assert both["knows_its_place"] == [(0, 2, 0, 2, True), (1, 2, 1, 2, False)]


def test_objects_of_any_size_are_gathered_in_the_order_of_the_ranks(both):
    everything = [{"rank": 0, "text": "x"}, {"rank": 1, "text": "x" * 1001}]
    assert [each[0] for each in both["gathers"]] == [everything, everything]


def test_only_the_destination_gets_what_is_gathered(both):
    assert [each[1:] for each in both["gathers"]] == [([0, 1], []), ([], [0, 1])]


def test_tensors_of_all_ranks_are_stacked(both):
    expected = [[[0, 0], [0, 0], [0, 0]], [[1, 1], [1, 1], [1, 1]]]
    assert both["gathers_tensors"] == [expected, expected]


def test_reduce_dict_gives_mean_or_sum_to_every_rank_whatever_the_order_of_keys(both):
    expected = [{"a": 0.5, "b": 10.5}, {"a": 1, "b": 21}]
    assert both["reduces"] == [expected, expected]


def test_reduce_dict_names_the_keys_that_differ_on_every_rank(both):
    for message in both["tells_different_keys"]:
        assert "only_0" in message
        assert "only_1" in message
        assert "loss" not in message


def test_ranks_share_a_random_seed_of_rank_0_and_each_call_draws_another(both):
    np.random.seed(0)
    expected = int(np.random.randint(2**31)), int(np.random.randint(2**31))
    assert both["shares_a_seed"] == [expected, expected]
    assert expected[0] != expected[1]


def test_a_result_of_the_main_process_reaches_all(both):
    assert both["returns_what_the_main_process_got"] == [["from", 0], ["from", 0]]


def test_an_error_of_the_main_process_is_raised_on_all(both):
    assert both["raises_what_the_main_process_met"] == ["met by rank 0", "met by rank 0"]


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


def test_a_rank_that_never_comes_is_waited_for_until_the_time_is_over(monkeypatch):
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "RANK": "0"}
    for name, value in {**address, "WORLD_SIZE": "2", "TORCHELASTIC_USE_AGENT_STORE": "1"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(TimeoutError, match="2 ranks"):
        comm.init_process_group(torch.device("cpu"), timeout_seconds=1)


def test_gradients_are_shared_only_when_enabled(both):
    assert both["shares_gradients"] == [[1.0, 3.0], [2.0, 3.0]]


def test_a_single_process_is_a_group_of_its_own(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    comm.init_process_group(torch.device("cpu"), timeout_seconds=1)
    comm.synchronize()
    assert knows_its_place() == (0, 1, 0, 1, True)
    assert comm.all_gather("x") == ["x"]
    assert comm.gather("x") == ["x"]
    assert comm.gather_tensor(torch.arange(2)).tolist() == [[0, 1]]
    assert comm.reduce_dict({"a": torch.tensor(2.0)}) == {"a": torch.tensor(2.0)}
    assert comm.from_main_process(lambda: 5) == 5


def test_buffers_go_by_name_and_caches_are_left_alone(both):
    mine = [[[1.0], [0.0] * 3, [1.0] * 2, [100.0]], [[2.0], [0.0] * 3, [1.0] * 3, [200.0]]]
    others = [[[2.0], [20.0]], [[1.0], [10.0]]]
    assert both["keeps_buffers_by_name"] == [list(pair) for pair in zip(mine, others)]


def test_a_single_process_keeps_its_buffers_and_its_model():
    model = nn.BatchNorm1d(2)
    model.running_mean += 3
    with comm.averaged_buffers(model) as every:
        assert every == {}
        assert model.running_mean.tolist() == [3, 3]
    assert model.running_mean.tolist() == [3, 3]
    with gradient_sync(model, enabled=False):
        model(torch.randn(4, 2)).sum().backward()
    assert model.bias.grad.tolist() == [4, 4]


def test_the_local_rank_is_torchruns(monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "5")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "6")
    assert (comm.get_local_rank(), comm.get_local_size()) == (5, 6)
