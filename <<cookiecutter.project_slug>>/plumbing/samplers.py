"""The order of the samples, as arithmetic: nothing is stored, and nothing is replayed on a resume.

The training sees an endless stream of samples.  Position p of the stream belongs to epoch
``p // size``, and each epoch is a random permutation of the data set.  The permutation is not a
table: the sample at a position is computed from (seed, epoch, place in the epoch) alone.  So a
resume at any iteration costs as much as a start, and a data set of 10^9 samples takes no memory.
"""

from collections.abc import Iterator

import numpy as np
from torch.utils.data import Sampler

from plumbing import comm
from plumbing.errors import SettingsError

# The constants of SplitMix64.
_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_FIRST_FACTOR = np.uint64(0xBF58476D1CE4E5B9)
_SECOND_FACTOR = np.uint64(0x94D049BB133111EB)

# numpy wants shifts of the same type as the number that is shifted.
_SHIFT_27 = np.uint64(27)
_SHIFT_30 = np.uint64(30)
_SHIFT_31 = np.uint64(31)

# Positions whose samples are computed together: large enough for numpy to be fast, small enough
# for a first batch without delay.
_POSITIONS_AT_ONCE = 2**14


def random_bits(*numbers: int | np.ndarray) -> np.ndarray:
    """Draw 64 random bits as a function of the numbers.

    The generator is SplitMix64 (Steele, Lea and Flood, Fast Splittable Pseudorandom Number
    Generators, 2014), started with one number after the other.

    Args:
        numbers: integers, or int64 arrays (N,).

    Returns:
        uint64, a scalar if all numbers are integers, else an array (N,).
    """
    bits = np.zeros(1, np.uint64)
    for number in numbers:
        bits = _mix((bits ^ np.asarray(number).astype(np.uint64)) + _GAMMA)
    if any(isinstance(number, np.ndarray) for number in numbers):
        return bits
    return bits[0]


def _mix(bits: np.ndarray) -> np.ndarray:
    bits = (bits ^ (bits >> _SHIFT_30)) * _FIRST_FACTOR
    bits = (bits ^ (bits >> _SHIFT_27)) * _SECOND_FACTOR
    return bits ^ (bits >> _SHIFT_31)


def sample_keys(positions: np.ndarray, size: int, seed: int, shuffle: bool = True) -> np.ndarray:
    """Compute which samples stand at these positions of the endless stream.

    Args:
        positions: int64 array (N,).
        size: number of samples in an epoch.
        seed: of the order.
        shuffle: whether each epoch is permuted.

    Returns:
        int64 array (N, 2) of (epoch, index).
    """
    epochs, indices = np.divmod(positions, size)
    if shuffle:
        indices = _permute(indices, size, keys=random_bits(seed, epochs))
    return np.stack([epochs, indices], axis=1)


# A permutation without a table, in three steps.
#
# 1. A Feistel network permutes the numbers of a given number of bits.  It splits a number into
#    two halves, left and right.  A round makes (left, right) to (right, left XOR f(right)), where
#    f may be any random function: whoever knows the result knows ``right``, so also f(right), and
#    gets ``left`` back.  Each round can be undone, so all rounds together are a permutation.
# 2. The size of a data set is seldom a power of two.  We take the next larger one and apply the
#    network again to each result that is not below ``size``.  Such a walk comes to a number below
#    ``size`` at the latest when it returns to its start, and less than half of the numbers are
#    too large, so it is short (Black and Rogaway, Ciphers with Arbitrary Finite Domains, 2002).
# 3. f depends on a key, which is drawn from (seed, epoch): each epoch has its own permutation.
def _permute(places: np.ndarray, size: int, keys: np.ndarray) -> np.ndarray:
    """Permute numbers below ``size``: places (N,) int64, keys (N,) uint64 of their epochs."""
    num_bits = (size - 1).bit_length()
    values = places.astype(np.uint64)
    outside = np.arange(len(values))  # of the values that are still to be replaced
    while len(outside) > 0:
        values[outside] = _feistel(values[outside], num_bits, keys[outside])
        outside = outside[values[outside] >= size]
    return values.astype(np.int64)


