"""What ranks do together, or a single process alone; the names of detectron2/utils/comm.py.

All ranks must call a function marked "collective" at one point; the others never communicate.
"""

import contextlib
import os
import time
import uuid
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

last_checkpoint = "none"  # path of the newest that was saved or resumed from, for messages


class SettingsError(ValueError):
    """A mistake in what the user gave: printed as one line, without a traceback."""


class NonFiniteError(FloatingPointError):
    """A loss or gradient is not finite; raised on all ranks alike."""


def init_process_group(device: torch.device, timeout_seconds: float) -> None:
    """Join the ranks that torchrun started; nothing to do in a single process.  Collective."""
    if int(os.environ.get("WORLD_SIZE", 1)) > 1 and not dist.is_initialized():
        is_gpu = device.type == "cuda"
        timeout = timedelta(seconds=timeout_seconds)
        store, *ranks = next(dist.rendezvous("env://", timeout=timeout))
        store = dist.PrefixStore(_agree_on_prefix(store, *ranks, timeout_seconds), store)
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if is_gpu else "gloo", device_id=device if is_gpu else None,
            store=store, rank=ranks[0], world_size=ranks[1], timeout=timeout,
        )  # fmt: skip


def _agree_on_prefix(store: dist.Store, rank: int, size: int, timeout_seconds: float) -> str:
    """Ranks that torchrun restarts find the old addresses in its store: they need new keys."""
    token, others, deadline = uuid.uuid4().hex, range(1, size), time.time() + timeout_seconds
    if rank > 0:
        store.set(f"hello {rank}", token)
        token = store.get(f"answer {token}").decode()  # waits for it
        store.set(f"{token} {rank}", "joined")
        return token
    while not store.check([f"{token} {other}" for other in others]):
        for other in others:
            if store.check([f"hello {other}"]):
                store.set(f"answer {store.get(f'hello {other}').decode()}", token)
        time.sleep(0.02)
        if time.time() > deadline:
            raise TimeoutError(f"not all of {size} ranks have come in {timeout_seconds} s")
    return token


def get_world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def get_rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def get_local_rank() -> int:
    return int(os.environ.get("LOCAL_RANK", get_rank()))


def get_local_size() -> int:
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
    """Stack a tensor that has the same shape (...) on all ranks to (ranks, ...).  Collective."""
    if get_world_size() == 1:
        return values[None]
    gathered = [torch.empty_like(values) for _ in range(get_world_size())]
    dist.all_gather(gathered, values.contiguous())
    return torch.stack(gathered)


def from_main_process(function: Callable[[], Any]) -> Any:
    """Call it on the main process only; its result, or SettingsError, on all.  Collective."""
    result, error = None, None
    if is_main_process():
        try:
            result = function()
        except SettingsError as caught:
            error = caught
    result, error = all_gather((result, error))[0]
    if error is not None:
        raise error
    return result


def shared_random_seed() -> int:
    """A number below 2**31 that rank 0 draws from numpy's generator.  Collective."""
    return all_gather(int(np.random.randint(2**31)))[0]


def require_same_keys(keys: list, what: str) -> None:
    """Raise a ValueError that tells which keys not all ranks have.  Collective."""
    every = all_gather(keys)
    if any(other != every[0] for other in every):
        common = set(every[0]).intersection(*every)
        extra = {f"rank {i}": f"{len(o)}, {set(o) - common or ''}" for i, o in enumerate(every)}
        raise ValueError(f"{what}: all ranks must put the same in one order, but put {extra}")


def reduce_dict(input_dict: dict, average: bool = True) -> dict:
    """Mean or sum over the ranks of scalar tensors, on all ranks; keys must agree.  Collective."""
    if get_world_size() == 1:
        return input_dict
    keys = sorted(input_dict)
    require_same_keys(keys, "reduce_dict")
    values = gather_tensor(torch.stack([input_dict[key].detach() for key in keys])).sum(dim=0)
    return dict(zip(keys, values / get_world_size() if average else values))


@contextlib.contextmanager
def averaged_buffers(model: nn.Module) -> Iterator[dict]:
    """Inside, floating point buffers (batch-norm statistics) are means over ranks.  Collective.

    Then each has its own again.  Yields those of all ranks, for ``load_buffers``; {} for one rank.
    """
    own = _saved_buffers(model)
    if get_world_size() == 1 or not own:
        yield {}
        return
    every = {"sizes": {name: buffer.nbytes for name, buffer in own.items()}}
    every["ranks"] = gather_tensor(torch.cat([b.flatten().view(torch.uint8) for b in own.values()]))
    try:
        for buffer, values in _split(model, every["sizes"], every["ranks"]):
            if buffer.is_floating_point():
                buffer.copy_(values.double().mean(dim=0).view_as(buffer))
        yield every
    finally:
        load_buffers(model, every, get_rank())


def load_buffers(model: nn.Module, every: dict, rank: int) -> None:
    """Set the buffers to those of a rank, as ``averaged_buffers`` yielded them, by name."""
    for buffer, values in _split(model, every["sizes"], every["ranks"][rank]):
        buffer.copy_(values.view_as(buffer))


def _split(model: nn.Module, sizes: dict, data: torch.Tensor) -> Iterator[tuple]:
    """Each buffer that has its size, and from bytes (..., bytes) its values (..., elements)."""
    parts = dict(zip(sizes, data.split(list(sizes.values()), dim=-1)))
    for name, buffer in _saved_buffers(model).items():
        if 0 < buffer.nbytes == sizes.get(name):
            values = parts[name].clone(memory_format=torch.contiguous_format)  # aligned
            yield buffer, values.view(buffer.dtype)


def _saved_buffers(model: nn.Module) -> dict[str, torch.Tensor]:
    """The dense ones by name, without those of ``persistent=False``, which are caches."""
    caches = {id(m._buffers.get(n)) for m in model.modules() for n in m._non_persistent_buffers_set}
    buffers = {name: b.detach() for name, b in model.named_buffers() if id(b) not in caches}
    return {name: buffer for name, buffer in buffers.items() if buffer.layout == torch.strided}
