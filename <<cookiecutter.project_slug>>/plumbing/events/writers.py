import collections
import contextlib
import json
import math
import mmap
import os
import platform
import re
import time
from typing import Any, BinaryIO

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
        self._end = 0  # of the file, in bytes

    def write(self) -> None:
        new = self._scalars.pick(get_event_storage())
        if not new:
            return
        if self._file is None:
            self._file, self._end = _open(self._path, self._start_iter)
        # A name may come after its iteration was written: lines are written anew from there on.
        position = self._end
        while self._rows and self._rows[-1][0] >= min(new):
            iteration, position, row = self._rows.pop()
            new[iteration] = {**row, **new.get(iteration, {})}
        if position != self._end:
            self._file.seek(position)
        text = b""
        for iteration, row in sorted(new.items()):
            self._rows.append((iteration, position + len(text), row))
            row = {name: value if math.isfinite(value) else None for name, value in row.items()}
            text += json.dumps({**row, "iteration": iteration}, sort_keys=True).encode() + b"\n"
        self._file.write(text)
        self._file.flush()
        self._end = position + len(text)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


def _open(path: str, start_iter: int | None) -> tuple[BinaryIO, int]:
    file = open(path, "r+b" if os.path.exists(path) else "w+b")  # noqa: SIM115
    end = file.seek(0, os.SEEK_END)
    if end and start_iter is not None:
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:  # only its end is read
            while end:
                begin = data.rfind(b"\n", 0, end - 1) + 1
                with contextlib.suppress(ValueError, TypeError, KeyError):  # no row goes too
                    line = data[begin:end]
                    if line.endswith(b"\n") and json.loads(line)["iteration"] < start_iter:
                        break
                end = begin
    file.truncate(end)
    return file, file.seek(end)


class TensorboardXWriter(EventWriter):
    """Writes for TensorBoard, at once and without a thread; ``purge_step`` hides an old run."""

    def __init__(self, log_dir: str, window_size: int = 20, purge_step: int | None = None):
        self._log_dir, self._records, self._written = log_dir, None, set()
        self._scalars, self._purge_step = _NewScalars(window_size, purge_step or 0), purge_step

    def write(self) -> None:
        storage = get_event_storage()
        rows, media = self._scalars.pick(storage), (storage._vis_data, storage._histogram_data)
        images, histograms = ([e for e in each if id(e) not in self._written] for each in media)
        if not (rows or images or histograms):
            return
        from torch.utils.tensorboard import summary  # slow: only when used

        for iteration, row in sorted(rows.items()):
            values = [summary.Summary.Value(tag=name, simple_value=row[name]) for name in row]
            self._add(step=iteration, summary=summary.Summary(value=values))
        for name, image, iteration in images:
            self._add(step=iteration, summary=summary.image(name, image, dataformats="CHW"))
        for name, numbers, iteration in histograms:
            self._add(step=iteration, summary=summary.histogram_raw(name, **numbers))
        for each in media:  # those of this iteration stay, for a resume from its checkpoint
            while each and each[0][2] < storage.iter:
                each.popleft()
        self._written = {id(one) for each in media for one in each}
        self._records.flush()

    def _add(self, **content: Any) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.summary.writer.record_writer import RecordWriter

        if self._records is None:
            os.makedirs(self._log_dir, exist_ok=True)
            # Files are read in the order of their names, and a clock may have been set back.
            old = [re.match(r"events\.out\.tfevents\.(\d+)", n) for n in os.listdir(self._log_dir)]
            stamp = max([time.time(), *(int(match[1]) + 1 for match in old if match)])
            name = f"events.out.tfevents.{stamp:.6f}.{platform.node()}.{os.getpid()}"
            file = open(os.path.join(self._log_dir, name), "xb")  # noqa: SIM115
            self._records = RecordWriter(file)
            self._add(file_version="brain.Event:2")
            if self._purge_step is not None:
                start = SessionLog(status=SessionLog.START)
                self._add(step=self._purge_step, session_log=start)
        self._records.write(Event(wall_time=time.time(), **content).SerializeToString())

    def close(self) -> None:
        if self._records is not None:
            self._records.close()
