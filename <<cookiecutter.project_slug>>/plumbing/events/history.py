import math
from collections import deque
from collections.abc import Sequence
from itertools import islice

import torch


class HistoryBuffer:
    """The newest values of one scalar and their iterations (fvcore/common/history_buffer.py)."""

    def __init__(self, max_length: int = 1_000_000) -> None:
        self._data = deque(maxlen=max_length)  # (value, iteration)
        # Of all values ever, those that were dropped included.
        self._count = 0
        self._sum = 0.0

    def update(self, value: float, iteration: float | None = None) -> None:
        """Append a value; its iteration is by default the number of values so far."""
        if iteration is None:
            iteration = self._count
        self._data.append((value, iteration))
        self._count += 1
        self._sum += value

    def pop(self) -> None:
        """Remove the newest value."""
        value, _ = self._data.pop()
        self._count -= 1
        self._sum -= value

    def copy(self) -> "HistoryBuffer":
        other = HistoryBuffer(self._data.maxlen)
        other.assign(self)
        return other

    def assign(self, other: "HistoryBuffer") -> None:
        """Become a copy of another history."""
        self._data = other._data.copy()
        self._count = other._count
        self._sum = other._sum

    def latest(self) -> float:
        return self._data[-1][0]

    def latest_iteration(self) -> float:
        """Return the iteration of the newest value, or -1 without values."""
        if not self._data:
            return -1
        return self._data[-1][1]

    def newest(self, num_values: int) -> list[tuple[float, float]]:
        """Return the newest (value, iteration) pairs, the newest first."""
        return list(islice(reversed(self._data), num_values))

    def values_of_last(self, window_size: int) -> list[float]:
        """Return the values of the last ``window_size`` iterations, the newest first."""
        _require_positive(window_size)
        start = self.latest_iteration() - window_size
        values = []
        for value, iteration in reversed(self._data):
            if iteration <= start:
                break
            values.append(value)
        return values

    def count_samples(self, window_size: int) -> int:
        """Return the number of values of the last ``window_size`` iterations."""
        return len(self.values_of_last(window_size))

    def median(self, window_size: int) -> float:
        """Return the median of the newest ``window_size`` values.

        It is NaN without values, and if one of them is NaN.
        """
        _require_positive(window_size)
        return median([value for value, _ in self.newest(window_size)])

    def avg(self, window_size: int) -> float:
        """Return the mean of the newest ``window_size`` values; NaN without values."""
        _require_positive(window_size)
        values = [value for value, _ in self.newest(window_size)]
        if not values:
            return math.nan
        return sum(values) / len(values)

    def global_avg(self) -> float:
        """Return the mean of all values ever; NaN without values."""
        if self._count == 0:
            return math.nan
        return self._sum / self._count

    def values(self) -> list[tuple[float, float]]:
        """Return (value, iteration) pairs, the oldest first."""
        return list(self._data)

    def state_dict(self) -> dict:
        pairs = torch.tensor(self.values(), dtype=torch.float64).reshape(-1, 2)
        return {"pairs": pairs, "count": self._count, "sum": self._sum}

    def load_state_dict(self, state: dict) -> None:
        self._data.clear()
        for value, iteration in state["pairs"].tolist():
            self._data.append((value, int(iteration)))
        self._count = state["count"]
        self._sum = state["sum"]


def median(values: Sequence[float]) -> float:
    """Return the middle of the sorted values, or the mean of the two in the middle.

    It is NaN without values, and if one of them is NaN, as numpy's is.
    """
    if not values:
        return math.nan
    # The sum is a quick test; it is NaN as well for infinities of both signs.
    if math.isnan(sum(values)) and any(map(math.isnan, values)):
        return math.nan
    ordered = sorted(values)
    lower = ordered[(len(ordered) - 1) // 2]
    upper = ordered[len(ordered) // 2]
    return (lower + upper) / 2


def _require_positive(window_size: int) -> None:
    if window_size < 1:
        raise ValueError(f"window_size must be at least 1, got {window_size}")
