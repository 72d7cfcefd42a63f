"""A file of TensorBoard.  Importing this takes seconds, so only a writer that writes does."""

import os
import platform
import re
import time
from typing import Any

import torch
from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.record_writer import RecordWriter
from torch.utils.tensorboard import summary


class EventFile:
    """A new file of events in a folder, which is made if it is missing.

    torch's SummaryWriter would write in a thread of its own, whose errors are lost.
    """

    def __init__(self, folder: str, purge_step: int | None) -> None:
        os.makedirs(folder, exist_ok=True)
        file = open(os.path.join(folder, _new_name(folder)), "xb")  # noqa: SIM115
        self._records = RecordWriter(file)
        self._add(file_version="brain.Event:2")
        if purge_step is not None:
            self._add(step=purge_step, session_log=SessionLog(status=SessionLog.START))

    def add_scalars(self, values: dict[str, float], step: int) -> None:
        summary = Summary()
        for name, value in values.items():
            summary.value.add(tag=name, simple_value=value)
        self._add(step=step, summary=summary)

    def add_image(self, name: str, image: torch.Tensor, step: int) -> None:
        self._add(step=step, summary=summary.image(name, image, dataformats="CHW"))

    def add_histogram(self, name: str, histogram: dict, step: int) -> None:
        self._add(step=step, summary=summary.histogram_raw(name, **histogram))

    def add_text(self, name: str, text: str, step: int) -> None:
        # TensorBoard shows Markdown, in which lines that are indented are shown as they stand.
        indented = "".join(f"    {line}\n" for line in text.splitlines())
        self._add(step=step, summary=summary.text(name, indented))

    def _add(self, **content: Any) -> None:
        self._records.write(Event(wall_time=time.time(), **content).SerializeToString())

    def flush(self) -> None:
        self._records.flush()

    def close(self) -> None:
        self._records.close()


def _new_name(folder: str) -> str:
    """Return a name that comes after all others, also if the clock was set back.

    TensorBoard reads the files of a folder in the order of their names, which begin with a time.
    """
    stamp = time.time()
    for name in os.listdir(folder):
        old = re.match(r"events\.out\.tfevents\.(\d+)", name)
        if old:
            stamp = max(stamp, int(old[1]) + 1)
    return f"events.out.tfevents.{stamp:.6f}.{platform.node()}.{os.getpid()}"
