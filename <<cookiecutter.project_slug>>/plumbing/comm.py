"""Ranks and what they do together; everything also works in a single process.

The names are detectron2's (detectron2/utils/comm.py).  A function marked "collective" must be
called by all ranks at the same point; the others never communicate.
"""

import contextlib
import os
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn


class SettingsError(ValueError):
    """A mistake in what the user gave: printed as one line, without a traceback."""


class NonFiniteError(FloatingPointError):
    """A loss or gradient is not finite; raised on all ranks alike."""


def init_process_group(device: torch.device, timeout_seconds: float) -> None:
    """Join the ranks that torchrun started; nothing to do for a single process.  Collective.

    Args:
        timeout_seconds: a collective that waits longer than this ends the job.
    """
    if int(os.environ.get("WORLD_SIZE", 1)) == 1 or dist.is_initialized():
        return
    cuda = device.type == "cuda"
    dist.init_process_group(
        backend="cpu:gloo,cuda:nccl" if cuda else "gloo",
        timeout=timedelta(seconds=timeout_seconds),
        device_id=device if cuda else None,
    )


def get_world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def get_rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def get_local_rank() -> int:
    """Index of this rank on its machine."""
    return int(os.environ.get("LOCAL_RANK", get_rank()))


def get_local_size() -> int:
    """Number of ranks on this machine."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", get_world_size()))


def is_main_process() -> bool:
    return get_rank() == 0


def synchronize() -> None:
    """Wait for all ranks.  Collective."""
    if get_world_size() > 1:
        dist.barrier()


def all_gather(data: Any) -> list:
    """Every rank's picklable ``data``, in the order of the ranks.  Collective."""
    gathered = [data] * get_world_size()
    if get_world_size() > 1:
        dist.all_gather_object(gathered, data)
    return gathered


def gather(data: Any, dst: int = 0) -> list:
    """Like all_gather, but ranks other than ``dst`` get an empty list.  Collective."""
    gathered = all_gather(data)
    return gathered if get_rank() == dst else []


def gather_tensor(values: torch.Tensor) -> torch.Tensor:
    """Stack a tensor that has the same shape (...) on every rank to (ranks, ...).  Collective."""
    gathered = [torch.empty_like(values) for _ in range(get_world_size())]
    if get_world_size() == 1:
        return values[None]
    dist.all_gather(gathered, values.contiguous())
    return torch.stack(gathered)


def from_main_process(function: Callable[[], Any]) -> Any:
    """Call ``function`` on the main process only and return its result on all.  Collective.

    Raises:
        SettingsError: on every rank, when the function raised one.
    """
    result, error = None, None
    if is_main_process():
        try:
            result = function()
        except SettingsError as caught:
            error = str(caught)
    result, error = all_gather((result, error))[0]
    if error is not None:
        raise SettingsError(error)
    return result


def shared_random_seed() -> int:
    """A number below 2**31 that rank 0 draws from numpy's generator.  Collective."""
    return all_gather(int(np.random.randint(2**31)))[0]


def require_same_keys(keys: list, what: str) -> None:
    """Raise a ValueError that names the keys that some ranks lack.  Collective."""
    every = all_gather(keys)
    if any(other != every[0] for other in every):
        common = set(every[0]).intersection(*every)
        extra = {rank: sorted(set(other) - common) for rank, other in enumerate(every)}
        listing = ", ".join(f"rank {rank} has {names}" for rank, names in extra.items() if names)
        raise ValueError(
            f"{what}: every rank must put the same tensors in the same order;"
            f" besides what all have, {listing or 'nothing: only the order differs'}"
        )


def reduce_dict(input_dict: dict, average: bool = True) -> dict:
    """The mean or sum over the ranks of each scalar tensor, on every rank.  Collective.

    Raises:
        ValueError: the ranks hold different keys.
    """
    if get_world_size() == 1:
        return input_dict
    keys = sorted(input_dict)
    require_same_keys(keys, "reduce_dict")
    values = gather_tensor(torch.stack([input_dict[key].detach() for key in keys])).sum(dim=0)
    return dict(zip(keys, values / get_world_size() if average else values))


def gradient_sync(model: nn.Module, enabled: bool) -> contextlib.AbstractContextManager:
    """Context of a forward and backward pass; unless ``enabled``, ranks do not share gradients."""
    if enabled or not isinstance(model, nn.parallel.DistributedDataParallel):
        return contextlib.nullcontext()
    return model.no_sync()


@contextlib.contextmanager
def averaged_buffers(model: nn.Module) -> Iterator[list[torch.Tensor]]:
    """Floating point buffers (batch-norm statistics) are the mean over the ranks.  Collective.

    Afterwards each rank has its own again, so how often one saves or evaluates changes no training.
    Yields each rank's buffers as one float64 vector, for ``load_buffers``; [] for one rank.
    """
    every = [] if get_world_size() == 1 else gather_tensor(_flat_buffers(model))
    try:
        if len(every):
            load_buffers(model, every.mean(dim=0))
        yield list(every)
    finally:
        if len(every):
            load_buffers(model, every[get_rank()])


def _floating_buffers(model: nn.Module) -> list[torch.Tensor]:
    return [buffer for buffer in model.buffers() if buffer.is_floating_point()]


def _flat_buffers(model: nn.Module) -> torch.Tensor:
    parts = [buffer.detach().double().flatten() for buffer in _floating_buffers(model)]
    return torch.cat(parts) if parts else torch.empty(0)


@torch.no_grad()
def load_buffers(model: nn.Module, flat: torch.Tensor) -> None:
    """Set the floating point buffers from one vector of ``averaged_buffers``."""
    buffers = _floating_buffers(model)
    for buffer, part in zip(buffers, flat.split([buffer.numel() for buffer in buffers])):
        buffer.copy_(part.view_as(buffer))
