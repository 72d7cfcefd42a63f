import collections
import contextlib
import datetime
import json
import logging
import math
import os
import time
from collections.abc import Iterator
from typing import Any, BinaryIO

import torch

from plumbing import comm

from .storage import EventStorage, get_event_storage

_NUM_ROWS = 1000  # rows at the end of metrics.json that may still get more names


class EventWriter:
    """Shows what the current storage holds: ``write`` what is new, ``close`` at the end."""

    def write(self) -> None:
        raise NotImplementedError

    def close(self) -> None:
        """Release files; nothing to do by default."""


class _NewScalars:
    """Picks the scalars that were not picked before, remembered for each name."""

    def __init__(self, window_size: int, start_iter: int) -> None:
        self._window_size = window_size
        self._picked = collections.defaultdict(lambda: start_iter - 1)  # name: newest iteration

    def pick(self, storage: EventStorage) -> dict[int, dict[str, float]]:
        """{iteration: {name: value}}"""
        rows = {}
        for name, (value, i) in storage.latest_with_smoothing_hint(self._window_size).items():
            if i > self._picked[name]:
                self._picked[name] = i
                rows.setdefault(i, {})[name] = value
        return rows


class JSONWriter(EventWriter):
    """Writes one strict JSON object for each iteration, a line each: {"iteration": 19, "lr": 0.1}.

    A value that is not finite becomes null.  To read the file:
    ``[json.loads(line) for line in open("metrics.json")]``.

    Args:
        window_size: in iterations, of the median of smoothed scalars.
        start_iter: rows that an earlier run left from there on are dropped, as is a torn last line;
            by default the file is only appended to.
    """

    def __init__(
        self, json_file: str, window_size: int = 20, start_iter: int | None = None
    ) -> None:
        self._path, self._start_iter = json_file, start_iter
        self._scalars = _NewScalars(window_size, start_iter or 0)
        self._rows = collections.deque(maxlen=_NUM_ROWS)  # (iteration, where its line starts, row)
        self._file: BinaryIO | None = None

    def write(self) -> None:
        new = self._scalars.pick(get_event_storage())
        if not new:
            return
        if self._file is None:
            mode = "r+b" if os.path.exists(self._path) else "w+b"
            self._file = open(self._path, mode)  # noqa: SIM115 (closed by close)
            _drop_rows(self._file, self._start_iter)
        # A name may come after its iteration was written: lines from there on are written anew.
        position = self._file.seek(0, os.SEEK_END)
        while self._rows and self._rows[-1][0] >= min(new):
            iteration, position, row = self._rows.pop()
            new[iteration] = {**row, **new.get(iteration, {})}
        self._file.seek(position)
        text = b""
        for iteration, row in sorted(new.items()):
            self._rows.append((iteration, position + len(text), row))
            row = {name: value if math.isfinite(value) else None for name, value in row.items()}
            text += json.dumps({"iteration": iteration, **row}, sort_keys=True).encode() + b"\n"
        self._file.write(text)
        self._file.flush()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


def _drop_rows(file: BinaryIO, start_iter: int | None) -> None:
    """Cut off the rows of ``start_iter`` and later, and a last line that is torn."""
    lines = file.readlines() if start_iter is not None else []
    end = file.seek(0, os.SEEK_END)
    for line in reversed(lines):
        try:
            if line.endswith(b"\n") and json.loads(line)["iteration"] < start_iter:
                break
        except (ValueError, TypeError, KeyError):
            pass  # torn: it goes as well
        end -= len(line)
    file.truncate(end)


class TensorboardXWriter(EventWriter):
    """Writes scalars, images and histograms for TensorBoard.

    Args:
        window_size: in iterations, of the median of smoothed scalars.
        kwargs: of torch.utils.tensorboard.SummaryWriter; purge_step hides an earlier run's events.
    """

    def __init__(self, log_dir: str, window_size: int = 20, **kwargs: Any) -> None:
        self._arguments = {"log_dir": log_dir, **kwargs}
        self._scalars = _NewScalars(window_size, kwargs.get("purge_step") or 0)
        self._writer = None

    def write(self) -> None:
        storage = get_event_storage()
        rows = self._scalars.pick(storage)
        if not (rows or storage._vis_data or storage._histogram_data):
            return
        if self._writer is None:
            from torch.utils.tensorboard import SummaryWriter  # takes a second: only when used

            self._writer = SummaryWriter(**self._arguments)
        for iteration, row in sorted(rows.items()):
            for name, value in row.items():
                self._writer.add_scalar(name, value, iteration)
        for name, image, iteration in storage._vis_data:
            self._writer.add_image(name, image, iteration)
        for histogram in storage._histogram_data:
            self._writer.add_histogram_raw(**histogram)
        storage.clear_images()
        storage.clear_histograms()
        self._writer.flush()

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()