def _feistel(values: np.ndarray, num_bits: int, keys: np.ndarray) -> np.ndarray:
    """Permute the numbers below ``2**num_bits``."""
    # If the number of bits is odd, the left half has one bit more than the right one.  The halves
    # change places in every round, and so the two masks take turns.
    right_bits = num_bits // 2
    left_bits = num_bits - right_bits
    left_mask = np.uint64(2**left_bits - 1)
    right_mask = np.uint64(2**right_bits - 1)

    # A round of a small set mixes in only a few bits, so it needs more rounds to take all orders
    # equally often.
    num_rounds = 2 * max(4, 48 // max(1, num_bits))

    left = values >> np.uint64(right_bits)
    right = values & right_mask
    for number in range(num_rounds):
        mask = left_mask if number % 2 == 0 else right_mask
        round_number = np.uint64(number << 32)
        drawn = _mix(keys + (right | round_number))
        left, right = right, left ^ (drawn & mask)
    return left << np.uint64(right_bits) | right


class TrainingBatchSampler(Sampler):
    """Endless micro-batches of this rank, as int64 arrays (B, 2) of (epoch, index).

    Iteration i takes the positions from ``i * batch_size`` on.  They are dealt first to the
    micro-batches and then to the ranks.  So together they are the same samples for any number of
    micro-batches and ranks.

    Args:
        size: number of samples in an epoch.
        batch_size: samples of an iteration, over all micro-batches and ranks.
        num_micro_batches: parts of an iteration on each rank.
        seed: of the order.
        start_iter: the first iteration.
        shuffle: whether each epoch is permuted.

    Raises:
        SettingsError: ``size`` is not a positive integer, or the batch cannot be divided.
    """

    def __init__(
        self,
        size: int,
        batch_size: int,
        num_micro_batches: int = 1,
        seed: int = 0,
        start_iter: int = 0,
        shuffle: bool = True,
    ) -> None:
        _check_size(size)
        num_parts = num_micro_batches * comm.get_world_size()
        if batch_size < 1 or batch_size % num_parts != 0:
            raise SettingsError(
                f"a batch of {batch_size} samples cannot be divided into {num_micro_batches}"
                f" micro-batches on each of {comm.get_world_size()} ranks: take a multiple of"
                f" {num_parts}"
            )
        self._size = size
        self._batch_size = batch_size
        self._num_micro_batches = num_micro_batches
        self._seed = seed
        self._start_iter = start_iter
        self._shuffle = shuffle

    def __iter__(self) -> Iterator[np.ndarray]:
        parts = np.arange(self._batch_size)
        parts = parts.reshape(self._num_micro_batches, comm.get_world_size(), -1)
        my_parts = parts[:, comm.get_rank()]  # (micro-batches, B): places within the batch
        num_iters = max(1, _POSITIONS_AT_ONCE // my_parts.size)
        iterations = self._start_iter + np.arange(num_iters)
        while True:
            positions = iterations[:, None, None] * self._batch_size + my_parts
            keys = sample_keys(positions.flatten(), self._size, self._seed, self._shuffle)
            yield from keys.reshape(-1, my_parts.shape[1], 2)
            iterations = iterations + num_iters


class TrainingSampler(Sampler):
    """Endless indices: of the common order of all ranks, every world_size-th one (detectron2's).

    Args:
        size: number of samples in an epoch.
        shuffle: whether each epoch is permuted.
        seed: of the order; None draws one that all ranks share (collective).
    """

    def __init__(self, size: int, shuffle: bool = True, seed: int | None = None) -> None:
        if seed is None:
            seed = comm.shared_random_seed()
        world_size = comm.get_world_size()
        self._batches = TrainingBatchSampler(size, world_size, seed=int(seed), shuffle=shuffle)

    def __iter__(self) -> Iterator[int]:
        for keys in self._batches:
            yield int(keys[0, 1])


class InferenceSampler(Sampler):
    """The indices of this rank: each index below ``size`` is on one rank, in contiguous parts.

    The sizes of the parts differ by at most one; the first ranks have the larger ones.
    """

    def __init__(self, size: int) -> None:
        _check_size(size)
        world_size = comm.get_world_size()
        self.indices = self._get_local_indices(size, world_size, comm.get_rank())

    @staticmethod
    def _get_local_indices(total_size: int, world_size: int, rank: int) -> range:
        share, num_larger = divmod(total_size, world_size)
        begin = share * rank + min(rank, num_larger)
        end = begin + share
        if rank < num_larger:
            end += 1
        return range(begin, end)

    def __iter__(self) -> Iterator[int]:
        yield from self.indices

    def __len__(self) -> int:
        return len(self.indices)


def _check_size(size: int) -> None:
    if not isinstance(size, int) or size < 1:
        raise SettingsError(f"DATASETS: a data set has no samples (its length is {size!r})")
