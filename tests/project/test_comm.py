"""Ranks: what they do together, on two processes, and alone."""

import numpy as np
import pytest
import torch
from plumbing import comm, launch
from plumbing.errors import SettingsError
from ranks import run_on_ranks


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
        raise SettingsError(f"met by rank {comm.get_rank()}")

    with pytest.raises(SettingsError) as caught:
        comm.from_main_process(function)
    return str(caught.value)


def is_the_same_on_all():
    comm.require_same({"torch": "2.13"}, "versions")


def differs():
    with pytest.raises(SettingsError) as caught:
        comm.require_same(10 + comm.get_rank(), "SEED")
    return str(caught.value)


CHECKS = (
    knows_its_place,
    gathers,
    gathers_tensors,
    reduces,
    tells_different_keys,
    shares_a_seed,
    returns_what_the_main_process_got,
    raises_what_the_main_process_met,
    is_the_same_on_all,
    differs,
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


def test_a_value_that_differs_is_an_error_on_all_ranks_that_names_it(both):
    assert both["is_the_same_on_all"] == [None, None]
    (message, other) = both["differs"]
    assert message == other
    assert message.startswith("SEED: 10 on rank 0, but 11 on rank 1: ")
    comm.require_same(5, "a single process")


def test_a_single_process_is_a_group_of_its_own(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    launch.init_process_group(torch.device("cpu"), timeout_seconds=1)
    comm.synchronize()
    assert knows_its_place() == (0, 1, 0, 1, True)
    assert comm.all_gather("x") == ["x"]
    assert comm.gather("x") == ["x"]
    assert comm.gather_tensor(torch.arange(2)).tolist() == [[0, 1]]
    assert comm.reduce_dict({"a": torch.tensor(2.0)}) == {"a": torch.tensor(2.0)}
    assert comm.from_main_process(lambda: 5) == 5


def test_the_local_rank_is_torchruns(monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "5")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "6")
    assert (comm.get_local_rank(), comm.get_local_size()) == (5, 6)
