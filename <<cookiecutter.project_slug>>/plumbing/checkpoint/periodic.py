import json
import logging
import math
import os
import re
from typing import Any

from plumbing import comm

from .checkpointer import Checkpointer
from .files import write_atomically


class PeriodicCheckpointer:
    """Saves ``model_0004999.pth`` and so on, and ``model_final.pth`` after the last iteration.

    Args:
        period: in iterations; 0: only the final one, negative: none.
        max_iter: without it there is no final one.
        max_to_keep: older numbered files on the disk are deleted; None keeps all.
    """

    def __init__(
        self,
        checkpointer: Checkpointer,
        period: int,
        max_iter: int | None = None,
        max_to_keep: int | None = None,
        file_prefix: str = "model",
    ) -> None:
        if max_to_keep is not None and max_to_keep < 1:
            raise ValueError(f"max_to_keep must be at least 1, or None to keep all: {max_to_keep}")
        self.checkpointer = checkpointer
        self.period = period
        self.max_iter = max_iter
        self.max_to_keep = max_to_keep
        self.file_prefix = file_prefix

    def step(self, iteration: int, **kwargs: Any) -> None:
        """Save if it is time to.  All ranks call it, after each iteration.

        Args:
            iteration: the one that has just ended; saved along with ``kwargs``.
        """
        if self.period > 0 and (iteration + 1) % self.period == 0:
            self.save(f"{self.file_prefix}_{iteration:07d}", iteration=iteration, **kwargs)
            self._delete_old(iteration)
        if self.period >= 0 and self.max_iter is not None and iteration >= self.max_iter - 1:
            self.save(f"{self.file_prefix}_final", iteration=iteration, **kwargs)

    def save(self, name: str, **kwargs: Any) -> None:
        """Save now.  All ranks call it."""
        self.checkpointer.save(name, **kwargs)

    def _delete_old(self, iteration: int) -> None:
        if self.max_to_keep is None or not self.checkpointer.save_to_disk:
            return
        pattern = re.compile(rf"{re.escape(self.file_prefix)}_(\d{{7,}})\.pth")
        found = {}
        for path in self.checkpointer.get_all_checkpoint_files():
            if match := pattern.fullmatch(os.path.basename(path)):
                found[path] = int(match[1])
        # Files of later iterations are left from before a resume: they are the oldest.
        oldest_first = sorted(found, key=lambda path: (found[path] <= iteration, found[path]))
        for path in oldest_first[: -self.max_to_keep]:
            try:
                os.remove(path)
            except OSError as error:
                self.checkpointer.logger.warning("Cannot delete an old checkpoint: %s", error)


class BestCheckpointer:
    """Saves ``model_best.pth`` when an evaluation is better than all before; never resumed from.

    The best value stands in a json file beside it and so outlives the run.

    Args:
        val_metric: name in the results, such as "digits_test/accuracy"; "" saves nothing.
        mode: "max" or "min", the better direction.
    """

    def __init__(
        self,
        checkpointer: Checkpointer,
        val_metric: str,
        mode: str = "max",
        file_prefix: str = "model_best",
    ) -> None:
        self.checkpointer = checkpointer
        self.val_metric = val_metric
        self.sign = {"max": 1, "min": -1}[mode]
        self.file_prefix = file_prefix
        self.logger = logging.getLogger("plumbing.checkpoint")
        self._path = os.path.join(checkpointer.save_dir, f"{file_prefix}.json")
        self.best = comm.from_main_process(self._read).get(val_metric)

    def step(self, iteration: int, results: dict[str, float]) -> None:
        """Save if the metric is better.  All ranks call it, with the same results."""
        if not self.val_metric:
            return
        value = results.get(self.val_metric)
        if value is None:
            self.logger.warning("No %s in the results: %s", self.val_metric, ", ".join(results))
            return
        better = self.best is None or self.sign * value > self.sign * self.best
        if not (math.isfinite(value) and better):
            return
        self.logger.info("Best %s so far: %.5g", self.val_metric, value)
        self.best = value
        record = {self.val_metric: value, "iteration": iteration}
        self.checkpointer.save(self.file_prefix, tag_checkpoint=False, **record)
        if self.checkpointer.save_to_disk:
            text = json.dumps(record).encode()
            write_atomically(self._path, lambda file: file.write(text))

    def _read(self) -> dict:
        try:
            with open(self._path) as file:
                return json.load(file)
        except (OSError, ValueError):
            return {}
