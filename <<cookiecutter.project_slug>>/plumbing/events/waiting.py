from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

import torch

from .scalar import Scalar


class Put(NamedTuple):
    """A value that waits: a tensor of the shape (), or a number that was put after one."""

    scalar: Scalar
    iteration: int
    value: torch.Tensor | float
    version: int | None = None  # of a tensor whose memory was not copied

    @property
    def is_tensor(self) -> bool:
        return not isinstance(self.value, float)


class WaitingPuts:
    """The puts since the last ``clear``, in their order.

    Who asks for values that wait gets those of this rank.  ``record`` then puts them into the
    histories for the time being, and copies the scalars before; ``clear`` restores these copies,
    for the means over the ranks are to take their place.
    """

    def __init__(self) -> None:
        self.puts: list[Put] = []
        self.num_tensors = 0
        self._numbers: list[float] = []  # the values of the first puts, once they were read
        self._num_recorded = 0
        self._before: dict[Scalar, Scalar] = {}  # copies of the scalars concerned

    def add_number(self, scalar: Scalar, iteration: int, number: float) -> None:
        self.puts.append(Put(scalar, iteration, number))

    def add_tensor(self, scalar: Scalar, iteration: int, tensor: torch.Tensor) -> None:
        """Keep a tensor of the shape () on its device; nothing is read."""
        # Its memory may be written again: by its owner, by the optimizer, or by the next iteration
        # of a compiled model that uses CUDA graphs.  So it is copied, but for the losses on a CPU,
        # since copies would double the time of a put: memory that an operation of autograd has
        # just filled belongs to nobody else.  Should it be changed in place nevertheless, then the
        # version tells.  Autograd counts it for this purpose, but without a public name.
        if tensor.is_leaf or tensor._is_view() or not tensor.is_cpu:
            put = Put(scalar, iteration, tensor.detach().clone())
        else:
            put = Put(scalar, iteration, tensor.detach(), tensor._version)
        self.puts.append(put)
        self.num_tensors += 1
        scalar.is_waiting = True

    def numbers(self) -> list[float]:
        """Return the values of the puts, on this rank; those that were not read before are read."""
        unread = self.puts[len(self._numbers) :]
        if unread:
            self._numbers += _read(unread)
        return self._numbers

    def record(self) -> None:
        """Record the values of this rank, until ``clear``."""
        numbers = self.numbers()
        for index in range(self._num_recorded, len(numbers)):
            scalar = self.puts[index].scalar
            if scalar not in self._before:
                self._before[scalar] = scalar.copy()
            scalar.record(numbers[index], self.puts[index].iteration)
        self._num_recorded = len(numbers)

    def clear(self) -> None:
        """Forget the puts, and take back what ``record`` did."""
        for scalar, before in self._before.items():
            scalar.assign(before)
        for put in self.puts:
            put.scalar.is_waiting = False
        self.puts = []
        self.num_tensors = 0
        self._numbers = []
        self._num_recorded = 0
        self._before = {}


def _read(puts: Sequence[Put]) -> list[float]:
    """Return the values, those on an accelerator with one copy for each data type.

    Raises:
        ValueError: a tensor was changed in place after it was put.
    """
    numbers = []
    on_accelerator = defaultdict(list)  # {(dtype, device): indices of puts}
    for index, (scalar, _, value, version) in enumerate(puts):
        if isinstance(value, float):
            numbers.append(value)
        elif value.is_cpu:
            if version is not None and version != value._version:
                raise ValueError(
                    f"scalar {scalar.name}: the tensor was changed in place after it was put; "
                    "put tensor.clone() instead"
                )
            numbers.append(float(value.item()))
        else:
            numbers.append(0.0)  # its place
            on_accelerator[value.dtype, value.device].append(index)
    for indices in on_accelerator.values():
        together = torch.stack([puts[index].value for index in indices])
        for index, number in zip(indices, together.tolist()):
            numbers[index] = float(number)
    return numbers
