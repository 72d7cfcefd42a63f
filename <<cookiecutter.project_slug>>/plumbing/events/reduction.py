"""What is done when something is due: tensors are read, averaged over the ranks, and checked."""

import math
import zlib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import torch

from plumbing import comm
from plumbing.errors import NonFiniteError, last_checkpoint

from .scalar import Scalar

_MESSAGE_LENGTH = 1024  # float64 numbers that each rank sends in one collective

# The numbers of one rank: for each scalar that waits, a number for each of its waiting values.
Numbers = Sequence[Sequence[float]]


def read(scalars: Iterable[Scalar]) -> None:
    """Read what waits and was not read before, on an accelerator with one copy for each dtype.

    Raises:
        ValueError: a tensor was changed in place after it was put.
    """
    on_accelerator = defaultdict(list)  # {(dtype, device): [(numbers, index in them, tensor)]}
    for scalar in scalars:
        numbers = scalar.waiting_numbers
        for value in scalar.waiting_values[len(numbers) :]:
            if isinstance(value, float):
                numbers.append(value)
            elif value.is_cpu:
                # A tensor of inference mode has no count of its changes; it is always a copy.
                if not value.is_inference() and value._version != 0:
                    _refuse_changed(scalar.name)
                numbers.append(float(value.item()))
            else:
                place = (numbers, len(numbers), value)
                on_accelerator[value.dtype, value.device].append(place)
                numbers.append(0.0)
    for places in on_accelerator.values():
        together = torch.stack([tensor for _, _, tensor in places])
        for (numbers, index, _), number in zip(places, together.tolist()):
            numbers[index] = float(number)


def _refuse_changed(name: str) -> None:
    raise ValueError(
        f"scalar {name}: the tensor was changed in place after it was put; put tensor.clone() "
        "instead"
    )


def gather_numbers(scalars: Sequence[Scalar], own: Numbers) -> list[Numbers]:
    """Return the numbers of every rank, in the order of the ranks.  Collective.

    Only tensors are sent.  A number that waits is this rank's own, and is the same for all ranks in
    the result.

    Raises:
        ValueError: the ranks put different tensors.  All ranks raise it.
    """
    names = []
    sent = []
    for scalar, numbers in zip(scalars, own):
        for value, number in zip(scalar.waiting_values, numbers):
            if isinstance(value, torch.Tensor):
                names.append(scalar.name)
                sent.append(number)
    # Each message has the same length and begins with a checksum of the names.  So ranks that put
    # different tensors notice it in the first message, and none waits for a second one.
    checksum = float(zlib.crc32(repr(names).encode()))
    received = []
    for part in torch.tensor(sent, dtype=torch.float64).split(_MESSAGE_LENGTH - 1):
        message = torch.full((_MESSAGE_LENGTH,), checksum, dtype=torch.float64)
        message[1 : 1 + len(part)] = part
        messages = comm.gather_tensor(message)
        if (messages[:, 0] != checksum).any():
            comm.require_same_keys(names, "EventStorage.reduce")
        received.append(messages[:, 1 : 1 + len(part)])
    ranks = torch.cat(received, dim=1).tolist()
    return [_with_own_numbers(scalars, own, iter(numbers)) for numbers in ranks]


def _with_own_numbers(
    scalars: Sequence[Scalar], own: Numbers, received: Iterator[float]
) -> list[list[float]]:
    """Return the numbers that a rank has sent, each in its place among the others."""
    placed = []
    for scalar, numbers in zip(scalars, own):
        row = []
        for value, number in zip(scalar.waiting_values, numbers):
            row.append(next(received) if isinstance(value, torch.Tensor) else number)
        placed.append(row)
    return placed


def average_over_ranks(scalars: Sequence[Scalar], ranks: Sequence[Numbers]) -> list[list[float]]:
    """Return the means over the ranks; of a name that ends with "_time" the maximum.

    The ranks wait for each other, so that only the slowest one counts.  A number is this rank's,
    and so the same in all ranks.
    """
    averages = []
    for index, scalar in enumerate(scalars):
        row = []
        for value, *numbers in zip(scalar.waiting_values, *(rank[index] for rank in ranks)):
            if not isinstance(value, torch.Tensor):
                row.append(numbers[0])
            elif scalar.name.endswith("_time"):
                row.append(max(numbers))
            else:
                row.append(sum(numbers) / len(numbers))
        averages.append(row)
    return averages


class _Value(NamedTuple):
    """The value of a tensor on a rank."""

    iteration: int
    rank: int
    name: str
    number: float


def require_finite_losses(
    values: Sequence[_Value], learning_rates: Sequence[tuple[float, float]]
) -> None:
    """Refuse tensors that are not finite under a name with "loss" in it.

    Args:
        values: what ``list_values`` returned.
        learning_rates: (learning rate, iteration) pairs, for the message.

    Raises:
        NonFiniteError: a loss is not finite on some rank; the message is about the first one.
    """
    bad = [value for value in values if "loss" in value.name and not math.isfinite(value.number)]
    if not bad:
        return
    iteration, rank, _, _ = min(bad)
    listing = [
        f"{value.name} {value.number:.4g}"
        for value in values
        if value.iteration == iteration and value.rank == rank
    ]
    listing += [f"lr {rate:.4g}" for rate, when in learning_rates if when == iteration]
    raise NonFiniteError(
        f"the loss is not finite at iteration {iteration} on rank {rank}: {', '.join(listing)}; "
        f"last good checkpoint: {last_checkpoint()}; lower SOLVER.BASE_LR or set "
        "SOLVER.CLIP_GRAD_NORM, or check the data"
    )


def list_values(scalars: Sequence[Scalar], ranks: Sequence[Numbers]) -> list[_Value]:
    """List the values of all tensors that wait, on all ranks."""
    values = []
    for rank, rows in enumerate(ranks):
        for scalar, row in zip(scalars, rows):
            puts = zip(scalar.waiting_values, scalar.waiting_iterations, row)
            for value, iteration, number in puts:
                if isinstance(value, torch.Tensor):
                    values.append(_Value(iteration, rank, scalar.name, number))
    return values
