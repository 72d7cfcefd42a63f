"""Batches in the shared memory through which workers hand them to their rank."""

import shutil
from collections.abc import Callable, Iterator
from typing import Any

import torch

REMEDY = "enlarge shared memory (docker run --shm-size=8g) or lower DATALOADER.NUM_WORKERS"


class NoSharedMemory:
    """Stands for a batch that did not fit into shared memory."""

    def __init__(self, cause: str) -> None:
        self.cause = cause


class ToSharedMemory:
    """Collates in a worker, and puts the tensors of the batch into shared memory at once."""

    def __init__(self, collate_fn: Callable[[list], Any]) -> None:
        self._collate_fn = collate_fn

    def __call__(self, samples: list) -> Any:
        try:
            batch = self._collate_fn(samples)
            # torch would do the same later, in a thread of its queue.  An error there is printed,
            # the batch is lost, and the rank waits for it without end.
            for leaf in leaves_of(batch):
                if _can_be_shared(leaf):
                    leaf.share_memory_()
        except RuntimeError as error:
            # torch has no type of its own for this error.
            if "shared memory" not in str(error) and "unable to mmap" not in str(error):
                raise
            return NoSharedMemory(str(error).partition("\n")[0])
        return batch


def _can_be_shared(leaf: Any) -> bool:
    if not isinstance(leaf, torch.Tensor):
        return False
    return leaf.layout == torch.strided and leaf.device.type == "cpu"


def leaves_of(data: Any) -> Iterator[Any]:
    """Yield what dicts, lists and tuples hold, nested in any way."""
    if isinstance(data, dict):
        for each in data.values():
            yield from leaves_of(each)
    elif isinstance(data, (list, tuple)):
        for each in data:
            yield from leaves_of(each)
    else:
        yield data


def free_shared_memory() -> str:
    """Say how much of /dev/shm is free, where there is one; begins with a space or is empty."""
    try:
        usage = shutil.disk_usage("/dev/shm")
    except OSError:
        return ""
    return f" ({usage.free / 2**20:.1f} of {usage.total / 2**20:.1f} MiB of /dev/shm are free)"
