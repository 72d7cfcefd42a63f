"""The data sets and their loaders.  A batch is a dict of tensors, on the model's device:

    images  (B, 1, 8, 8)  float32 in [0, 1]
    labels  (B,)          int64 in [0, 10)
"""

import os
import time
from zipfile import BadZipFile

import numpy as np
import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset

from plumbing.comm import SettingsError
from plumbing.preemption import signals_held
from plumbing.samplers import InferenceSampler, TrainingBatchSampler, random_bits
from plumbing.setup import set_random_state

HERE = os.path.dirname(os.path.abspath(__file__))


class SeededSamples(Dataset):
    """Makes any data set with ``__getitem__(index)`` one for the keys of plumbing.samplers.

    torch's, numpy's and Python's generators are set before each sample, as a function of (seed,
    epoch, index): so random transforms of any kind are the same after a resume, and for any number
    of workers.  Its loader takes no ``collate_fn``, or one for the list of samples.
    """

    def __init__(self, dataset, seed):
        self.dataset, self.seed = dataset, seed

    def __len__(self):
        return len(self.dataset)

    def __getitem__(self, key):
        epoch, index = map(int, key)
        set_random_state(self.seed, epoch, index)
        return self.dataset[index]


class Digits(Dataset):
    """Handwritten digits (assets/digits.txt), fetched and augmented a batch at a time.

    Args:
        seed, max_shift: images are shifted by up to ``max_shift`` pixels in both directions, as a
            function of (seed, epoch, index): it does not matter which process loads them.
    """

    def __init__(self, path, name, seed=0, max_shift=0):
        try:
            arrays = dict(np.load(path, allow_pickle=False))
            is_test = np.zeros(len(arrays["labels"]), bool)
        except (OSError, EOFError, ValueError, KeyError, TypeError, BadZipFile) as error:
            raise SettingsError(f"DATASETS.PATH: {path} is no archive of digits: {error}") from None
        is_test[arrays["test_indices"]] = True
        part = is_test if name == "digits_test" else ~is_test
        images = arrays["images"][part].astype(np.float32) / 16
        self.labels = arrays["labels"][part].astype(np.int64)
        self.seed, self.max_shift = seed, max_shift
        margin = ((0, 0), (max_shift, max_shift), (max_shift, max_shift))
        self.shifted = np.lib.stride_tricks.sliding_window_view(
            np.pad(images, margin), images.shape[1:], axis=(1, 2)
        )  # (N, down, right, 8, 8), a view

    def __len__(self):
        return len(self.labels)

    def __getitems__(self, keys):
        """keys: (B, 2) int64 of epoch and index, as plumbing.samplers makes them."""
        epochs, indices = np.asarray(keys).T
        bits = random_bits(self.seed, epochs, indices)
        down, right = (
            ((bits >> np.uint64(offset)) % np.uint64(2 * self.max_shift + 1)).astype(np.int64)
            for offset in (0, 32)
        )
        images = self.shifted[indices, down, right]
        return {
            "images": torch.from_numpy(images)[:, None],
            "labels": torch.from_numpy(self.labels[indices]),
        }


def build_train_loader(cfg, start_iter):
    """Endless; one item is the list of this rank's micro-batches of one iteration.

    Raises:
        SettingsError: the data set is smaller than a batch.
    """
    path = os.path.join(HERE, cfg.DATASETS.PATH)
    dataset = Digits(path, cfg.DATASETS.TRAIN, cfg.SEED, cfg.DATASETS.MAX_SHIFT)
    solver = cfg.SOLVER
    if len(dataset) < solver.BATCH_SIZE:
        raise SettingsError(
            f"SOLVER.BATCH_SIZE: {solver.BATCH_SIZE} is more than the {len(dataset)} samples of"
            f" {cfg.DATASETS.TRAIN}"
        )
    sampler = TrainingBatchSampler(
        len(dataset), solver.BATCH_SIZE, solver.ACCUM_STEPS, cfg.SEED, start_iter
    )
    return _micro_batches(_data_loader(cfg, dataset, sampler), cfg)


def build_test_loader(cfg, name):
    """One pass over this rank's part of the data set called ``name``."""
    dataset = Digits(os.path.join(HERE, cfg.DATASETS.PATH), name)
    sampler = BatchSampler(InferenceSampler(len(dataset)), cfg.TEST.BATCH_SIZE, drop_last=False)
    with signals_held():
        batches = iter(_data_loader(cfg, dataset, [[(0, i) for i in batch] for batch in sampler]))
    for data in batches:
        yield to_device(data, cfg.MODEL.DEVICE)


def to_device(data, device):
    return {name: tensor.to(device, non_blocking=True) for name, tensor in data.items()}


class IterationTimer:
    """Hands on what a loader yields, and measures in seconds the wait for it and the iterations.

    ``batch_size`` is that of an iteration, over all ranks.
    """

    def __init__(self, data_loader, batch_size):
        self._data_loader, self._batch_size = data_loader, batch_size
        self._start, self._num_iters = None, 0  # since the last lap
        self.data_time = torch.zeros(())  # of the last wait

    def __iter__(self):
        start = time.perf_counter()
        for item in self._data_loader:
            now = time.perf_counter()
            self.data_time = torch.scalar_tensor(now - start)
            self._start = self._start or start
            self._num_iters += 1
            yield item
            start = time.perf_counter()

    def lap(self):
        """Means since the last lap, without what came between that and the next wait for data.

        It belongs after the values of an iteration were read: then a GPU has caught up.
        """
        seconds = (time.perf_counter() - self._start) / self._num_iters
        self._start, self._num_iters = None, 0
        return {"time": seconds, "samples_per_second": self._batch_size / seconds}


def _data_loader(cfg, dataset, batch_sampler):
    return DataLoader(
        dataset,
        batch_sampler=batch_sampler,
        collate_fn=_as_fetched,
        num_workers=cfg.DATALOADER.NUM_WORKERS,
        pin_memory=cfg.MODEL.DEVICE == "cuda",
        generator=torch.Generator(),  # its own, so that it draws nothing from the training's
    )


def _micro_batches(data_loader, cfg):
    with signals_held():
        iterator = iter(data_loader)
    while True:
        batches = [next(iterator) for _ in range(cfg.SOLVER.ACCUM_STEPS)]
        yield [to_device(data, cfg.MODEL.DEVICE) for data in batches]


def _as_fetched(batch):
    return batch
