"""Which samples come when: a function of (seed, epoch), so nothing is stored or replayed.

An epoch is permuted by a Feistel network on the numbers below a power of two, applied until the
number is in the data set (Black and Rogaway, Ciphers with Arbitrary Finite Domains, 2002).
"""

from collections.abc import Iterator

import numpy as np
from torch.utils.data import Sampler

from plumbing import comm

_GAMMA, _A, _B = np.array([0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB], np.uint64)
_S27, _S30, _S31 = np.array([27, 30, 31], np.uint64)


def random_bits(*numbers: int | np.ndarray) -> np.ndarray:
    """64 random bits for each set of numbers, by SplitMix64 (Steele, Lea and Flood, 2014)."""
    bits, scalar = np.zeros(1, np.uint64), not any(isinstance(each, np.ndarray) for each in numbers)
    for number in numbers:
        bits = _mix((bits ^ np.asarray(number).astype(np.uint64)) + _GAMMA)
    return bits[0] if scalar else bits


def _mix(bits: np.ndarray) -> np.ndarray:
    bits = (bits ^ (bits >> _S30)) * _A
    bits = (bits ^ (bits >> _S27)) * _B
    return bits ^ (bits >> _S31)


def sample_keys(positions: np.ndarray, size: int, seed: int, shuffle: bool = True) -> np.ndarray:
    """The samples at positions (N,) of the endless order: int64 (N, 2) of epoch and index."""
    epochs, indices = np.divmod(positions, size)
    indices = _permute(indices, size, random_bits(seed, epochs)) if shuffle else indices
    return np.stack([epochs, indices], axis=1)


def _permute(indices: np.ndarray, size: int, keys: np.ndarray) -> np.ndarray:
    bits, half = (size - 1).bit_length(), np.uint64((size - 1).bit_length() // 2)
    low, high = np.uint64(2 ** int(half) - 1), np.uint64(2 ** (bits - int(half)) - 1)
    masks = (high, low) * max(4, 48 // max(1, bits))  # one for each round; more for small sets
    values, outside = indices.astype(np.uint64), np.arange(len(indices))
    while len(outside):
        left, right, states = values[outside] >> half, values[outside] & low, keys[outside]
        for number, mask in enumerate(masks):
            left, right = right, left ^ (_mix(states + (right | np.uint64(number << 32))) & mask)
        values[outside] = left << half | right
        outside = outside[values[outside] >= size]
    return values.astype(np.int64)


class TrainingBatchSampler(Sampler):
    """Endless micro-batches for this rank: int64 arrays (B, 2) of epoch and index.

    Iteration i has the positions from i * batch_size on of the global order, dealt to micro-batches
    and ranks: together the same samples for any number of both.
    """

    def __init__(
        self, size: int, batch_size: int, num_micro_batches: int, seed: int, start_iter: int = 0,
        shuffle: bool = True,
    ) -> None:  # fmt: skip
        self._order, self._start_iter = (_checked(size), seed, shuffle), start_iter
        self._batch_size, self._shape = batch_size, (num_micro_batches, comm.get_world_size(), -1)

    def __iter__(self) -> Iterator[np.ndarray]:
        mine = np.arange(self._batch_size).reshape(self._shape)[:, comm.get_rank()]
        iterations = self._start_iter + np.arange(max(1, 2**14 // mine.size))  # computed together
        while True:
            positions = (iterations[:, None, None] * self._batch_size + mine).flatten()
            yield from sample_keys(positions, *self._order).reshape(-1, mine.shape[1], 2)
            iterations = iterations + len(iterations)


class TrainingSampler(Sampler):
    """detectron2's: endless indices, of the global order each world_size-th one for this rank."""

    def __init__(self, size: int, shuffle: bool = True, seed: int | None = None) -> None:
        seed = comm.shared_random_seed() if seed is None else int(seed)
        self._batches = TrainingBatchSampler(size, comm.get_world_size(), 1, seed, shuffle=shuffle)

    def __iter__(self) -> Iterator[int]:
        yield from (int(keys[0, 1]) for keys in self._batches)


class InferenceSampler(Sampler):
    """This rank's part of range(size), each index once: contiguous, first ranks have one more."""

    def __init__(self, size: int) -> None:
        size, world_size = _checked(size), comm.get_world_size()
        self._indices = self._get_local_indices(size, world_size, comm.get_rank())

    @staticmethod
    def _get_local_indices(total_size: int, world_size: int, rank: int) -> range:
        share, more = divmod(total_size, world_size)
        begin = share * rank + min(rank, more)
        return range(begin, begin + share + (rank < more))

    def __iter__(self) -> Iterator[int]:
        yield from self._indices

    def __len__(self) -> int:
        return len(self._indices)


def _checked(size: int) -> int:
    if not isinstance(size, int) or size < 1:
        raise ValueError(f"a sampler needs a data set with samples, got the size {size!r}")
    return size
