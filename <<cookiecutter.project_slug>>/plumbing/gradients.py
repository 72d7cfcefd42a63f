"""Clipping of gradients by their norm."""

import math
from collections.abc import Iterable

import torch

# Gradients on a CPU that have at most so many elements together are copied into one tensor.
_NUM_SMALL = 2**16


def clip_grad_norm_(
    parameters: torch.Tensor | Iterable[torch.Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> torch.Tensor:
    """Scale the gradients in place so that the norm of all of them is at most ``max_norm``.

    This is torch.nn.utils.clip_grad_norm_, but it is faster where there is nothing to clip: if
    ``max_norm`` is inf, only the norm is computed and the gradients stay as they are.

    Args:
        parameters: those whose gradients are clipped; those without a gradient do not count.
        max_norm: the largest norm; inf does not clip.
        norm_type: the p of the p-norm; inf is the largest absolute value.
        error_if_nonfinite: raise a RuntimeError if the norm is not finite; this reads the norm.
        foreach: as in torch.

    Returns:
        The norm before clipping, () on the device of the first gradient.
    """
    if isinstance(parameters, torch.Tensor):
        parameters = [parameters]
    # A list, because torch counts an empty generator as a mistake worth a warning.
    parameters = list(parameters)
    if max_norm == math.inf and norm_type == 2.0 and not error_if_nonfinite and foreach is None:
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        if _are_plain(gradients):
            return _norm(gradients)
    return torch.nn.utils.clip_grad_norm_(
        parameters, max_norm, norm_type, error_if_nonfinite, foreach
    )


def _are_plain(gradients: list[torch.Tensor]) -> bool:
    """Whether they are dense tensors on one device with one dtype, and there is at least one.

    The norm of a DTensor, for example, is a sum over ranks: torch knows what to do.
    """
    if not gradients:
        return False
    first = gradients[0]
    dtype = first.dtype
    device_index = first.get_device()  # -1 stands for the CPU
    for gradient in gradients:
        if type(gradient) is not torch.Tensor or gradient.layout != torch.strided:
            return False
        if gradient.dtype != dtype or gradient.get_device() != device_index:
            return False
    return not first.requires_grad


def _norm(gradients: list[torch.Tensor]) -> torch.Tensor:
    """Return the norm of all gradients, which are plain."""
    # Both functions are private, and torch calls them in the same way, but with checks around them
    # that take four times as long as the norm.  Every run that does not clip saves these.
    if gradients[0].is_cpu and sum(map(torch.Tensor.numel, gradients)) <= _NUM_SMALL:
        # One copy and one norm take less time than a call for each of the gradients.
        together = torch._utils._flatten_dense_tensors(gradients)
    else:
        together = torch.stack(torch._foreach_norm(gradients))
    return torch.linalg.vector_norm(together)
