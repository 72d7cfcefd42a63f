import datetime
import logging
import math
import time
from typing import NamedTuple

from .history import HistoryBuffer, median
from .storage import EventStorage, get_event_storage
from .writer import EventWriter

_NUM_TIMES = 20  # in the log, over which the median of times is shown
_LONGEST_ETA = 100 * 365 * 86400  # in seconds; more than a timedelta can hold may be asked for


class _Moment(NamedTuple):
    iteration: int
    seconds: float


class CommonMetricPrinter(EventWriter):
    """Logs a line: ETA, iteration, losses, grad_norm, seconds, learning rate, GPU memory.

    Names with "loss" or "[metric]" in them are shown, and grad_norm; smoothed ones as medians.
    Times, speed and memory are those of this session.

    Args:
        max_iter: number of iterations of the run, for the ETA; none is shown without.
        window_size: number of iterations for the median of smoothed scalars.
    """

    def __init__(self, max_iter: int | None = None, window_size: int = 20) -> None:
        self.logger = logging.getLogger(__name__)
        self._max_iter = max_iter
        self._window_size = window_size
        self._first_write: _Moment | None = None
        self._last_iter: int | None = None  # that was shown

    def write(self) -> None:
        storage = get_event_storage()
        iteration = storage.iter
        if iteration == self._last_iter:
            return
        if self._max_iter is not None and iteration >= self._max_iter:
            return
        # A resume begins with the histories of earlier sessions, maybe of other machines.
        ours = {
            name: history
            for name, history in storage.histories().items()
            if history.latest_iteration() >= storage.start_iter
        }
        if not ours:
            return
        fields = [f"iter: {iteration}"]
        eta = self._eta(storage, ours.get("time"))
        if eta is not None:
            fields.insert(0, f"eta: {eta}")
        latest = storage.latest_with_smoothing_hint(self._window_size)
        for name, (value, _) in latest.items():
            if "loss" in name or "[metric]" in name or name == "grad_norm":
                fields.append(f"{name}: {value:.4g}")
        # Each of these is a mean over the iterations since the line before.
        for name in ("time", "data_time"):
            if name in ours:
                pairs = ours[name].newest(_NUM_TIMES)
                times = [value for value, when in pairs if when >= storage.start_iter]
                fields.append(f"{name}: {median(times):.4f}")
                fields.append(f"last_{name}: {times[0]:.4f}")
        if "samples_per_second" in ours:
            fields.append(f"sample/s: {ours['samples_per_second'].latest():.0f}")
        fields.append(f"lr: {latest['lr'][0]:.5g}" if "lr" in latest else "lr: N/A")
        if "max_mem" in ours:
            fields.append(f"max_mem: {ours['max_mem'].latest():.0f}M")
        self.logger.info(" %s", "  ".join(fields))
        self._last_iter = iteration

    def _eta(self, storage: EventStorage, times: HistoryBuffer | None) -> datetime.timedelta | None:
        """Put and return the time that is left, or None while it is not known.

        The time of evaluations and saves counts as well, once there is an earlier line.
        """
        if self._max_iter is None:
            return None
        now = time.perf_counter()
        if self._first_write is None:
            self._first_write = _Moment(storage.iter, now)
        num_iters = storage.iter - self._first_write.iteration
        if num_iters > 0:
            seconds_per_iter = (now - self._first_write.seconds) / num_iters
        elif times is not None:
            seconds_per_iter = times.latest()
        else:
            return None
        seconds = seconds_per_iter * (self._max_iter - storage.iter - 1)
        if not math.isfinite(seconds):
            return None
        storage.put_scalar("eta_seconds", seconds, smoothing_hint=False)
        return datetime.timedelta(seconds=int(min(seconds, _LONGEST_ETA)))
