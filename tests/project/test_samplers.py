"""Which samples come when: an order that is a function of (seed, epoch), the same for all ranks."""

import tracemalloc
from itertools import chain, islice

import numpy as np
import pytest
from plumbing import samplers
from plumbing.errors import SettingsError
from plumbing.loading import EvenBatches
from plumbing.samplers import (
    InferenceSampler,
    TrainingBatchSampler,
    TrainingSampler,
    random_bits,
    sample_keys,
)


def order(size, seed=0, epoch=0):
    """The indices of one epoch."""
    return sample_keys(np.arange(size) + epoch * size, size, seed)[:, 1].tolist()


def batches(num, *args, **kwargs):
    """The first micro-batches, each a list of (epoch, index)."""
    sampler = TrainingBatchSampler(*args, **kwargs)
    return [[tuple(key) for key in batch.tolist()] for batch in islice(sampler, num)]


# Order


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 16, 17, 64, 1000, 4096, 4097])
def test_an_epoch_has_each_sample_once(size):
    for epoch in range(3):
        assert sorted(order(size, epoch=epoch)) == list(range(size))


@pytest.mark.parametrize("size", [64, 1000, 4097])
def test_epochs_and_seeds_differ_and_each_stays_the_same(size):
    orders = [order(size, seed, epoch) for seed in range(3) for epoch in range(3)]
    assert len({tuple(each) for each in orders}) == 9
    assert list(range(size)) not in orders
    assert order(size, 2, 1) == order(size, 2, 1)


def test_small_sets_take_all_orders():
    orders = {tuple(order(3, epoch=epoch)) for epoch in range(200)}
    assert len(orders) == 6


def test_every_sample_comes_first_equally_often():
    first = sample_keys(10 * np.arange(5000), 10, seed=0)[:, 1]
    counts = np.bincount(first, minlength=10)
    assert counts.min() > 400
    assert counts.max() < 600


def excess(counts, expected):
    """How far chi-square is above its mean, in standard deviations."""
    freedom = counts.size - 1
    return (((counts - expected) ** 2 / expected).sum() - freedom) / (2 * freedom) ** 0.5


@pytest.mark.parametrize("size", [4, 5, 6, 7, 33])
def test_every_sample_and_every_pair_comes_equally_often_at_every_place(size):
    epochs = 200_000 // size
    orders = sample_keys(np.arange(epochs * size), size, seed=1)[:, 1].reshape(epochs, size)
    places = np.bincount((np.arange(size) * size + orders).ravel(), minlength=size**2)
    assert excess(places, epochs / size) < 5
    pairs = np.bincount((orders[:, 1:] * size + orders[:, :-1]).ravel(), minlength=size**2)
    pairs = pairs.reshape(size, size)[~np.eye(size, dtype=bool)]
    assert excess(pairs, pairs.mean()) < 5


def test_every_order_of_five_comes_equally_often():
    orders = sample_keys(np.arange(100_000), 5, seed=1)[:, 1].reshape(-1, 5)
    counts = np.unique(orders @ 5 ** np.arange(5), return_counts=True)[1]
    assert len(counts) == 120
    assert excess(counts, 20_000 / 120) < 5


@pytest.mark.parametrize("size", [1000, 1024, 1437])
def test_places_and_epochs_are_unrelated_to_the_order_of_a_larger_set(size):
    orders = sample_keys(np.arange(200 * size), size, seed=1)[:, 1].reshape(200, size) * 16 // size
    sixteenths = np.arange(size) * 16 // size + np.zeros_like(orders)
    for first, second in ((sixteenths, orders), (orders[:-1], orders[1:])):
        counts = np.bincount((first * 16 + second).ravel(), minlength=256)
        shares = [np.bincount(each.ravel(), minlength=16) for each in (first, second)]
        assert excess(counts, np.outer(*shares).ravel() / first.size) < 5


def test_neighbours_in_the_order_are_unrelated():
    keys = sample_keys(np.arange(10_000), 10_000, seed=0)[:, 1]
    assert abs(np.corrcoef(keys[1:], keys[:-1])[0, 1]) < 0.05
    assert abs(np.corrcoef(keys, np.arange(10_000))[0, 1]) < 0.05


