import math
from collections import deque
from itertools import islice

import torch


class HistoryBuffer:
    """The newest values of one scalar and their iterations (fvcore/common/history_buffer.py)."""

    def __init__(self, max_length: int = 1_000_000) -> None:
        self._data = deque(maxlen=max_length)  # (value, iteration)
        self._count, self._sum = 0, 0.0

    def update(self, value: float, iteration: float | None = None) -> None:
        """Append a value; its iteration is by default the number of values so far."""
        self._data.append((value, self._count if iteration is None else iteration))
        self._count += 1
        self._sum += value

    def pop(self) -> None:
        self._sum -= self._data.pop()[0]
        self._count -= 1

    def latest(self) -> float:
        return self._data[-1][0]

    def latest_iteration(self) -> float:
        """Of the newest value; -1 without values."""
        return self._data[-1][1] if self._data else -1

    def count_samples(self, window_size: int) -> int:
        """Number of newest values, in a row, of the last ``window_size`` iterations."""
        if window_size < 1:
            raise ValueError(f"window_size must be at least 1, got {window_size}")
        start, count = self.latest_iteration() - window_size, 0
        for _, iteration in reversed(self._data):
            if iteration <= start:
                break
            count += 1
        return count

    def median(self, window_size: int) -> float:
        """Of the newest ``window_size`` values; nan without values, or if one is nan."""
        values = sorted(self._newest(window_size))
        if not values or math.isnan(sum(values)):
            return math.nan
        return (values[(len(values) - 1) // 2] + values[len(values) // 2]) / 2

    def avg(self, window_size: int) -> float:
        """Mean of the newest ``window_size`` values; nan without values."""
        values = self._newest(window_size)
        return sum(values) / len(values) if values else math.nan

    def _newest(self, window_size: int) -> list[float]:
        if window_size < 1:
            raise ValueError(f"window_size must be at least 1, got {window_size}")
        return [value for value, _ in islice(reversed(self._data), window_size)]

    def global_avg(self) -> float:
        """Mean of all values ever; nan without values."""
        return self._sum / self._count if self._count else math.nan

    def values(self) -> list[tuple[float, float]]:
        """(value, iteration) pairs, the oldest first."""
        return list(self._data)

    def state_dict(self) -> dict:
        pairs = torch.tensor(self.values(), dtype=torch.float64).reshape(-1, 2)
        return {"pairs": pairs, "count": self._count, "sum": self._sum}

    def load_state_dict(self, state: dict) -> None:
        self._data.clear()
        self._data.extend((value, int(iteration)) for value, iteration in state["pairs"].tolist())
        self._count, self._sum = state["count"], state["sum"]
