import contextlib
from collections.abc import Iterator, Sequence

from plumbing import comm

from .storage import EventStorage


class EventWriter:
    """Shows what is new in the current storage: ``write``, and at the end ``close``."""

    def write(self) -> None:
        raise NotImplementedError

    def close(self) -> None:
        """Close the files; nothing is to do by default."""


@contextlib.contextmanager
def open_writers(writers: Sequence[EventWriter]) -> Iterator[Sequence[EventWriter]]:
    """Yield the writers on rank 0 and none on the others; write what is left at the end.

    This happens after an exception as well.  A writer that fails then does not keep the others
    from writing.
    """
    if not comm.is_main_process():
        yield []
        return
    with contextlib.ExitStack() as stack:
        # The stack calls its last callback first.
        for writer in reversed(writers):
            stack.callback(writer.close)
            stack.callback(writer.write)
        yield writers


class NewScalars:
    """Picks the values that are new since the last time, for each name.

    Args:
        window_size: number of iterations over whose values medians are taken.
        start_iter: values of earlier iterations are not new.
    """

    def __init__(self, window_size: int, start_iter: int) -> None:
        self._window_size = window_size
        self._start_iter = start_iter
        self._newest: dict[str, int] = {}  # the iterations that were picked last

    def pick(self, storage: EventStorage) -> dict[int, dict[str, float]]:
        """Return {iteration: {name: value}}."""
        rows = {}
        latest = storage.latest_with_smoothing_hint(self._window_size)
        for name, (value, iteration) in latest.items():
            if iteration > self._newest.get(name, self._start_iter - 1):
                self._newest[name] = iteration
                rows.setdefault(iteration, {})[name] = value
        return rows
