"""The values of tensors that were put: kept on their device, and read when something is due."""

from collections import defaultdict
from collections.abc import Iterable

import torch

from .scalar import Scalar


def kept(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor of the shape () that keeps the present value; nothing is read.

    The memory of a tensor may be written again: by its owner, by the optimizer, or by the next
    iteration of a compiled model that uses CUDA graphs.  So it is copied.  The losses on a CPU are
    not, since copies would double the time of a put: memory that an operation of autograd has just
    filled belongs to nobody else.  If it is changed in place nevertheless, ``read`` notices.
    """
    if not tensor.requires_grad:
        return tensor.clone()
    # Autograd counts the changes of a tensor in place, but the count has no public name.
    is_just_filled = not tensor.is_leaf and not tensor._is_view() and tensor._version == 0
    if is_just_filled and tensor.is_cpu:
        return tensor.detach()
    return tensor.detach().clone()


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
