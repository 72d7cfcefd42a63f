"""The data set, its augmentation and the two loaders.

A batch is a dict of tensors on the device of the model:

    images  (B, 1, 8, 8)  float32 in [0, 1]
    labels  (B,)          int64 in [0, 10)
"""

import os
from zipfile import BadZipFile

import numpy as np
import torch
from torch.nn import functional
from torch.utils.data import ConcatDataset, Dataset

from plumbing.errors import SettingsError
from plumbing.loading import InferenceLoader, TrainingLoader
from plumbing.samplers import TrainingBatchSampler

HERE = os.path.dirname(os.path.abspath(__file__))


class Digits(Dataset):
    """Handwritten digits of 8 x 8 pixels; assets/digits.txt says where they come from.

    Args:
        path: the file assets/digits.npz, or one like it.
        name: "digits_train" or "digits_test".
        transform: a function that changes an image (1, 8, 8), or None.
    """

    def __init__(self, path, name, transform=None):
        if name not in ("digits_train", "digits_test"):
            raise SettingsError(f"DATASETS: {name!r} must be digits_train or digits_test")
        try:
            with np.load(path) as arrays:
                images = arrays["images"]
                labels = arrays["labels"]
                is_test = np.zeros(len(labels), dtype=bool)
                is_test[arrays["test_indices"]] = True
        except (OSError, EOFError, ValueError, KeyError, IndexError, BadZipFile) as error:
            raise SettingsError(f"DATASETS.PATH: {path} is not like digits.npz: {error}") from None
        chosen = is_test if name == "digits_test" else ~is_test
        self.images = torch.from_numpy(images[chosen]).float() / 16
        self.labels = torch.from_numpy(labels[chosen]).long()
        self.transform = transform

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        image = self.images[index][None]
        if self.transform is not None:
            image = self.transform(image)
        return {"images": image, "labels": self.labels[index]}


class RandomShift:
    """Shift an image by up to ``max_shift`` pixels, down or up and left or right.

    Random numbers come from torch, numpy or random as usual.  The loader seeds all three before
    each sample, so a resumed run sees the same images.
    """

    def __init__(self, max_shift):
        self.max_shift = max_shift

    def __call__(self, image):
        height, width = image.shape[-2:]
        top, left = torch.randint(2 * self.max_shift + 1, (2,)).tolist()
        padded = functional.pad(image, [self.max_shift] * 4)
        return padded[:, top : top + height, left : left + width]


def build_dataset(cfg, names, transform=None):
    """The data sets with these names, one after the other, as one."""
    path = os.path.join(HERE, cfg.DATASETS.PATH)
    return ConcatDataset([Digits(path, name, transform) for name in names])


def build_train_loader(cfg, start_iter):
    """An endless loader that begins at iteration ``start_iter``.

    One item is the list of the SOLVER.ACCUM_STEPS micro-batches of this rank for one iteration.
    """
    transform = RandomShift(cfg.DATASETS.MAX_SHIFT)
    dataset = build_dataset(cfg, cfg.DATASETS.TRAIN, transform)
    batch_sampler = TrainingBatchSampler(
        len(dataset),
        cfg.SOLVER.BATCH_SIZE,
        num_micro_batches=cfg.SOLVER.ACCUM_STEPS,
        seed=cfg.SEED,
        start_iter=start_iter,
    )
    return TrainingLoader(
        dataset,
        batch_sampler,
        seed=cfg.SEED,
        num_micro_batches=cfg.SOLVER.ACCUM_STEPS,
        num_workers=cfg.DATALOADER.NUM_WORKERS,
        device=cfg.MODEL.DEVICE,
        timeout_seconds=cfg.TIMEOUT_SECONDS,
    )


def build_test_loader(cfg, name):
    """The part of this rank of the data set called ``name``, in batches of TEST.BATCH_SIZE."""
    return InferenceLoader(
        build_dataset(cfg, [name]),
        cfg.TEST.BATCH_SIZE,
        seed=cfg.SEED,
        num_workers=cfg.DATALOADER.NUM_WORKERS,
        device=cfg.MODEL.DEVICE,
        timeout_seconds=cfg.TIMEOUT_SECONDS,
    )