def test_without_shuffling_the_order_is_that_of_the_data():
    keys = sample_keys(np.arange(8), 3, seed=0, shuffle=False)
    assert keys.tolist() == [[0, 0], [0, 1], [0, 2], [1, 0], [1, 1], [1, 2], [2, 0], [2, 1]]


def test_a_position_is_arithmetic_however_late_and_large():
    position = 7 * 10**11
    keys = sample_keys(position + np.arange(3), 10**9, seed=1)
    assert keys[:, 0].tolist() == [700, 700, 700]
    assert len(set(keys[:, 1].tolist())) == 3
    assert 0 <= keys[:, 1].min() <= keys[:, 1].max() < 10**9
    iteration = position // 1000
    ((first, *_),) = batches(1, 10**9, 1000, 1, seed=1, start_iter=iteration)
    assert first == tuple(keys[0].tolist())


@pytest.mark.parametrize("position", [0, 7 * 10**11])
def test_a_huge_data_set_takes_no_permutation_and_little_memory(position):
    tracemalloc.start()
    next(iter(TrainingBatchSampler(10**9, 64, 1, seed=0, start_iter=position // 64)))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 5 * 2**20


def test_random_bits_differ_by_each_input_and_its_place():
    numbers = [(1, 2, 3), (1, 2, 4), (1, 3, 3), (2, 2, 3), (3, 2, 1), (1, 2), (-1, 2, 3)]
    bits = [int(random_bits(*each)) for each in numbers]
    assert len(set(bits)) == len(numbers)
    assert all(0 <= each < 2**64 for each in bits)


def test_random_bits_of_arrays_are_those_of_their_elements():
    array = np.arange(100)
    bits = random_bits(5, array, array + 1)
    assert bits.dtype == np.uint64
    assert bits.tolist() == [int(random_bits(5, i, i + 1)) for i in range(100)]
    ones = (bits[:, None] >> np.arange(64, dtype=np.uint64) & np.uint64(1)).mean(axis=0)
    assert ones.min() > 0.25
    assert ones.max() < 0.75


# TrainingBatchSampler


@pytest.mark.parametrize("start_iter", [1, 7, 100, 5000])
def test_a_restart_at_any_iteration_goes_on_with_the_stream_from_0(start_iter):
    whole = batches(2 * (start_iter + 5), 100, 8, 2, seed=3)
    assert batches(10, 100, 8, 2, seed=3, start_iter=start_iter) == whole[2 * start_iter :]


@pytest.mark.parametrize("num_micro_batches", [1, 2, 4])
@pytest.mark.parametrize("world_size", [1, 2, 8])
def test_micro_batches_of_all_ranks_are_the_same_global_batch(
    as_rank, num_micro_batches, world_size
):
    ranks = []
    for rank in range(world_size):
        as_rank(rank, world_size)
        ranks.append(batches(3 * num_micro_batches, 50, 32, num_micro_batches, seed=1))
    lengths = {len(batch) for rank in ranks for batch in rank}
    assert lengths == {32 // world_size // num_micro_batches}
    for iteration in range(3):
        part = slice(iteration * num_micro_batches, (iteration + 1) * num_micro_batches)
        micro_batches = zip(*(rank[part] for rank in ranks))
        batch = list(chain.from_iterable(chain.from_iterable(micro_batches)))
        positions = iteration * 32 + np.arange(32)
        assert batch == [tuple(key) for key in sample_keys(positions, 50, seed=1).tolist()]


@pytest.mark.parametrize("later", [512, 2048])
def test_1024_ranks_see_each_sample_once_an_epoch_also_after_a_resume_with_more_or_fewer(
    as_rank, monkeypatch, later
):
    size = 10_007
    monkeypatch.setattr(samplers, "_POSITIONS_AT_ONCE", 16)  # no more than is looked at
    keys = []
    for world_size, start_iter, num_iters in ((1024, 0, 3), (later, 3, 7)):
        for rank in range(world_size):
            as_rank(rank, world_size)
            sampler = TrainingBatchSampler(size, 2048, seed=5, start_iter=start_iter)
            keys.extend(islice(sampler, num_iters))
    keys = np.concatenate(keys)
    assert len(keys) == 10 * 2048
    for epoch in range(2):
        indices = keys[keys[:, 0] == epoch, 1]
        assert np.array_equal(np.sort(indices), np.arange(size))


def test_1024_ranks_evaluate_each_sample_once(as_rank):
    counts = np.zeros(10_007, dtype=int)
    for rank in range(1024):
        as_rank(rank, 1024)
        for keys in EvenBatches(len(counts), batch_size=4):
            np.add.at(counts, keys[:, 1], 1)
    assert (counts == 1).all()


@pytest.mark.parametrize("exponent", [9, 10, 11, 12])
def test_up_to_10_to_the_12_samples_take_the_same_memory_and_none_comes_twice(as_rank, exponent):
    size = 10**exponent
    as_rank(1023, 1024)
    tracemalloc.start()
    batches = iter(TrainingBatchSampler(size, 2**16, seed=1, start_iter=5 * size // 2**16))
    keys = np.concatenate(list(islice(batches, 1000)))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 5 * 2**20
    assert set(keys[:, 0].tolist()) <= {4, 5}
    assert len(np.unique(keys, axis=0)) == len(keys)
    assert keys[:, 1].max() < size
    assert keys[:, 1].max() > 0.99 * size


def test_a_batch_may_cross_epochs_and_each_epoch_is_whole():
    keys = list(chain.from_iterable(batches(20, 10, 3, 1, seed=0)))
    assert [epoch for epoch, _ in keys] == [i // 10 for i in range(60)]
    for epoch in range(6):
        assert sorted(index for e, index in keys if e == epoch) == list(range(10))


def test_each_iterator_begins_anew():
    sampler = TrainingBatchSampler(10, 4, 1, seed=0)
    first, second = (next(iter(sampler)).tolist() for _ in range(2))
    assert first == second


def test_batches_without_shuffling():
    expected = [[(0, 0), (0, 1)], [(0, 2), (1, 0)]]
    assert batches(2, 3, 2, 1, seed=0, shuffle=False) == expected


@pytest.mark.parametrize(("batch_size", "parts"), [(10, 4), (0, 1), (3, 8)])
def test_a_batch_that_cannot_be_divided_is_an_error_that_says_what_can(as_rank, batch_size, parts):
    as_rank(0, 2)
    with pytest.raises(
        SettingsError, match=rf"^a batch of {batch_size} .* multiple of {2 * parts}$"
    ):
        TrainingBatchSampler(100, batch_size, parts)


# TrainingSampler


def test_ranks_take_turns_in_one_global_order(as_rank):
    whole = list(islice(TrainingSampler(10, seed=4), 24))
    assert whole[:10] == order(10, seed=4)
    for rank in range(3):
        as_rank(rank, 3)
        assert list(islice(TrainingSampler(10, seed=4), 8)) == whole[rank::3]
        assert list(islice(TrainingSampler(4, shuffle=False, seed=0), 3)) == [
            rank,
            (rank + 3) % 4,
            (rank + 6) % 4,
        ]


def test_without_a_seed_one_is_drawn_from_numpys_generator():
    def first(numpy_seed):
        np.random.seed(numpy_seed)
        return list(islice(TrainingSampler(1000), 5))

    assert first(1) == first(1)
    assert first(1) != first(2)


# InferenceSampler


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("size", range(1, 12))
def test_each_sample_is_evaluated_once_in_contiguous_parts_of_nearly_equal_size(
    as_rank, size, world_size
):
    samplers = []
    for rank in range(world_size):
        as_rank(rank, world_size)
        samplers.append(InferenceSampler(size))
    assert list(chain(*samplers)) == list(range(size))
    lengths = [len(sampler) for sampler in samplers]
    assert lengths == [len(list(sampler)) for sampler in samplers]
    assert lengths == sorted(lengths, reverse=True)
    assert lengths[0] - lengths[-1] <= 1


@pytest.mark.parametrize(
    "build",
    [TrainingSampler, InferenceSampler, lambda size: TrainingBatchSampler(size, 1, 1, seed=0)],
)
@pytest.mark.parametrize("size", [0, -1, 2.0])
def test_a_data_set_without_samples_is_an_error(build, size):
    with pytest.raises(ValueError, match=str(size)):
        build(size)
