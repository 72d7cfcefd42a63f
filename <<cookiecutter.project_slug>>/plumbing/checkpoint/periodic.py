"""Saves a numbered file every so many iterations, and a final file after the last one."""

import contextlib
import os
import re
from typing import Any

from .checkpointer import Checkpointer
from .sharded import remove_checkpoint


class PeriodicCheckpointer:
    """Save model_0004999.pth and so on each ``period``, and model_final.pth at ``max_iter``.

    The number in a name is the last iteration that was trained, counted from 0.

    Args:
        checkpointer: writes the files.
        period: 0 saves only the final file, a negative number none.
        max_iter: None saves no final file.
        max_to_keep: the newest numbered files on the disk that stay; None or 0 keeps all.
        file_prefix: the first part of the names.
        keep_period: of the numbered files, those after each so many iterations are never deleted
            and not counted; 0 deletes any.
    """

    def __init__(
        self,
        checkpointer: Checkpointer,
        period: int,
        max_iter: int | None = None,
        max_to_keep: int | None = None,
        file_prefix: str = "model",
        keep_period: int = 0,
    ) -> None:
        if max_to_keep is not None and max_to_keep < 0:
            raise ValueError(f"max_to_keep: {max_to_keep} is not a number of files")
        self.checkpointer = checkpointer
        self.period = period
        self.max_iter = max_iter
        self.max_to_keep = max_to_keep
        self.file_prefix = file_prefix
        self.keep_period = keep_period

    def step(self, iteration: int, force: bool = False, **kwargs: Any) -> None:
        """Save if an iteration is due, or the save is forced.  Collective.

        Right after a resume, the iteration that was resumed may be passed once more: a file that
        is missing then gets made, and none is written again.

        Args:
            iteration: the one that was trained last; -1 before the first one does nothing.
            force: save a numbered file whatever the period.
            kwargs: what else to keep in the file.
        """
        if iteration < 0:
            return
        is_last = self.max_iter is not None and iteration >= self.max_iter - 1
        is_due = force or (self.period > 0 and (iteration + 1) % self.period == 0)
        names = []
        # The final file comes first.  If a kill comes between the two, only a second name of the
        # same content is missing.
        if is_last and self.period >= 0:
            names.append(f"{self.file_prefix}_final")
        if is_due:
            names.append(f"{self.file_prefix}_{iteration:07d}")
        if names:
            self._save_as(names, iteration, **kwargs)
        if is_due:
            self._delete_old(iteration)

    def save(self, name: str, **kwargs: Any) -> None:
        """Save now.  Collective."""
        self.checkpointer.save(name, **kwargs)

    def _save_as(self, names: list[str], iteration: int, **kwargs: Any) -> None:
        """Save one file that has all these names; the first one is tagged."""
        source = self.checkpointer.resumed_file(iteration)
        if not source:
            self.save(names[0], iteration=iteration, **kwargs)
            source = os.path.join(self.checkpointer.save_dir, f"{names[0]}.pth")
        for name in names:
            is_there = name == os.path.basename(source).removesuffix(".pth")
            if not is_there:
                self.checkpointer.link(source, name, tag_checkpoint=name == names[0])

    def _delete_old(self, iteration: int) -> None:
        if not self.max_to_keep or not self.checkpointer.save_to_disk:
            return
        pattern = re.escape(self.file_prefix) + r"_(\d{7,})\.pth"
        numbers = {}
        for path in self.checkpointer.get_all_checkpoint_files():
            match = re.fullmatch(pattern, os.path.basename(path))
            if match and not self._stays(int(match[1])):
                numbers[path] = int(match[1])
        # Later iterations are left from before a resume from an earlier one: they go first.
        oldest_first = sorted(numbers, key=lambda path: (numbers[path] <= iteration, numbers[path]))
        for path in oldest_first[: -self.max_to_keep]:
            # A file that cannot be deleted does no harm.
            with contextlib.suppress(OSError):
                remove_checkpoint(path)

    def _stays(self, number: int) -> bool:
        return self.keep_period > 0 and (number + 1) % self.keep_period == 0
