"""Where the time goes."""

import time
from collections.abc import Iterable, Iterator
from typing import Any

import torch


class IterationTimer:
    """Hands on what a loader yields, and measures in seconds the wait for it and the iterations.

    ``batch_size`` is that of an iteration, over all ranks.
    """

    def __init__(self, data_loader: Iterable, batch_size: int) -> None:
        self._data_loader, self._batch_size = data_loader, batch_size
        self._start, self._num_iters = None, 0  # since the last lap
        self.data_time = torch.zeros((), dtype=torch.float64)  # of the last wait

    def __iter__(self) -> Iterator[Any]:
        start = time.perf_counter()
        for item in self._data_loader:
            now = time.perf_counter()
            self.data_time = torch.tensor(now - start, dtype=torch.float64)
            self._start = self._start or start
            self._num_iters += 1
            yield item
            start = time.perf_counter()

    def lap(self) -> dict[str, float]:
        """Means since the last lap, without what came between that and the next wait for data.

        It belongs after the values of an iteration were read: then a GPU has caught up.
        """
        seconds = (time.perf_counter() - self._start) / self._num_iters
        self._start, self._num_iters = None, 0
        return {"time": seconds, "samples_per_second": self._batch_size / seconds}
