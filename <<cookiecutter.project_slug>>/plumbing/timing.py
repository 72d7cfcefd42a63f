"""Where the time goes: the seconds of the iterations, and of the waits for data."""

import datetime
import logging
import time
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from plumbing import comm
from plumbing.errors import SettingsError

logger = logging.getLogger(__name__)


class TimedLoader:
    """Passes on the items of a loader, and measures the iterations and the waits for data.

    An iteration lasts until the next item is wanted.  The seconds after a call of ``times`` count
    in no iteration: then the loop writes, saves and evaluates.

    At the end of a ``with`` block it closes the loader, which ends its workers, and logs how long
    everything took.

    Args:
        data_loader: any iterable, also one without a length, such as a generator; one item is what
            an iteration trains on.  It must not end before the training does.
        batch_size: samples of an iteration, over all ranks.
    """

    def __init__(self, data_loader: Iterable, batch_size: int) -> None:
        self._data_loader = data_loader
        self._batch_size = batch_size
        self._iterator: Any = None
        # Since the last call of ``times``:
        self._num_iters = 0
        self._start = 0.0
        self._data_seconds = 0.0
        # Since the beginning, but without those:
        self._total_iters = 0
        self._total_seconds = 0.0
        self._entered = 0.0

    def __iter__(self) -> Iterator[Any]:
        """Raise a SettingsError if the loader has no more items when one is wanted."""
        self._iterator = iter(self._data_loader)
        start = time.perf_counter()
        for item in self._iterator:
            if self._num_iters == 0:
                self._start = start
            self._num_iters += 1
            self._data_seconds += time.perf_counter() - start
            yield item
            start = time.perf_counter()
        raise SettingsError(
            f"build_train_loader: rank {comm.get_rank()} has no more batches before"
            " SOLVER.MAX_ITER: a loader for the training starts again when its data end"
        )

    def times(self) -> dict[str, float]:
        """Compute the means over the iterations since the last call.  Collective.

        Call it when the values of an iteration have been read: a GPU has finished it then.

        Returns:
            of the slowest rank ``time`` and ``data_time`` (seconds of an iteration and of its wait
            for data), ``samples_per_second`` of all ranks together, and on GPUs ``max_mem``: the
            most MiB that the tensors of a rank have taken.
        """
        seconds = time.perf_counter() - self._start
        on_gpu = torch.cuda.is_initialized()
        memory = torch.cuda.max_memory_allocated() / 2**20 if on_gpu else 0.0
        numbers = [seconds / self._num_iters, self._data_seconds / self._num_iters, memory]
        if comm.get_world_size() > 1:
            ranks = comm.gather_tensor(torch.tensor(numbers, dtype=torch.float64))
            numbers = ranks.amax(dim=0).tolist()

        self._total_iters += self._num_iters
        self._total_seconds += seconds
        self._num_iters = 0
        self._data_seconds = 0.0

        times = {
            "time": numbers[0],
            "data_time": numbers[1],
            "samples_per_second": self._batch_size / numbers[0],
        }
        if on_gpu:
            times["max_mem"] = numbers[2]
        return times

    def __enter__(self) -> "TimedLoader":
        self._entered = time.perf_counter()
        return self

    def __exit__(self, *_: Any) -> None:
        end = time.perf_counter()
        for opened in (self._iterator, self._data_loader):
            if hasattr(opened, "close"):
                opened.close()
        self._log_summary(end)

    def _log_summary(self, end: float) -> None:
        num_iters = self._total_iters
        training_seconds = self._total_seconds
        # After an error there are iterations that no call of ``times`` has counted.
        if self._num_iters > 0:
            num_iters += self._num_iters
            training_seconds += end - self._start
        if num_iters == 0:
            return
        total_seconds = end - self._entered
        logger.info(
            "Overall training speed: %d iterations in %s (%.4f s / it)",
            num_iters,
            _clock_time(training_seconds),
            training_seconds / num_iters,
        )
        logger.info(
            "Total training time: %s (%s on writing, saving and evaluating)",
            _clock_time(total_seconds),
            _clock_time(total_seconds - training_seconds),
        )


def _clock_time(seconds: float) -> str:
    """Format seconds as hours:minutes:seconds.tenths."""
    tenths = int(seconds * 10) % 10
    return f"{datetime.timedelta(seconds=int(seconds))}.{tenths}"
