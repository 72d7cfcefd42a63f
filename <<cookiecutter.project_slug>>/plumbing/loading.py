"""The loaders of the training and of the evaluation, for any ordinary data set.

An ordinary data set has ``__len__`` and ``__getitem__(index)``; a sample is a dict of tensors,
arrays, numbers or strings.  Its transforms may draw from the global generators of torch, numpy and
Python.  The loaders set these generators before each sample, as a function of (seed, epoch, index).
So a random crop is the same after a resume, and for any number of workers and ranks.  (Generators
of one's own, such as ``np.random.default_rng(0)``, are not set: the loaders warn about them.)

A data set that loads a whole batch faster than sample by sample may also have
``__getitems__(indices)``.  It returns a list of samples, or a dict that is the batch already; the
generators are then set once, from the first sample of the batch.
"""

from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, default_collate

from plumbing import comm
from plumbing.prefetch import on_device
from plumbing.samplers import InferenceSampler
from plumbing.seeding import NoSamples, SeededDataset
from plumbing.workers import WorkerLoader


class TrainingLoader:
    """Endless batches for the training.

    An item is the list of this rank's micro-batches of one iteration, on the device.  (Any other
    iterable of such lists can be trained as well, for example a generator over a stream.)

    Args:
        dataset: an ordinary one, see above.
        batch_sampler: yields the samples of each micro-batch as pairs of (epoch, index), as
            plumbing.samplers.TrainingBatchSampler does.
        seed: for the random transforms.
        num_micro_batches: length of an item.
        num_workers: processes that load; 0 loads in this process.
        collate_fn: makes a batch of a list of samples; default_collate unless it is given.
        device: "cpu", or "cuda" for the current GPU.
        timeout_seconds: limit of the wait for a micro-batch of the workers; a SettingsError then
            ends the run.
    """

    def __init__(
        self,
        dataset: Dataset,
        batch_sampler: Iterable,
        *,
        seed: int,
        num_micro_batches: int = 1,
        num_workers: int = 0,
        collate_fn: Callable[[list], Any] | None = None,
        device: str | torch.device = "cpu",
        timeout_seconds: float = 1800.0,
    ) -> None:
        self._num_micro_batches = num_micro_batches
        self._device = device
        self._micro_batches = WorkerLoader(
            SeededDataset(dataset, seed),
            batch_sampler,
            CollateBatch(collate_fn or default_collate),
            num_workers=num_workers,
            keep_workers=False,
            pin_memory=torch.device(device).type == "cuda",
            timeout_seconds=timeout_seconds,
            name=f"training loader of {type(dataset).__name__}",
        )

    def __iter__(self) -> Iterator[list]:
        return on_device(self._iterations(), self._device)

    def _iterations(self) -> Iterator[list]:
        micro_batches = iter(self._micro_batches)
        while True:
            iteration = list(islice(micro_batches, self._num_micro_batches))
            # A batch sampler that is not endless may end in the midst of an iteration.
            if len(iteration) < self._num_micro_batches:
                return
            yield iteration

    def close(self) -> None:
        """End the workers."""
        self._micro_batches.close()


class InferenceLoader:
    """The batches of this rank's part of a test set, on the device.

    Each sample is in one batch of one rank.  All ranks have the same number of batches, so that a
    model may communicate in its forward pass: a rank's samples are divided evenly, and if there
    are fewer samples than batches, some batches are empty (their tensors have length 0).

    The workers live as long as the loader: keep it, and the next evaluation finds them started.

    Args:
        dataset: an ordinary one, see above.
        batch_size: samples of a batch, at most.
        seed, num_workers, collate_fn, device, timeout_seconds: as for TrainingLoader.

    Attributes:
        num_samples: samples of all ranks.
    """

    def __init__(
        self,
        dataset: Dataset,
        batch_size: int,
        *,
        seed: int = 0,
        num_workers: int = 0,
        collate_fn: Callable[[list], Any] | None = None,
        device: str | torch.device = "cpu",
        timeout_seconds: float = 1800.0,
    ) -> None:
        self.num_samples = len(dataset)
        self._device = device
        self._batch_sampler = EvenBatches(self.num_samples, batch_size)
        self._batches = WorkerLoader(
            SeededDataset(dataset, seed),
            self._batch_sampler,
            CollateBatch(collate_fn or default_collate),
            num_workers=num_workers,
            keep_workers=num_workers > 0,
            pin_memory=torch.device(device).type == "cuda",
            timeout_seconds=timeout_seconds,
            name=f"test loader of {type(dataset).__name__}",
        )

    def __len__(self) -> int:
        return len(self._batch_sampler)

    def __iter__(self) -> Iterator[Any]:
        return on_device(self._batches, self._device)

    def close(self) -> None:
        """End the workers."""
        self._batches.close()


class EvenBatches:
    """Divides this rank's part of a test set: arrays (B, 2) of (epoch 0, index), B may be 0."""

    def __init__(self, size: int, batch_size: int) -> None:
        self._indices = InferenceSampler(size).indices
        largest_part = -(-size // comm.get_world_size())  # rounded up
        self._num_batches = -(-largest_part // batch_size)

    def __len__(self) -> int:
        return self._num_batches

    def __iter__(self) -> Iterator[np.ndarray]:
        num_samples = len(self._indices)
        # The bounds are rounded down alike, so the sizes differ by at most one.
        for number in range(self._num_batches):
            begin = number * num_samples // self._num_batches
            end = (number + 1) * num_samples // self._num_batches
            indices = np.array(self._indices[begin:end], dtype=np.int64)
            yield np.stack([np.zeros_like(indices), indices], axis=1)


class CollateBatch:
    """Makes a batch of what SeededDataset returns."""

    def __init__(self, collate_fn: Callable[[list], Any]) -> None:
        self._collate_fn = collate_fn

    def __call__(self, samples: Any) -> Any:
        # __getitems__ of the data set has made the batch already.
        if isinstance(samples, dict):
            return samples
        if isinstance(samples, NoSamples):
            return _emptied(self._collate_fn([samples.example]))
        return self._collate_fn(samples)


def _emptied(batch: Any) -> Any:
    """Make a batch of one sample to one of none."""
    if isinstance(batch, dict):
        return {name: _emptied(each) for name, each in batch.items()}
    # A list with one entry has an entry for each sample; a longer one holds fields of the batch.
    if isinstance(batch, list) and len(batch) == 1:
        return []
    if isinstance(batch, (list, tuple)):
        fields = [_emptied(each) for each in batch]
        is_named_tuple = hasattr(batch, "_fields")
        return type(batch)(*fields) if is_named_tuple else type(batch)(fields)
    if isinstance(batch, (torch.Tensor, np.ndarray)) and batch.ndim > 0:
        return batch[:0]
    return batch
