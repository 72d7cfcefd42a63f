import contextlib
import os
import re
from typing import Any

from .checkpointer import Checkpointer


class PeriodicCheckpointer:
    """Saves model_0004999.pth and so on each ``period``, and model_final.pth at ``max_iter``.

    A period of 0 saves only the final one, a negative one none.  Of the numbered files on the disk
    the newest ``max_to_keep`` stay, by default all.
    """

    def __init__(
        self, checkpointer: Checkpointer, period: int, max_iter: int | None = None,
        max_to_keep: int | None = None, file_prefix: str = "model",
    ) -> None:  # fmt: skip
        if max_to_keep is not None and max_to_keep < 1:
            raise ValueError(f"max_to_keep must be at least 1, or None for all: {max_to_keep}")
        self.checkpointer, self.period, self.max_iter = checkpointer, period, max_iter
        self.max_to_keep, self.file_prefix = max_to_keep, file_prefix

    def step(self, iteration: int, force: bool = False, **kwargs: Any) -> None:
        """Save if it is time to, or forced, with ``kwargs``; all ranks call it each iteration."""
        if force or (self.period > 0 and (iteration + 1) % self.period == 0):
            self.save(f"{self.file_prefix}_{iteration:07d}", iteration=iteration, **kwargs)
            self._delete_old(iteration)
        if self.period >= 0 and self.max_iter is not None and iteration >= self.max_iter - 1:
            self.save(f"{self.file_prefix}_final", iteration=iteration, **kwargs)

    def save(self, name: str, **kwargs: Any) -> None:
        """Save now; all ranks call it."""
        self.checkpointer.save(name, **kwargs)

    def _delete_old(self, iteration: int) -> None:
        if self.max_to_keep is None or not self.checkpointer.save_to_disk:
            return
        pattern, found = re.escape(self.file_prefix) + r"_(\d{7,})\.pth", {}
        for path in self.checkpointer.get_all_checkpoint_files():
            if match := re.fullmatch(pattern, os.path.basename(path)):
                found[path] = int(match[1])
        # Later iterations are left from before a resume from an earlier one: they go first.
        oldest_first = sorted(found, key=lambda path: (found[path] <= iteration, found[path]))
        for path in oldest_first[: -self.max_to_keep]:
            with contextlib.suppress(OSError):  # a file that stays does no harm
                os.remove(path)
