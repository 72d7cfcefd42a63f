import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from .history import HistoryBuffer, median

_HISTORY_LENGTH = 1000  # values kept of each scalar, so that memory is bounded


class Scalar:
    """One name in the storage: its history, and the puts that ``reduce`` has not seen.

    The puts wait in their order.  Who asks for the history before ``reduce`` gets the values of
    this rank: ``preview`` records them for the time being, and keeps a copy of what was before.
    ``settle`` restores this copy, because the means over the ranks take their place.

    Attributes:
        waiting_values: tensors of the shape (), and numbers that were put after a tensor.
        waiting_iterations: an iteration for each of them.
        waiting_numbers: what was read of them: this rank's values of the first ones, or all.
    """

    def __init__(self, name: str, smoothing_hint: bool) -> None:
        self.name = name
        self.smoothing_hint = smoothing_hint
        self.history = HistoryBuffer(_HISTORY_LENGTH)
        self.waiting_values: list[torch.Tensor | float] = []
        self.waiting_iterations: list[int] = []
        self.waiting_numbers: list[float] = []
        self._num_previewed = 0
        self._before: Scalar | None = None  # a copy from before the preview
        # The puts of the newest iteration; their mean is the newest value of the history.
        self._iteration: int | None = None
        self._sum = 0.0
        self._count = 0
        # The last result of ``smoothed``, for the next writer.
        self._smoothed: float | None = None
        self._window_size = 0

    def record(self, value: float, iteration: int) -> None:
        """Append a value, or average it with the earlier ones of the same iteration."""
        self._smoothed = None
        if iteration == self._iteration:
            self._sum += value
            self._count += 1
            value = self._sum / self._count
            self.history.pop()
        else:
            self._sum = value
            self._count = 1
            self._iteration = iteration
        self.history.update(value, iteration)

    def preview(self) -> None:
        """Record this rank's values, which were read, until ``settle``."""
        if self._before is None:
            self._before = Scalar(self.name, self.smoothing_hint)
            self._before._copy_history(self)
        for index in range(self._num_previewed, len(self.waiting_numbers)):
            self.record(self.waiting_numbers[index], self.waiting_iterations[index])
        self._num_previewed = len(self.waiting_numbers)

    def settle(self, numbers: Sequence[float]) -> None:
        """Record these numbers in place of what waits; then nothing waits."""
        if self._before is not None:
            self._copy_history(self._before)
        for number, iteration in zip(numbers, self.waiting_iterations):
            self.record(number, iteration)
        self._forget_waiting()

    def _forget_waiting(self) -> None:
        self.waiting_values = []
        self.waiting_iterations = []
        self.waiting_numbers = []
        self._num_previewed = 0
        self._before = None

    def _copy_history(self, other: "Scalar") -> None:
        """Take over what another one has recorded; ``self.history`` stays the same object."""
        self.history.assign(other.history)
        self._iteration = other._iteration
        self._sum = other._sum
        self._count = other._count
        self._smoothed = None

    def smoothed(self, window_size: int) -> float:
        """Return the median of the finite values of the last ``window_size`` iterations.

        A skipped step has a loss that is not finite; it must not hide the others.  If no value is
        finite, the newest one is returned.
        """
        if self._smoothed is None or self._window_size != window_size:
            values = self.history.values_of_last(window_size)
            if not math.isfinite(sum(values)):
                values = [value for value in values if math.isfinite(value)]
            self._smoothed = median(values) if values else self.history.latest()
            self._window_size = window_size
        return self._smoothed

    def load_history(self, state: dict) -> None:
        """Restore the history; a put for its newest iteration replaces the newest value.

        What follows a save, such as an evaluation, is repeated after a resume.
        """
        self.history.load_state_dict(state)
        self._iteration = self.history.latest_iteration()
        self._sum = 0.0
        self._count = 0
        self._smoothed = None


def merged(scalars: Any, more: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the items of a dict, or of None, and of the keywords beside it."""
    if scalars is None:
        return more
    if not isinstance(scalars, Mapping):
        shape = tuple(getattr(scalars, "shape", ()))
        raise TypeError(
            f"put_scalars: needs a dict of scalars, got a {type(scalars).__name__} {shape}; in"
            " training a model has to return a dict of losses: is it in evaluation mode?"
        )
    repeated = sorted(set(scalars) & set(more))
    if repeated:
        raise TypeError(f"put_scalars: got {', '.join(repeated)} twice")
    return {**scalars, **more}


def require_scalar(name: str, value: Any) -> None:
    """Refuse what cannot be put."""
    if not isinstance(value, torch.Tensor):
        checked_number(name, value)
        return
    require_local(name, value)
    without_dimensions(name, value)
    if value.is_complex():
        raise ValueError(f"scalar {name}: needs a real number, got a complex one")


def checked_number(name: str, value: Any) -> float:
    """Return a number, or an array of one element, as a float."""
    try:
        return float(value)
    except (TypeError, ValueError):
        kind = type(value).__name__
        message = f"scalar {name}: needs a number or a tensor of one element, got a {kind}"
        raise ValueError(message) from None


def without_dimensions(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor of one element with the shape ()."""
    if tensor.numel() != 1:
        shape = tuple(tensor.shape)
        raise ValueError(f"scalar {name}: needs a tensor of one element, got the shape {shape}")
    return tensor.reshape(())


def require_local(name: str, tensor: torch.Tensor) -> None:
    """Refuse a DTensor: its value is known only to all ranks together."""
    # The class is not named, since torch.distributed.tensor takes long to import.
    if hasattr(tensor, "full_tensor"):
        raise ValueError(
            f"{name}: is a DTensor; put tensor.full_tensor() instead, which all ranks must call"
        )
