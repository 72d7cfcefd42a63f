from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from .media import Medium
from .storage import get_event_storage
from .writer import EventWriter, NewScalars

if TYPE_CHECKING:
    from .event_file import EventFile


class TensorboardXWriter(EventWriter):
    """Writes scalars, images and histograms for TensorBoard, at once and without a thread.

    Args:
        log_dir: the folder of the event files; a file is made at the first write.
        window_size: number of iterations for the median of smoothed scalars.
        purge_step: hide what earlier runs wrote from this iteration on.
        text: the settings, say; shown as they stand in the tab TEXT.
    """

    def __init__(
        self, log_dir: str, window_size: int = 20, purge_step: int | None = None, text: str = ""
    ) -> None:
        self._log_dir = log_dir
        self._purge_step = purge_step
        self._text = text
        self._scalars = NewScalars(window_size, purge_step or 0)
        self._file: EventFile | None = None
        self._written: dict[int, Medium] = {}  # by their id: those still in the storage

    def write(self) -> None:
        storage = get_event_storage()
        rows = self._scalars.pick(storage)
        images = self._not_written(storage._vis_data)
        histograms = self._not_written(storage._histograms)
        if not (rows or images or histograms):
            return
        if self._file is None:
            # This takes seconds, so a run that writes nothing does without.
            from .event_file import EventFile

            self._file = EventFile(self._log_dir, self._purge_step)
            if self._text:
                self._file.add_text("settings", self._text, self._purge_step or 0)
        for iteration, row in sorted(rows.items()):
            self._file.add_scalars(row, iteration)
        for image in images:
            self._file.add_image(*image)
        for histogram in histograms:
            self._file.add_histogram(*histogram)
        self._file.flush()
        self._written = {}
        for waiting in (storage._vis_data, storage._histograms):
            # A checkpoint holds those of its own iteration, since a resume hides them in the file.
            while waiting and waiting[0].iteration < storage.iter:
                waiting.popleft()
            self._written.update((id(medium), medium) for medium in waiting)

    def _not_written(self, waiting: deque[Medium]) -> list[Medium]:
        return [medium for medium in waiting if id(medium) not in self._written]

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