class CommonMetricPrinter(EventWriter):
    """Logs one line: ETA, iteration, losses, gradient norm, times, learning rate, memory.

    Args:
        max_iter: for the ETA; without it there is none.
        window_size: in iterations, of medians and means.
    """

    def __init__(self, max_iter: int | None = None, window_size: int = 20) -> None:
        self.logger = logging.getLogger("plumbing.events")
        self._max_iter, self._window_size = max_iter, window_size
        self._last_write: tuple[int, float] | None = None  # iteration, seconds

    def write(self) -> None:
        storage = get_event_storage()
        iteration = storage.iter
        if self._last_write is not None and self._last_write[0] == iteration:
            return
        if self._max_iter is not None and iteration >= self._max_iter:
            return
        histories = storage.histories()
        if not histories:
            return
        eta = self._eta(storage)
        fields = [f"iter: {iteration}"] if eta is None else [f"eta: {eta}", f"iter: {iteration}"]
        for name, history in histories.items():
            if "loss" in name or "[metric]" in name or name == "grad_norm":
                count = max(1, storage.count_samples(name, self._window_size))
                fields.append(f"{name}: {history.median(count):.4g}")
        if "time" in histories:
            time_history = histories["time"]
            fields.append(f"time: {time_history.global_avg():.4f}")
            fields.append(f"last_time: {time_history.latest():.4f}")
        if "data_time" in histories:
            fields.append(f"data_time: {histories['data_time'].avg(self._window_size):.4f}")
            fields.append(f"last_data_time: {histories['data_time'].latest():.4f}")
        if "samples_per_second" in histories:
            fields.append(f"sample/s: {histories['samples_per_second'].latest():.0f}")
        fields.append(f"lr: {histories['lr'].latest():.5g}" if "lr" in histories else "lr: N/A")
        if torch.cuda.is_available():
            fields.append(f"max_mem: {torch.cuda.max_memory_allocated() / 2**20:.0f}M")
        self.logger.info(" %s", "  ".join(fields))
        self._last_write = iteration, time.perf_counter()

    def _eta(self, storage: EventStorage) -> datetime.timedelta | None:
        """Time that the iterations left will take; None while it is not known."""
        if self._max_iter is None:
            return None
        left = self._max_iter - storage.iter - 1
        if "time" in storage.histories():
            seconds = storage.history("time").median(1000) * left
            storage.put_scalar("eta_seconds", seconds, smoothing_hint=False)
        elif self._last_write is not None:
            iteration, moment = self._last_write
            seconds = (time.perf_counter() - moment) / (storage.iter - iteration) * left
        else:
            return None
        return datetime.timedelta(seconds=int(seconds))


@contextlib.contextmanager
def open_writers(
    output_dir: str, max_iter: int, start_iter: int, window_size: int
) -> Iterator[list[EventWriter]]:
    """Writers to the log, metrics.json and TensorBoard; [] on all ranks but the main one.

    A run that resumes writes its last iteration, ``start_iter - 1``, again and replaces what it had
    written later.  At the end, also after an exception, the writers write what is left.
    """
    writers = []
    first = max(start_iter - 1, 0)
    if comm.is_main_process():
        writers = [
            CommonMetricPrinter(max_iter, window_size),
            JSONWriter(os.path.join(output_dir, "metrics.json"), window_size, first),
            TensorboardXWriter(output_dir, window_size, purge_step=first),
        ]
    with contextlib.ExitStack() as stack:
        for writer in reversed(writers):
            stack.callback(writer.close)
            stack.callback(writer.write)
        yield writers
