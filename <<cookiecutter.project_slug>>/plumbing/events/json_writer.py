import json
import math
import os
from collections import deque
from typing import BinaryIO, NamedTuple

from .storage import get_event_storage
from .writer import EventWriter, NewScalars

_NUM_ROWS = 1000  # at the end of the file, which may still get more names
_BLOCK = 4096  # bytes that are read at once from the end of an old file


class _Row(NamedTuple):
    """A line that was written."""

    iteration: int
    position: int  # of its first byte in the file
    values: dict[str, float]


class JSONWriter(EventWriter):
    """Writes a line for each iteration, one strict JSON object: {"iteration": 19, "lr": 0.1}.

    A value that is not finite becomes null.  ``[json.loads(line) for line in open(json_file)]``
    reads the file.

    Args:
        json_file: the path; the file is opened at the first write.
        window_size: number of iterations for the median of smoothed scalars.
        start_iter: drop what an earlier run wrote from this iteration on, and a torn last line; by
            default an existing file is only appended to.
    """

    # A name may come after the line of its iteration was written: an evaluation follows the log.
    # Then the lines from there on are written anew.  No line gets shorter by that, so the file
    # never has to be cut.

    def __init__(self, json_file: str, window_size: int = 20, start_iter: int | None = None):
        self._path = json_file
        self._start_iter = start_iter
        self._scalars = NewScalars(window_size, start_iter or 0)
        self._rows: deque[_Row] = deque(maxlen=_NUM_ROWS)
        self._file: BinaryIO | None = None
        self._end = 0  # of the file, in bytes
        self._encode = json.JSONEncoder(sort_keys=True, allow_nan=False).encode

    def write(self) -> None:
        new = self._scalars.pick(get_event_storage())
        if not new:
            return
        if self._file is None:
            self._open()
        position = self._end
        while self._rows and self._rows[-1].iteration >= min(new):
            row = self._rows.pop()
            position = row.position
            new[row.iteration] = {**row.values, **new.get(row.iteration, {})}
        lines = []
        end = position
        for iteration, values in sorted(new.items()):
            self._rows.append(_Row(iteration, end, values))
            lines.append(self._line(iteration, values))
            end += len(lines[-1])
        if position != self._end:
            self._file.seek(position)
        self._file.write(b"".join(lines))
        self._file.flush()
        self._end = end

    def _line(self, iteration: int, values: dict[str, float]) -> bytes:
        row = {"iteration": iteration}
        for name, value in values.items():
            row[name] = value if math.isfinite(value) else None
        return self._encode(row).encode() + b"\n"

    def _open(self) -> None:
        mode = "r+b" if os.path.exists(self._path) else "w+b"
        self._file = open(self._path, mode)  # noqa: SIM115
        if self._start_iter is None:
            self._end = self._file.seek(0, os.SEEK_END)
        else:
            self._end = _end_of_rows_before(self._file, self._start_iter)
        self._file.truncate(self._end)
        self._file.seek(self._end)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


def _end_of_rows_before(file: BinaryIO, start_iter: int) -> int:
    """Return the position after the last whole row of an iteration before ``start_iter``.

    The file may be large, so it is read from its end.  Lines that are not rows are dropped, too.
    """
    end = _after_newline_before(file, file.seek(0, os.SEEK_END))
    while end > 0:
        begin = _after_newline_before(file, end - 1)
        file.seek(begin)
        try:
            if json.loads(file.read(end - begin))["iteration"] < start_iter:
                return end
        except (ValueError, TypeError, KeyError):
            pass
        end = begin
    return 0


def _after_newline_before(file: BinaryIO, position: int) -> int:
    """Return the position after the last newline before ``position``; 0 if there is none."""
    while position > 0:
        begin = max(0, position - _BLOCK)
        file.seek(begin)
        found = file.read(position - begin).rfind(b"\n")
        if found >= 0:
            return begin + found + 1
        position = begin
    return 0
