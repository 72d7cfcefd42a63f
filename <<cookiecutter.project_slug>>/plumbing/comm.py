"""What the ranks do together; the names are those of detectron2/utils/comm.py.

A single process is a group of one rank, and every function works there as well.

All ranks must call a function that is marked "Collective" at the same point of the program, because
it waits for all of them.  The other functions do not communicate.
"""

import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from plumbing.errors import SettingsError

# How gloo and NCCL say that the process at the other end of a connection is gone.
_LOST_A_RANK = ("connection closed by peer", "connection reset by peer", "ncclremoteerror")


_time_limit = timedelta(minutes=30)  # of a wait for another rank; this is torch's own


def set_time_limit(limit: timedelta) -> None:
    """Set how long a rank waits for another one in the groups that ``new_group`` will make."""
    global _time_limit
    _time_limit = limit


def new_group() -> dist.ProcessGroup:
    """Make one more group of all ranks, for a thread that communicates beside the training.

    Collective.  torch would give it a time limit of 30 minutes, whatever that of the first group.
    """
    return dist.new_group(backend="gloo", timeout=_time_limit)


def get_world_size() -> int:
    """The number of ranks."""
    return dist.get_world_size() if dist.is_initialized() else 1


def get_rank() -> int:
    """The number of this rank, from 0 on."""
    return dist.get_rank() if dist.is_initialized() else 0


def get_local_rank() -> int:
    """The number of this rank on its machine, which is also the index of its GPU."""
    return int(os.environ.get("LOCAL_RANK", get_rank()))


def get_local_size() -> int:
    """The number of ranks on this machine."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", get_world_size()))


def get_num_nodes() -> int:
    """The number of machines, as torchrun says; 1 without it."""
    return int(os.environ.get("GROUP_WORLD_SIZE", "1"))


def is_main_process() -> bool:
    """Whether this is rank 0."""
    return get_rank() == 0


def synchronize() -> None:
    """Wait for all ranks.  Collective."""
    if get_world_size() > 1:
        dist.barrier()


def all_gather(data: Any) -> list:
    """Collect picklable data of any size on all ranks.  Collective.

    Returns:
        The data of every rank, in the order of the ranks.
    """
    world_size = get_world_size()
    if world_size == 1:
        return [data]
    gathered = [None] * world_size
    dist.all_gather_object(gathered, data)
    return gathered


def gather(data: Any, dst: int = 0) -> list:
    """Collect picklable data of any size on one rank.  Collective.

    Returns:
        On rank ``dst`` the data of every rank, in the order of the ranks; elsewhere [].
    """
    gathered = all_gather(data)
    if get_rank() == dst:
        return gathered
    return []


def gather_tensor(values: torch.Tensor) -> torch.Tensor:
    """Stack a tensor of all ranks, on all ranks.  Collective.

    Args:
        values: shape (...), the same shape and dtype on all ranks.

    Returns:
        A tensor of shape (ranks, ...).
    """
    if get_world_size() == 1:
        return values[None]
    gathered = [torch.empty_like(values) for _ in range(get_world_size())]
    dist.all_gather(gathered, values.contiguous())
    return torch.stack(gathered)


def from_main_process(function: Callable[[], Any]) -> Any:
    """Call a function on rank 0 only, and return its result on all ranks.  Collective.

    Raises:
        SettingsError: rank 0 raised it; then all ranks do.
    """
    result = None
    error = None
    if is_main_process():
        try:
            result = function()
        except SettingsError as caught:
            error = caught
    # Not broadcast: that would need to know the device of the backend.
    result, error = all_gather((result, error))[0]
    if error is not None:
        raise error
    return result


def shared_random_seed() -> int:
    """A number below 2**31 that rank 0 draws from numpy's generator.  Collective."""
    return all_gather(int(np.random.randint(2**31)))[0]


def require_same(value: Any, what: str) -> None:
    """Check that a value is equal on all ranks.  Collective.

    Args:
        value: anything that can be pickled and compared.
        what: what the value is, for the message.

    Raises:
        SettingsError: names the first rank that has a different value; it is raised on all ranks.
    """
    values = all_gather(value)
    for rank, other in enumerate(values):
        if other != values[0]:
            raise SettingsError(
                f"{what}: {values[0]!r} on rank 0, but {other!r} on rank {rank}: start all ranks"
                " alike"
            )


def require_same_keys(keys: list, what: str) -> None:
    """Check that all ranks have the same keys in the same order.  Collective.

    Raises:
        ValueError: says which keys not all ranks have.
    """
    all_keys = all_gather(keys)
    if all(other == all_keys[0] for other in all_keys):
        return
    common = set(all_keys[0]).intersection(*all_keys)
    differences = {}
    for rank, other in enumerate(all_keys):
        extra = set(other) - common
        differences[f"rank {rank}"] = f"{len(other)} keys, {extra or ''}"
    raise ValueError(f"{what}: all ranks must put the same keys in one order: {differences}")


def reduce_dict(input_dict: dict, average: bool = True) -> dict:
    """Add up, or average, the scalar tensors of all ranks, on all ranks.  Collective.

    Args:
        input_dict: the same keys on all ranks, in any order.
        average: whether the result is the mean and not the sum.

    Returns:
        {key: scalar tensor}, sorted by key on several ranks.
    """
    if get_world_size() == 1:
        return input_dict
    keys = sorted(input_dict)
    require_same_keys(keys, "reduce_dict")
    stacked = torch.stack([input_dict[key].detach() for key in keys])
    values = gather_tensor(stacked).sum(dim=0)
    if average:
        values = values / get_world_size()
    return dict(zip(keys, values))


def is_timeout(error: Exception) -> bool:
    """Whether a wait for another rank took too long.

    torch has no type for that: gloo raises a RuntimeError, the store a DistStoreError.
    """
    if not isinstance(error, RuntimeError):
        return False
    text = str(error).lower()
    return "timed out waiting" in text or (isinstance(error, dist.DistError) and "timeout" in text)


def has_lost_a_rank(error: Exception) -> bool:
    """Whether another rank has ended first: then the error of that rank is the reason."""
    text = str(error).lower()
    lost = any(words in text for words in _LOST_A_RANK)
    return isinstance(error, RuntimeError) and lost
