import contextlib
import json
import math
import os
import re
from typing import Any

from plumbing import comm

from .checkpointer import Checkpointer
from .files import write_atomically


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
        self.checkpointer = checkpointer
        self.period, self.max_iter = period, max_iter
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


class BestCheckpointer:
    """Saves model_best.pth when ``val_metric`` ("": none) beats all before; never resumed from.

    The best value stands beside it, in a json file, and so holds after a resume.
    """

    def __init__(
        self, checkpointer: Checkpointer, val_metric: str, mode: str = "max",
        file_prefix: str = "model_best",
    ) -> None:  # fmt: skip
        self.checkpointer, self.val_metric = checkpointer, val_metric
        self.sign = {"max": 1, "min": -1}[mode]
        self.file_prefix = file_prefix
        self._path = os.path.join(checkpointer.save_dir, f"{file_prefix}.json")
        self.best = comm.from_main_process(self._read)

    def step(self, iteration: int, results: dict[str, float]) -> None:
        """Save if the metric is better; all ranks call it, the main one decides."""
        logger, value = self.checkpointer.logger, comm.all_gather(results.get(self.val_metric))[0]
        if self.val_metric and value is None:
            logger.warning("No %s among the results: %s", self.val_metric, ", ".join(results))
        worst = -self.sign * math.inf if self.best is None else self.best
        if value is None or not math.isfinite(value) or self.sign * value <= self.sign * worst:
            return
        self.best = float(value)
        logger.info("Best %s so far: %.5g", self.val_metric, self.best)
        record = {self.val_metric: self.best, "iteration": iteration}
        self.checkpointer.save(self.file_prefix, tag_checkpoint=False, **record)
        if self.checkpointer.save_to_disk:
            write_atomically(self._path, lambda file: file.write(json.dumps(record).encode()))

    def _read(self) -> float | None:
        unusable = OSError, ValueError, TypeError, KeyError
        with contextlib.suppress(*unusable), open(self._path) as file:
            return float(json.load(file)[self.val_metric])
