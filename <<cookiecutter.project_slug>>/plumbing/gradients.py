"""Clipping of gradients by their norm."""

import math
from collections.abc import Iterable

import torch


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
            # torch.nn.utils calls the same private function, which takes half as long without the
            # rest of it: every run that does not clip saves that in each iteration.
            norms = torch._foreach_norm(gradients)
            return torch.linalg.vector_norm(torch.stack(norms))
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
    device = first.device
    for gradient in gradients:
        if type(gradient) is not torch.Tensor or gradient.dtype != dtype:
            return False
        if gradient.device != device or gradient.layout != torch.strided:
            return False
    return not first.requires_grad
