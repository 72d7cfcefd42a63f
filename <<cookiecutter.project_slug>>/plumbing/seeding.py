"""Random numbers that are a function of (seed, epoch, index), for any data set."""

import logging
import random
import types
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, StackDataset, Subset

from plumbing.random_state import set_random_state

logger = logging.getLogger(__name__)

_GENERATORS = (np.random.Generator, np.random.RandomState, random.Random, torch.Generator)
_SEARCH_DEPTH = 6  # joined data sets, their list, one of them, a Compose, its list, a transform
_SEARCH_WIDTH = 20  # entries of a list: transforms are few, the names of files are many
_warned: set[str] = set()  # places of generators


class NoSamples:
    """Stands for the samples of an empty batch; an example tells what a batch looks like."""

    def __init__(self, example: Any) -> None:
        self.example = example


class SeededDataset(Dataset):
    """Sets the global generators before each sample of a data set; see plumbing.loading.

    An error in a sample is raised again with the index of the sample in its message.
    """

    def __init__(self, dataset: Dataset, seed: int) -> None:
        self._dataset = dataset
        self._seed = seed
        self._loads_whole_batches = _loads_whole_batches(dataset)
        # A training and its evaluations make many loaders for one data set; one warning is enough.
        for place in find_generators(dataset, type(dataset).__name__):
            if place not in _warned:
                _warned.add(place)
                logger.warning(
                    "%s is a random generator of its own, which a resume does not set back: draw"
                    " from the global generators of torch, numpy and random, which are set for"
                    " each sample",
                    place,
                )

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitems__(self, keys: Iterable) -> Any:
        """Return the samples of a batch; torch's DataLoader calls it with a whole batch.

        Args:
            keys: pairs of (epoch, index), such as an array (B, 2).
        """
        keys = np.asarray(keys)
        if keys.ndim != 2 or keys.shape[1] != 2:
            raise TypeError(
                "a batch sampler must yield pairs of (epoch, index) for each batch, as"
                f" TrainingBatchSampler does, but gave an array of shape {keys.shape}"
            )
        pairs = keys.tolist()
        # A test loader has empty batches; a sample tells what a batch looks like.
        if len(pairs) == 0:
            return NoSamples(self._sample(0, 0))
        if self._loads_whole_batches:
            return self._samples(pairs)
        return [self._sample(epoch, index) for epoch, index in pairs]

    def _sample(self, epoch: int, index: int) -> Any:
        set_random_state(self._seed, epoch, index)
        try:
            return self._dataset[index]
        except Exception as error:
            raise self._named(error, f"sample {index}") from error

    def _samples(self, pairs: Sequence) -> Any:
        set_random_state(self._seed, *pairs[0])
        indices = [index for _, index in pairs]
        try:
            return self._dataset.__getitems__(indices)
        except Exception as error:
            raise self._named(error, f"samples {indices}") from error

    def _named(self, error: Exception, what: str) -> Exception:
        """Make an error of the same type, if that can be, whose message names the samples."""
        message = f"{what} of {type(self._dataset).__name__}: {error}"
        try:
            named = type(error)(message)
        except Exception:
            named = None  # its type is made of something else than a message
        # A StopIteration would end the pass without a word.
        if named is None or what not in str(named) or isinstance(named, StopIteration):
            return RuntimeError(f"{message} ({type(error).__name__})")
        return named


def _loads_whole_batches(dataset: Dataset) -> bool:
    # torch's own Subset and StackDataset have __getitems__ for any data set.  Seeded once for a
    # batch, its samples would depend on the number of ranks.
    while isinstance(dataset, Subset):
        dataset = dataset.dataset
    return hasattr(dataset, "__getitems__") and not isinstance(dataset, StackDataset)


def find_generators(owner: Any, name: str, depth: int = _SEARCH_DEPTH) -> list[str]:
    """Name the random generators that an object holds: ["Photos.transforms[0].rng"]."""
    if isinstance(owner, _GENERATORS):
        return [name]
    # The modules random and numpy.random hold the global generators.
    if depth == 0 or isinstance(owner, (type, types.ModuleType, types.FunctionType)):
        return []
    if isinstance(owner, dict):
        parts = [(f"{name}[{key!r}]", owner[key]) for key in islice(owner, _SEARCH_WIDTH)]
    elif isinstance(owner, (list, tuple)):
        parts = [(f"{name}[{i}]", each) for i, each in enumerate(owner[:_SEARCH_WIDTH])]
    else:
        parts = [(f"{name}.{key}", each) for key, each in getattr(owner, "__dict__", {}).items()]
    found = []
    for place, part in parts:
        found.extend(find_generators(part, place, depth - 1))
    return found
