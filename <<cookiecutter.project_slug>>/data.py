"""The data sets and their loaders.  A batch is a dict of tensors, on the model's device:

    images  (B, 1, 8, 8)  float32 in [0, 1]
    labels  (B,)          int64 in [0, 10)
"""

import contextlib
import functools
import itertools
import multiprocessing.connection
import os
import signal
from zipfile import BadZipFile

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, default_collate

from plumbing import comm
from plumbing.comm import SettingsError
from plumbing.preemption import SIGNALS
from plumbing.samplers import InferenceSampler, TrainingBatchSampler, random_bits
from plumbing.setup import set_random_state

HERE = os.path.dirname(os.path.abspath(__file__))


class SeededSamples(Dataset):
    """Makes any data set with ``__getitem__(index)`` one for the keys of plumbing.samplers.

    torch's, numpy's and Python's generators are set before each sample, as a function of (seed,
    epoch, index): so random transforms of any kind are the same after a resume, and for any number
    of workers.  A sample is a dict of what stacks to the batch: see ``collate``.
    """

    def __init__(self, dataset, seed):
        self.dataset, self.seed = dataset, seed

    def __len__(self):
        return len(self.dataset)

    def __getitem__(self, key):
        epoch, index = map(int, key)
        set_random_state(self.seed, epoch, index)
        return self.dataset[index]


@functools.cache
def read_digits(path):
    """The file's parts: {"digits_train": (images (N, 8, 8) float32, labels (N,) int64), ...}.

    Raises:
        SettingsError: the file is not what assets/digits.npz is.
    """
    try:
        arrays = dict(np.load(path, allow_pickle=False))
        is_test = np.zeros(len(arrays["labels"]), bool)
        is_test[arrays["test_indices"]] = True
        images = arrays["images"].astype(np.float32) / 16
        labels = arrays["labels"].astype(np.int64)
        parts = {"digits_train": ~is_test, "digits_test": is_test}
        return {name: (images[part], labels[part]) for name, part in parts.items()}
    except (OSError, EOFError, LookupError, ValueError, TypeError, BadZipFile) as error:
        raise SettingsError(f"DATASETS.PATH: {path} is no archive of digits: {error}") from None


class Digits(Dataset):
    """Handwritten digits (assets/digits.txt), fetched and augmented a batch at a time.

    Args:
        names: parts of the file, one after the other; an index counts through all of them.
        seed, max_shift: images are shifted by up to ``max_shift`` pixels in both directions, as a
            function of (seed, epoch, index): it does not matter which process loads them.
    """

    def __init__(self, path, names, seed=0, max_shift=0):
        images, labels = zip(*(read_digits(path)[name] for name in names))
        images, self.labels = np.concatenate(images), np.concatenate(labels)
        self.seed, self.num_shifts = seed, np.uint64(2 * max_shift + 1)  # in each direction
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
        down, right = np.divmod(bits % self.num_shifts**2, self.num_shifts)
        images, labels = self.shifted[indices, down, right], self.labels[indices]
        return {"images": torch.from_numpy(images[:, None]), "labels": torch.from_numpy(labels)}


def build_dataset(cfg, names, train):
    """The data sets with these names, one after the other as one, and the labels of each.

    It is asked for a sample by (epoch, index), or by ``__getitems__`` for a whole batch.

    Args:
        train: whether samples are augmented.

    Returns:
        the data set, and a list of arrays (samples,) of integers, which sampling.py looks at.
    """
    path = os.path.join(HERE, cfg.DATASETS.PATH)
    dataset = Digits(path, names, cfg.SEED, cfg.DATASETS.MAX_SHIFT if train else 0)
    return dataset, [read_digits(path)[name][1] for name in names]


def collate(batch):
    """A batch as ``__getitems__`` gave it, or the one that a list of samples stacks to."""
    return batch if isinstance(batch, dict) else default_collate(batch)


def dataset_size(cfg):
    """Samples in an epoch of the training: all of DATASETS.TRAIN, or the subset that is used."""
    _, labels = build_dataset(cfg, cfg.DATASETS.TRAIN, train=True)
    return _used_size(cfg, labels)


def _used_size(cfg, labels):
    total = sum(map(len, labels))
    return min(total, max(1, round(cfg.DATALOADER.RANDOM_SUBSET_RATIO * total)))


def plain_sampler(cfg, labels, size, start_iter):
    """All samples once an epoch, if the settings want nothing else.

    Raises:
        SettingsError: they do, and sampling.build_train_sampler has to be given in its place.
    """
    weighted = cfg.DATALOADER.SAMPLER_TRAIN != "uniform" or cfg.DATASETS.TRAIN_WEIGHTS
    if weighted or size < sum(map(len, labels)):
        raise SettingsError("DATALOADER: build_train_loader got no sampler for these settings")
    solver = cfg.SOLVER
    return TrainingBatchSampler(size, solver.BATCH_SIZE, solver.ACCUM_STEPS, cfg.SEED, start_iter)


def build_train_loader(cfg, start_iter, build_sampler=plain_sampler):
    """Endless; one item is the list of this rank's micro-batches of one iteration.

    Args:
        build_sampler: makes the batches' keys, as sampling.build_train_sampler does, from (cfg,
            the labels of each data set, samples in an epoch, start_iter).

    Raises:
        SettingsError: the data set is smaller than a batch.
    """
    dataset, labels = build_dataset(cfg, cfg.DATASETS.TRAIN, train=True)
    size = _used_size(cfg, labels)
    if size < cfg.SOLVER.BATCH_SIZE:
        raise SettingsError(
            f"SOLVER.BATCH_SIZE: {cfg.SOLVER.BATCH_SIZE} is more than the {size} samples of"
            f" {' and '.join(cfg.DATASETS.TRAIN)} that are used"
        )
    sampler = build_sampler(cfg, labels, size, start_iter)
    batches = _micro_batches(_data_loader(cfg, dataset, sampler), cfg.SOLVER.ACCUM_STEPS)
    return iter(Prefetcher(batches, cfg.MODEL.DEVICE))


