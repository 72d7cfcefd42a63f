"""What happens to the gradients of an iteration: averaged over the ranks, scaled back, clipped."""

import contextlib
import functools
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from plumbing.errors import NonFiniteError, last_checkpoint

# The scale starts at 2**16 and is halved by each step that overflows.  Below this limit at least
# 56 steps were skipped for each one that was taken, and no gradient is left to be scaled.
_LEAST_SCALE = 2.0**-40

# Gradients on a CPU that have at most so many elements together are copied into one tensor.
_NUM_SMALL = 2**16

_NOTHING = contextlib.nullcontext()


def gradient_sync(model: nn.Module, enabled: bool) -> contextlib.AbstractContextManager:
    """Return the context of a forward and backward pass: whether the ranks average the gradients.

    Gradients that were not averaged stay in the parameters and are averaged with the next ones.

    Args:
        model: a DistributedDataParallel, or what torch's fully_shard returned; any other model has
            nothing to average.
        enabled: False for every micro-batch of an iteration except the last one.
    """
    if enabled:
        return _NOTHING
    if "_orig_mod" in model._modules:
        model = model._modules["_orig_mod"]
    if isinstance(model, nn.parallel.DistributedDataParallel):
        return model.no_sync()
    # The class of a model that fully_shard has divided is not named, since it takes long to import.
    if hasattr(model, "set_requires_gradient_sync"):
        return _without_gradient_sync(model)
    return _NOTHING


@contextlib.contextmanager
def _without_gradient_sync(model: Any) -> Iterator[None]:
    model.set_requires_gradient_sync(False)
    try:
        yield
    finally:
        model.set_requires_gradient_sync(True)


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


class GradScaler(torch.amp.GradScaler):
    """torch's scaler, which skips a step whose gradients overflow and then halves the scale.

    It differs from torch's in three ways.  The scale can be logged without waiting for the device.
    A state is loaded whether or not the saving and the loading scaler are enabled.  A scale
    that has vanished is not saved.

    The ranks average their gradients before unscale_, so all of them skip the same steps.
    The fused optimizers of torch skip a step on the device; the others read one number from
    the device in each step, as with torch's scaler.

    Args:
        device: where the model computes.
        enabled: False makes every method do nothing, except that step() calls the optimizer.
    """

    def __init__(self, device: torch.device | str, enabled: bool = True) -> None:
        device = torch.device(device)
        super().__init__(device.type, enabled=enabled)
        # The optimizers whose first step has come.
        self._prepared: set[int] = set()
        # torch disables a scaler for a GPU where there is none.
        self._one = torch.ones((), device=device if self.is_enabled() else "cpu")

    @property
    def scale_tensor(self) -> torch.Tensor:
        """A copy of the present scale, float32 () on the device; 1 if not enabled."""
        return self.scale(self._one)

    def scale(self, outputs: Any) -> Any:
        """Scale a loss, or a list of them.

        Raises:
            TypeError: it is a number, which is the sum of no losses.
        """
        if isinstance(outputs, (int, float)):
            raise TypeError(
                f"the sum of the losses is the number {outputs}: in training a model has to return"
                " a dict with at least one loss, a tensor"
            )
        return super().scale(outputs)

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> float | None:
        """Call optimizer.step() unless the gradients overflow."""
        # The very first step may be skipped, or may lack the gradients of some parameters.
        if id(optimizer) not in self._prepared:
            set_missing_momentum_to_zero(optimizer)
            self._prepared.add(id(optimizer))
        if self.is_enabled():
            return super().step(optimizer, *args, **kwargs)
        return _bare_step(optimizer)(*args, **kwargs)

    def state_dict(self) -> dict[str, Any]:
        """Return the state; it is {} if not enabled.

        Raises:
            NonFiniteError: the gradients overflowed so often that the scale has vanished.
        """
        state = super().state_dict()
        if self.is_enabled() and state["scale"] < _LEAST_SCALE:
            raise NonFiniteError(
                f"float16: the gradients overflow at any scale, down to {state['scale']:.0e}; last"
                f" good checkpoint: {last_checkpoint()}; use bfloat16, lower the learning rate, or"
                " check the data"
            )
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state; that of a scaler that was not enabled changes nothing."""
        if "scale" in state_dict:
            super().load_state_dict(state_dict)


def _bare_step(optimizer: torch.optim.Optimizer) -> Callable[..., Any]:
    """Return ``optimizer.step``, if possible without what torch has wrapped around it.

    That calls hooks, and names the step for the profiler.  On a CPU it takes as long as the fused
    step of a small model, and every iteration would pay for it.
    """
    step = type(optimizer).step
    is_wrapped_once = getattr(step, "hooked", False) and "step" not in optimizer.__dict__
    is_watched = (
        torch.autograd._profiler_enabled()
        or optimizer._optimizer_step_pre_hooks
        or optimizer._optimizer_step_post_hooks
        or _global_optimizer_pre_hooks
        or _global_optimizer_post_hooks
    )
    if is_wrapped_once and not is_watched:
        return functools.partial(step.__wrapped__, optimizer)
    return optimizer.step


def set_missing_momentum_to_zero(optimizer: torch.optim.Optimizer) -> None:
    """Give each parameter of a fused SGD with momentum its momentum buffer before the first step.

    torch 2.13 allocates the buffers of fused SGD without filling them.  If the kernel then skips
    the very first step, arbitrary memory becomes the momentum of the second one.  A parameter
    that gets its first gradient later than the others is a TypeError.  Zeros avoid both, and
    the result is the same unless there is dampening, which torch does not apply in a first step.
    """
    if not isinstance(optimizer, torch.optim.SGD):
        return
    for group in optimizer.param_groups:
        if group["fused"] and group["momentum"] != 0:
            for parameter in group["params"]:
                state = optimizer.state[parameter]
                if state.get("momentum_buffer") is None:
                    state["momentum_buffer"] = torch.zeros_like(parameter)
