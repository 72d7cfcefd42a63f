import math
from typing import Any

import torch

from .history import HistoryBuffer, median

_HISTORY_LENGTH = 1000  # values kept of each scalar, so that memory is bounded


class Scalar:
    """One name in the storage: its history, in which several puts of an iteration are averaged."""

    def __init__(self, name: str, smoothing_hint: bool) -> None:
        self.name = name
        self.smoothing_hint = smoothing_hint
        self.history = HistoryBuffer(_HISTORY_LENGTH)
        self.is_waiting = False  # whether the storage holds puts of it that were not reduced
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

    def copy(self) -> "Scalar":
        other = Scalar(self.name, self.smoothing_hint)
        other.assign(self)
        return other

    def assign(self, other: "Scalar") -> None:
        """Become a copy of another one; ``self.history`` stays the same object."""
        self.history.assign(other.history)
        self._iteration = other._iteration
        self._sum = other._sum
        self._count = other._count
        self._smoothed = None

    def load_history(self, state: dict) -> None:
        """Restore the history; a put for its newest iteration replaces the newest value.

        What follows a save, such as an evaluation, is repeated after a resume.
        """
        self.history.load_state_dict(state)
        self._iteration = self.history.latest_iteration()
        self._sum = 0.0
        self._count = 0
        self._smoothed = None


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