def build_test_loader(cfg, name):
    """This rank's part of the data set called ``name``; ``len`` is the number of its batches."""
    dataset, _ = build_dataset(cfg, [name], train=False)
    indices = np.fromiter(InferenceSampler(len(dataset)), np.int64)
    keys = np.stack([np.zeros_like(indices), indices], axis=1)
    starts = range(0, len(keys), cfg.TEST.BATCH_SIZE)
    batches = [keys[start : start + cfg.TEST.BATCH_SIZE] for start in starts]
    return Prefetcher(_data_loader(cfg, dataset, batches), cfg.MODEL.DEVICE)


@contextlib.contextmanager
def signals_held():
    """Processes that begin inside never get them: a rank needs its workers until it has stopped."""
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


class Loader(DataLoader):
    """A DataLoader whose workers get no signals; one that dies is a SettingsError, in one line.

    The error comes where a batch is missing: torch's own handler raises it wherever the process
    happens to be, in the midst of a save too.
    """

    def __iter__(self):
        handler, others = signal.getsignal(signal.SIGCHLD), multiprocessing.active_children()
        with signals_held():
            iterator = super().__iter__()
        with contextlib.suppress(ValueError):  # in another thread, where torch sets no handler
            signal.signal(signal.SIGCHLD, handler)
        workers = set(multiprocessing.active_children()) - set(others)
        while True:
            try:
                batch = next(iterator)
            except StopIteration:
                return
            except Exception:
                if workers:
                    _end(workers)
                raise
            yield batch


def _end(workers):
    """End these processes; raise if one of them had died, or was about to."""
    ended = multiprocessing.connection.wait([worker.sentinel for worker in workers], timeout=1)
    for worker in workers:
        if worker.sentinel in ended:
            worker.join(10)  # its files are closed already, but it may not have ended quite yet
    codes = [worker.exitcode for worker in workers if worker.exitcode]
    for worker in workers:
        worker.kill()  # one that waits for a lock of the dead would not end by itself
    if codes:
        cause = signal.Signals(-codes[0]).name if codes[0] < 0 else f"exit status {codes[0]}"
        raise SettingsError(
            f"DATALOADER.NUM_WORKERS: a worker of rank {comm.get_rank()} died of {cause}; if"
            " memory was short, lower it or PREFETCH_FACTOR, then --resume"
        ) from None


class Prefetcher:
    """What a loader yields, on a device: a GPU gets the next item while it computes with this one.

    The copies run on a stream of their own, from pinned memory, and the stream that computes waits
    for its item only.  One item at most is drawn ahead; an error in drawing it is raised when its
    turn comes.  For the CPU the items are handed on as they are.

    Args:
        device: "cpu" or "cuda", this rank's GPU.
    """

    def __init__(self, data_loader, device):
        self._data_loader, self._device = data_loader, device

    def __len__(self):
        return len(self._data_loader)

    def __iter__(self):
        return self._copies() if self._device == "cuda" else iter(self._data_loader)

    def _copies(self):
        items, stream = iter(self._data_loader), torch.cuda.Stream()
        item, error = self._draw(items, stream)
        while error is None:
            torch.cuda.current_stream().wait_stream(stream)
            for tensor in _tensors(item):
                tensor.record_stream(torch.cuda.current_stream())  # or its memory is taken too soon
            ahead = self._draw(items, stream)
            yield item
            item, error = ahead
        if not isinstance(error, StopIteration):
            raise error

    def _draw(self, items, stream):
        try:
            item = next(items)
            with torch.cuda.stream(stream):
                return to_device(item, self._device), None
        except Exception as error:
            return None, error


def to_device(data, device):
    """Tensors in dicts, lists and tuples, on the device; from pinned memory without waiting.

    What has no ``to``, such as the name of a file, stays as it is.
    """
    if isinstance(data, dict):
        return {name: to_device(each, device) for name, each in data.items()}
    if isinstance(data, (list, tuple)):
        items = [to_device(each, device) for each in data]
        return type(data)(*items) if hasattr(data, "_fields") else type(data)(items)
    return data.to(device, non_blocking=True) if hasattr(data, "to") else data


def _tensors(data):
    if isinstance(data, (dict, list, tuple)):
        for each in data.values() if isinstance(data, dict) else data:
            yield from _tensors(each)
    elif hasattr(data, "record_stream"):
        yield data


def _data_loader(cfg, dataset, batch_sampler):
    num_workers = cfg.DATALOADER.NUM_WORKERS
    return Loader(
        dataset,
        batch_sampler=batch_sampler,
        collate_fn=collate,
        num_workers=num_workers,
        worker_init_fn=_ignore_signals,
        prefetch_factor=cfg.DATALOADER.PREFETCH_FACTOR if num_workers else None,
        pin_memory=cfg.MODEL.DEVICE == "cuda",
        generator=torch.Generator(),  # its own, so that it draws nothing from the training's
    )


def _ignore_signals(worker_id):
    """Workers that are not forked lose what signals_held has blocked for them."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def _micro_batches(data_loader, num_micro_batches):
    iterator = iter(data_loader)
    while len(batches := list(itertools.islice(iterator, num_micro_batches))) == num_micro_batches:
        yield batches
