"""Mixed precision: the context of the forward pass, and the scaler of float16 losses."""

import contextlib
from typing import Any

import torch

from plumbing.errors import NonFiniteError, last_checkpoint

# The scale starts at 2**16 and is halved by each step that overflows.  Below this limit at least
# 56 steps were skipped for each one that was taken, and no gradient is left to be scaled.
_LEAST_SCALE = 2.0**-40


def mixed_precision(
    device: torch.device | str, enabled: bool, dtype: torch.dtype | str
) -> contextlib.AbstractContextManager:
    """Return the context of a forward pass; it may be entered again and again.

    Args:
        device: where the model computes.
        enabled: False returns a context that does nothing.
        dtype: torch.bfloat16 or torch.float16, or its name.
    """
    if not enabled:
        return contextlib.nullcontext()
    if isinstance(dtype, str):
        dtype = getattr(torch, dtype)
    return torch.autocast(torch.device(device).type, dtype)


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

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> float | None:
        """Call optimizer.step() unless the gradients overflow."""
        # The very first step may be skipped, or may lack the gradients of some parameters.
        if id(optimizer) not in self._prepared:
            set_missing_momentum_to_zero(optimizer)
            self._prepared.add(id(optimizer))
        return super().step(optimizer, *args, **kwargs)

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
