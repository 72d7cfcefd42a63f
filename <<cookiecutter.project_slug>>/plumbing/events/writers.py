import collections
import contextlib
import datetime
import json
import logging
import math
import os
import time
from typing import Any, BinaryIO

import torch

from .storage import EventStorage, get_event_storage

_NUM_ROWS = 1000  # at the end of metrics.json, that may still get more names


class EventWriter:
    """Shows what is new in the current storage: ``write``, and at the end ``close``."""

    def write(self) -> None:
        raise NotImplementedError

    def close(self) -> None: ...


class _NewScalars:
    """Picks {iteration: {name: value}} of what is new, remembered for each name."""

    def __init__(self, window_size: int, start_iter: int) -> None:
        self._window_size = window_size
        self._picked = collections.defaultdict(lambda: start_iter - 1)  # the newest iteration

    def pick(self, storage: EventStorage) -> dict[int, dict[str, float]]:
        rows = {}
        for name, (value, i) in storage.latest_with_smoothing_hint(self._window_size).items():
            if i > self._picked[name]:
                self._picked[name] = i
                rows.setdefault(i, {})[name] = value
        return rows


class JSONWriter(EventWriter):
    """Writes a line for each iteration, one strict JSON object: {"iteration": 19, "lr": 0.1}.

    A value that is not finite becomes null.  ``start_iter`` drops what an earlier run wrote from
    there on, and a torn last line.  ``[json.loads(line) for line in open(json_file)]`` reads it.
    """

    def __init__(self, json_file: str, window_size: int = 20, start_iter: int | None = None):
        self._path, self._start_iter = json_file, start_iter
        self._scalars = _NewScalars(window_size, start_iter or 0)
        self._rows = collections.deque(maxlen=_NUM_ROWS)  # (iteration, where its line is, row)
        self._file: BinaryIO | None = None

    def write(self) -> None:
        new = self._scalars.pick(get_event_storage())
        if not new:
            return
        self._file = self._file or _open(self._path, self._start_iter)
        # A name may come after its iteration was written: lines are written anew from there on.
        position = self._file.seek(0, os.SEEK_END)
        while self._rows and self._rows[-1][0] >= min(new):
            iteration, position, row = self._rows.pop()
            new[iteration] = {**row, **new.get(iteration, {})}
        self._file.seek(position)
        text = b""
        for iteration, row in sorted(new.items()):
            self._rows.append((iteration, position + len(text), row))
            row = {name: value if math.isfinite(value) else None for name, value in row.items()}
            text += json.dumps({**row, "iteration": iteration}, sort_keys=True).encode() + b"\n"
        self._file.write(text)
        self._file.flush()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


def _open(path: str, start_iter: int | None) -> BinaryIO:
    file = open(path, "r+b" if os.path.exists(path) else "w+b")  # noqa: SIM115
    lines = [] if start_iter is None else file.readlines()
    end = file.seek(0, os.SEEK_END)
    for line in reversed(lines):
        with contextlib.suppress(ValueError, TypeError, KeyError):  # such a line goes as well
            if line.endswith(b"\n") and json.loads(line)["iteration"] < start_iter:
                break
        end -= len(line)
    file.truncate(end)
    return file


class TensorboardXWriter(EventWriter):
    """Writes for TensorBoard; ``kwargs`` go to SummaryWriter, its purge_step hides an old run."""

    def __init__(self, log_dir: str, window_size: int = 20, **kwargs: Any) -> None:
        self._arguments = {"log_dir": log_dir, **kwargs}
        self._scalars = _NewScalars(window_size, kwargs.get("purge_step") or 0)
        self._writer = None

    def write(self) -> None:
        storage = get_event_storage()
        rows = self._scalars.pick(storage)
        if not (rows or storage._vis_data or storage._histogram_data):
            return
        from torch.utils.tensorboard import summary, writer  # slow: only when used

        self._writer = self._writer or writer.SummaryWriter(**self._arguments)
        for iteration, row in sorted(rows.items()):
            # One event for all names takes a fifth of the time of add_scalar for each.
            values = [summary.Summary.Value(tag=name, simple_value=row[name]) for name in row]
            self._writer.file_writer.add_summary(summary.Summary(value=values), iteration)
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
    """Logs a line: ETA, iteration, losses, grad_norm, seconds, learning rate, GPU memory."""

    def __init__(self, max_iter: int | None = None, window_size: int = 20) -> None:
        self.logger = logging.getLogger("plumbing.events")
        self._max_iter, self._window_size = max_iter, window_size
        self._last_write = None, 0.0  # iteration, seconds

    def write(self) -> None:
        storage = get_event_storage()
        histories, iteration = storage.histories(), storage.iter
        ended = self._max_iter is not None and iteration >= self._max_iter
        if ended or not histories or iteration == self._last_write[0]:
            return
        fields = [*self._eta(storage), f"iter: {iteration}"]
        for name, history in histories.items():
            if "loss" in name or "[metric]" in name or name == "grad_norm":
                count = storage.count_samples(name, self._window_size)
                fields.append(f"{name}: {history.median(count):.4g}")
        if history := histories.get("time"):
            fields.append(f"time: {history.global_avg():.4f}  last_time: {history.latest():.4f}")
        if history := histories.get("data_time"):
            fields.append(f"data_time: {history.avg(self._window_size):.4f}")
            fields.append(f"last_data_time: {history.latest():.4f}")
        if history := histories.get("samples_per_second"):
            fields.append(f"sample/s: {history.latest():.0f}")
        fields.append(f"lr: {histories['lr'].latest():.5g}" if "lr" in histories else "lr: N/A")
        if torch.cuda.is_available():
            fields.append(f"max_mem: {torch.cuda.max_memory_allocated() / 2**20:.0f}M")
        self.logger.info(" %s", "  ".join(fields))
        self._last_write = iteration, time.perf_counter()

    def _eta(self, storage: EventStorage) -> list[str]:
        """[] while it is not known."""
        iteration, moment = self._last_write
        seconds = None
        if "time" in storage.histories():
            seconds = storage.history("time").median(1000)
        elif iteration is not None:
            seconds = (time.perf_counter() - moment) / (storage.iter - iteration)
        if seconds is None or self._max_iter is None:
            return []
        seconds *= self._max_iter - storage.iter - 1
        storage.put_scalar("eta_seconds", seconds, smoothing_hint=False)
        return [f"eta: {datetime.timedelta(seconds=int(seconds))}"]
