"""Buffers of a model, such as batch-norm statistics, of which each rank has its own values."""

import contextlib
from collections.abc import Iterator

import torch
from torch import nn

from plumbing import comm


@contextlib.contextmanager
def averaged_buffers(model: nn.Module) -> Iterator[dict]:
    """Context in which floating point buffers are the means over the ranks.  Collective.

    Afterwards each rank has its own values again.  Buffers of other types keep the values of the
    rank, and so do sparse buffers and those registered with ``persistent=False``.

    Yields:
        The buffers of all ranks, for ``load_buffers``; {} if there is one rank or no buffer:
        "sizes": {name: bytes}, "ranks": a tensor of bytes, shape (ranks, sum of the sizes).
    """
    # All ranks have the same model, so they decide this alike.
    own = _own_buffers(model)
    if comm.get_world_size() == 1 or not own:
        yield {}
        return
    all_buffers = _gather(own)
    try:
        for buffer, values in _matching(model, all_buffers["sizes"], all_buffers["ranks"]):
            if buffer.is_floating_point():
                # In double precision, so that the order of the ranks does not matter.
                buffer.copy_(values.double().mean(dim=0).view_as(buffer))
        yield all_buffers
    finally:
        # Also after an error, because the caller may go on.
        load_buffers(model, all_buffers, comm.get_rank())


def load_buffers(model: nn.Module, all_buffers: dict, rank: int) -> None:
    """Set the buffers of a model to those of one rank, by name.

    Args:
        all_buffers: what ``averaged_buffers`` yielded.
        rank: whose buffers to take.
    """
    for buffer, values in _matching(model, all_buffers["sizes"], all_buffers["ranks"][rank]):
        buffer.copy_(values.view_as(buffer))


def _gather(buffers: dict[str, torch.Tensor]) -> dict:
    """Collect the bytes of all buffers in one message.  Collective."""
    sizes = {}
    parts = []
    for name, buffer in buffers.items():
        sizes[name] = buffer.nbytes
        parts.append(buffer.flatten().view(torch.uint8))
    return {"sizes": sizes, "ranks": comm.gather_tensor(torch.cat(parts))}


def _matching(
    model: nn.Module, sizes: dict[str, int], data: torch.Tensor
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Pair the buffers of a model with their values in gathered bytes.

    A buffer that is not among them, or that has a different size now, is passed over.

    Args:
        data: bytes, shape (..., sum of the sizes).

    Yields:
        A buffer, and its values in its type, shape (..., elements).
    """
    parts = dict(zip(sizes, data.split(list(sizes.values()), dim=-1)))
    for name, buffer in _own_buffers(model).items():
        if 0 < buffer.nbytes == sizes.get(name):
            # A copy begins at an address that fits any type.
            values = parts[name].clone(memory_format=torch.contiguous_format)
            yield buffer, values.view(buffer.dtype)


def _own_buffers(model: nn.Module) -> dict[str, torch.Tensor]:
    """The dense buffers by name, without caches, which are registered as not persistent.

    A DTensor is not among them: it has one value, which the ranks share.  Its class is not named,
    since torch.distributed.tensor takes long to import.
    """
    caches = set()
    for module in model.modules():
        # torch has no public way to ask whether a buffer is persistent.
        for name in module._non_persistent_buffers_set:
            caches.add(id(module._buffers.get(name)))
    buffers = {}
    for name, buffer in model.named_buffers():
        is_own = id(buffer) not in caches and not hasattr(buffer, "full_tensor")
        if is_own and buffer.layout == torch.strided:
            buffers[name] = buffer.detach()
    return buffers
