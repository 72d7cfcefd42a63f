"""Samples that come more often than others, or not at all.

An epoch stays as long as the data set, or as the subset that is used: a sample that weighs w times
the mean comes w times an epoch on average, and in each epoch w times, rounded up or down.  Which
sample stands at a position is arithmetic, so that a run resumes exactly, and any number of ranks
sees the same global batches.
"""

from itertools import islice

import numpy as np
from torch.utils.data import Sampler

from plumbing.comm import SettingsError
from plumbing.samplers import TrainingBatchSampler, random_bits, sample_keys


class RandomSubset:
    """Maps keys to a fixed random subset of a data set, without a table.

    Args:
        total: samples of the data set.  Keys have indices below the size of the subset.
        seed: of the choice.
    """

    def __init__(self, total, seed):
        self._total, self._seed = total, seed

    def __call__(self, keys):
        """keys: int64 (N, 2) of epoch and index in the subset; returns the index in all."""
        return np.stack([keys[:, 0], self.indices(keys[:, 1])], axis=1)

    def indices(self, positions):
        return sample_keys(positions, self._total, self._seed)[:, 1]


class WeightedChoice:
    """Maps keys to samples that come as often as their weights say: systematic sampling.

    On a line each sample has a stretch as long as its weight; the positions of an epoch stand on
    it at equal distances (Madow and Madow, On the Theory of Systematic Sampling, 1944).  They are
    moved along it by a share of the distance that is random for the first epoch and grows by the
    golden ratio from one to the next, which makes several epochs together even too.

    Args:
        weights: (samples,), relative to each other; 0: never.
        size: positions in an epoch.

    Raises:
        ValueError: a weight is negative or not finite, or none is above 0.
    """

    def __init__(self, weights, size, seed):
        weights = np.asarray(weights, np.float64)
        if weights.ndim != 1 or not (np.isfinite(weights) & (weights >= 0)).all():
            raise ValueError("sampling weights must be finite numbers of at least 0, one a sample")
        if not weights.any():
            raise ValueError("sampling weights: none is above 0")
        self._ends = np.cumsum(weights)
        self._ends *= size / self._ends[-1]
        self._last = np.flatnonzero(weights)[-1]
        self._size, self._start = size, random_bits(seed)

    def __call__(self, keys):
        """keys: int64 (N, 2) of epoch and position; returns (N, 2) of a number and the sample.

        The number differs between all positions of all epochs, and so does the augmentation.
        """
        epochs, positions = keys.T
        shifts = self._start + epochs.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        places = positions + (shifts >> np.uint64(32)) * 2.0**-32
        samples = np.minimum(np.searchsorted(self._ends, places, side="right"), self._last)
        return np.stack([epochs * self._size + positions, samples], axis=1)


class ChangedBatches(Sampler):
    """The endless batches of another sampler, their keys changed by functions, one after another.

    The functions get the keys of many batches at once, int64 (N, 2), and keep their order.
    """

    def __init__(self, batch_sampler, *functions):
        self._batch_sampler, self._functions = batch_sampler, functions

    def __iter__(self):
        batches = iter(self._batch_sampler)
        for first in batches:
            block = np.stack([first, *islice(batches, 2**14 // len(first))])
            keys = block.reshape(-1, 2)
            for function in self._functions:
                keys = function(keys)
            yield from keys.reshape(block.shape)


def class_weights(labels):
    """Weights that make all classes equally frequent; labels: (samples,) integers."""
    _, classes, counts = np.unique(labels, return_inverse=True, return_counts=True)
    return 1.0 / counts[classes]


def repeat_factors(categories, threshold, samples=None, num_samples=None):
    """How often rare samples come, as weights: LVIS (Gupta, Dollar and Girshick, 2019).

    A category that a share f of all samples has is worth max(1, sqrt(threshold / f)); a sample, as
    much as the most valuable of its categories.

    Args:
        categories: (pairs,) integers.
        samples: (pairs,), the sample that has it; None: one each, in their order.
        num_samples: of them, if some have no category; None: as many as categories.
    """
    _, kinds = np.unique(categories, return_inverse=True)
    samples = np.arange(len(kinds)) if samples is None else np.asarray(samples)
    num_samples, num_kinds = num_samples or len(kinds), kinds.max() + 1
    samples, kinds = np.divmod(np.unique(samples * num_kinds + kinds), num_kinds)
    values = np.sqrt(threshold * num_samples / np.bincount(kinds))
    factors = np.ones(num_samples)
    np.maximum.at(factors, samples, values[kinds])
    return factors


def build_train_sampler(cfg, labels, size, start_iter):
    """This rank's endless micro-batches from an iteration on, as DATALOADER and DATASETS say.

    Args:
        labels: for each data set of DATASETS.TRAIN its labels, (samples,) integers.
        size: samples in an epoch; if fewer than there are, a random subset is used.

    Raises:
        SettingsError: none of the subset is from a data set that has a weight.
    """
    solver, functions = cfg.SOLVER, []
    total = sum(map(len, labels))
    subset = RandomSubset(total, cfg.DATALOADER.RANDOM_SUBSET_SEED)
    used = subset.indices if size < total else np.asarray
    if cfg.DATALOADER.SAMPLER_TRAIN != "uniform" or cfg.DATASETS.TRAIN_WEIGHTS:
        weights = _weights(cfg, labels, used(np.arange(size)))
        functions.append(WeightedChoice(weights, size, cfg.SEED))
    if size < total:
        functions.append(subset)
    sampler = TrainingBatchSampler(
        size, solver.BATCH_SIZE, solver.ACCUM_STEPS, cfg.SEED, start_iter
    )
    return ChangedBatches(sampler, *functions) if functions else sampler


def _weights(cfg, labels, indices):
    """Of the samples that have these indices, counted through all data sets."""
    classes = np.concatenate(labels)[indices]
    weights = np.ones(len(indices))
    if cfg.DATALOADER.SAMPLER_TRAIN == "class_balanced":
        weights = class_weights(classes)
    elif cfg.DATALOADER.SAMPLER_TRAIN == "repeat_factor":
        weights = repeat_factors(classes, cfg.DATALOADER.REPEAT_THRESHOLD)
    if cfg.DATASETS.TRAIN_WEIGHTS:
        sets = np.repeat(np.arange(len(labels)), list(map(len, labels)))[indices]
        sums = np.bincount(sets, weights, minlength=len(labels))
        if not sums.all():
            name = cfg.DATASETS.TRAIN[int(np.argmin(sums))]
            ratio = cfg.DATALOADER.RANDOM_SUBSET_RATIO
            raise SettingsError(
                f"DATASETS.TRAIN_WEIGHTS: no sample of {name} is used; leave it out of TRAIN, or"
                f" raise DATALOADER.RANDOM_SUBSET_RATIO from {ratio}"
            )
        weights = weights * (np.array(cfg.DATASETS.TRAIN_WEIGHTS) / sums)[sets]
    return weights
