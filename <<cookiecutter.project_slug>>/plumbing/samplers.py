"""Which samples come when: a function of (seed, epoch), nothing is stored or replayed.

The order of an epoch is a Feistel network over the numbers below a power of four, walked until the
number falls into the data set (cycle walking; Black and Rogaway, "Ciphers with arbitrary finite
domains", 2002).  It takes no memory and starts anywhere at once.
"""

import math
from collections.abc import Iterator

import numpy as np
from torch.utils.data import Sampler

from plumbing import comm

_ROUNDS = 6
_BLOCK = 4096  # positions whose samples are computed together


def _mix(values: np.ndarray) -> np.ndarray:
    """The finalizer of SplitMix64 (Steele, Lea and Flood, 2014): scrambles 64 bits.  uint64."""
    with np.errstate(over="ignore"):
        values = values + np.uint64(0x9E3779B97F4A7C15)
        values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return values ^ (values >> np.uint64(31))


def random_bits(*numbers: int | np.ndarray) -> np.ndarray:
    """64 random bits (uint64), a function of the numbers, which are scalars or of one shape."""
    bits = np.zeros(1, np.uint64)
    for number in numbers:
        bits = _mix(bits ^ np.asarray(number).astype(np.uint64))
    return bits


def permute(positions: np.ndarray, size: int, key: np.ndarray) -> np.ndarray:
    """Where a permutation of range(size) takes each of the positions.

    Args:
        positions: int64, in range(size).
        key: uint64, of the same shape: which permutation.
    """
    half = np.uint64(max(1, math.ceil((size - 1).bit_length() / 2)))
    mask = np.uint64((1 << int(half)) - 1)
    values, outside = positions.astype(np.uint64), np.arange(len(positions))
    while len(outside):
        left, right = values[outside] >> half, values[outside] & mask
        for number in range(_ROUNDS):
            left, right = right, left ^ (random_bits(key[outside], right, number) & mask)
        values[outside] = left << half | right
        outside = outside[values[outside] >= size]
    return values.astype(np.int64)


def sample_keys(positions: np.ndarray, size: int, seed: int, shuffle: bool = True) -> np.ndarray:
    """The samples at positions of the endless global order, which is one epoch after another.

    Args:
        positions: int64, shape (N,).
    Returns:
        int64, shape (N, 2): epoch, and index in the data set.
    """
    epochs, indices = np.divmod(positions, size)
    if shuffle:
        indices = permute(indices, size, random_bits(seed, epochs))
    return np.stack([epochs, indices], axis=1)


class TrainingSampler(Sampler):
    """Endless indices of this rank: each world_size-th of the global order, shuffled each epoch.

    The indices of detectron2's sampler of that name, for data loaders that batch by themselves.

    Args:
        seed: the same on all ranks; None draws and shares one.
        start: position in the global order at which to begin.
    """

    def __init__(
        self, size: int, shuffle: bool = True, seed: int | None = None, start: int = 0
    ) -> None:
        _require_size(size)
        self._size, self._shuffle, self._start = size, shuffle, start
        self._seed = comm.shared_random_seed() if seed is None else int(seed)

    def __iter__(self) -> Iterator[int]:
        step = comm.get_world_size()
        first = self._start + comm.get_rank()
        while True:
            positions = first + step * np.arange(_BLOCK)
            keys = sample_keys(positions, self._size, self._seed, self._shuffle)
            yield from keys[:, 1].tolist()
            first += step * _BLOCK


class TrainingBatchSampler(Sampler):
    """Endless micro-batches of this rank, as arrays of (epoch, index).

    Iteration i takes the positions i * batch_size to (i + 1) * batch_size of the global order,
    divided among micro-batches and then ranks: the same samples for any number of either.

    Args:
        batch_size: global, of one iteration.
        num_micro_batches: on each rank, in one iteration.
        start_iter: iteration to begin with.
    """

    def __init__(
        self,
        size: int,
        batch_size: int,
        num_micro_batches: int,
        seed: int,
        start_iter: int = 0,
        shuffle: bool = True,
    ) -> None:
        _require_size(size)
        self._size, self._seed, self._shuffle = size, seed, shuffle
        self._batch_size, self._start_iter = batch_size, start_iter
        self._shape = num_micro_batches, comm.get_world_size(), -1

    def __iter__(self) -> Iterator[np.ndarray]:
        mine = np.arange(self._batch_size).reshape(self._shape)[:, comm.get_rank()]
        num_iters = max(1, _BLOCK // mine.size)
        iteration = self._start_iter
        while True:
            starts = self._batch_size * np.arange(iteration, iteration + num_iters)
            positions = (starts[:, None, None] + mine).reshape(-1)
            keys = sample_keys(positions, self._size, self._seed, self._shuffle)
            yield from keys.reshape(-1, mine.shape[1], 2)
            iteration += num_iters


class InferenceSampler(Sampler):
    """This rank's part of range(size): contiguous, exact, the first ranks have one more."""

    def __init__(self, size: int) -> None:
        _require_size(size)
        self._indices = self._get_local_indices(size, comm.get_world_size(), comm.get_rank())

    @staticmethod
    def _get_local_indices(total_size: int, world_size: int, rank: int) -> range:
        share, more = divmod(total_size, world_size)
        begin = share * rank + min(rank, more)
        return range(begin, begin + share + (rank < more))

    def __iter__(self) -> Iterator[int]:
        yield from self._indices

    def __len__(self) -> int:
        return len(self._indices)


def _require_size(size: int) -> None:
    if not isinstance(size, int) or size < 1:
        raise ValueError(f"a sampler needs a data set of one sample or more, got size {size!r}")
