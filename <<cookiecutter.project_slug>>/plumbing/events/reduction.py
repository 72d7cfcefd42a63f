"""The values of all ranks: gathered with one message when something is due, averaged, checked."""

import math
import zlib
from collections.abc import Sequence

import torch

from plumbing import comm
from plumbing.errors import NonFiniteError, last_checkpoint

from .waiting import Put

_MESSAGE_LENGTH = 1024  # float64 numbers that each rank sends in one collective


def gather_numbers(puts: Sequence[Put], numbers: Sequence[float]) -> list[list[float]]:
    """Return the numbers of every rank, in the order of the ranks.  Collective.

    Only tensors are sent.  A put that is a number is this rank's own, and has the same number for
    all ranks in the result.

    Raises:
        ValueError: the ranks put different tensors.  All ranks raise it.
    """
    indices = [index for index, put in enumerate(puts) if put.is_tensor]
    names = [puts[index].scalar.name for index in indices]
    sent = torch.tensor([numbers[index] for index in indices], dtype=torch.float64)
    # Each message has the same length and begins with a checksum of the names.  So ranks that put
    # different tensors notice it in the first message, and none waits for a second one.
    checksum = float(zlib.crc32(repr(names).encode()))
    received = []
    for part in sent.split(_MESSAGE_LENGTH - 1):
        message = torch.full((_MESSAGE_LENGTH,), checksum, dtype=torch.float64)
        message[1 : 1 + len(part)] = part
        messages = comm.gather_tensor(message)
        if (messages[:, 0] != checksum).any():
            comm.require_same_keys(names, "EventStorage.reduce")
        received.append(messages[:, 1 : 1 + len(part)])
    ranks = []
    for numbers_of_rank in torch.cat(received, dim=1).tolist():
        rank = list(numbers)
        for index, number in zip(indices, numbers_of_rank):
            rank[index] = number
        ranks.append(rank)
    return ranks


def average_over_ranks(puts: Sequence[Put], ranks: Sequence[Sequence[float]]) -> list[float]:
    """Return the means over the ranks; of a name that ends with "_time" the maximum.

    The ranks wait for each other, so that only the slowest one counts.  A number is this rank's.
    """
    averages = []
    for put, *numbers in zip(puts, *ranks):
        if not put.is_tensor:
            averages.append(numbers[0])
        elif put.scalar.name.endswith("_time"):
            averages.append(max(numbers))
        else:
            averages.append(sum(numbers) / len(numbers))
    return averages


def require_finite_losses(
    puts: Sequence[Put],
    ranks: Sequence[Sequence[float]],
    learning_rates: Sequence[tuple[float, float]],
) -> None:
    """Refuse tensors that are not finite under a name with "loss" in it.

    Args:
        ranks: the numbers of the puts on every rank.
        learning_rates: (learning rate, iteration) pairs, for the message.

    Raises:
        NonFiniteError: a loss is not finite on some rank; the message is about the first one.
    """
    bad = []
    for rank, numbers in enumerate(ranks):
        for put, number in zip(puts, numbers):
            if put.is_tensor and "loss" in put.scalar.name and not math.isfinite(number):
                bad.append((put.iteration, rank))
    if not bad:
        return
    iteration, rank = min(bad)
    listing = [
        f"{put.scalar.name} {number:.4g}"
        for put, number in zip(puts, ranks[rank])
        if put.iteration == iteration and put.is_tensor
    ]
    listing += [f"lr {rate:.4g}" for rate, when in learning_rates if when == iteration]
    raise NonFiniteError(
        f"the loss is not finite at iteration {iteration} on rank {rank}: {', '.join(listing)}; "
        f"last good checkpoint: {last_checkpoint()}; lower SOLVER.BASE_LR or set "
        "SOLVER.CLIP_GRAD_NORM, or check the data"
    )
