"""Saves the model that did best in an evaluation."""

import contextlib
import json
import math
import os
from typing import Any

from plumbing import comm
from plumbing.errors import SettingsError
from plumbing.files import write_atomically

from .archive import UnsafeFileError, read_file
from .checkpointer import Checkpointer

_SIGNS = {"max": 1, "min": -1}


class BestCheckpointer:
    """Save model_best.pth whenever a metric is better than ever before.

    The best value is in that file, and beside it in a json file, so that it holds after a resume.
    A resume begins with the best file only if there is no other.

    Args:
        checkpointer: writes the file.
        val_metric: name of the metric among the results; "" saves nothing.
        mode: "max" if a larger value is better, "min" if a smaller one is.
        file_prefix: the name of both files.
        kwargs: what else to keep in the file.
    """

    def __init__(
        self,
        checkpointer: Checkpointer,
        val_metric: str,
        mode: str = "max",
        file_prefix: str = "model_best",
        **kwargs: Any,
    ) -> None:
        self.checkpointer = checkpointer
        self.val_metric = val_metric
        self.sign = _SIGNS[mode]
        self.file_prefix = file_prefix
        self.kwargs = kwargs
        self._has_warned = False
        self._path = os.path.join(checkpointer.save_dir, f"{file_prefix}.json")
        self.best: float | None = None
        if val_metric and checkpointer.save_dir:
            self.best = comm.from_main_process(self._read_best)

    def step(self, iteration: int, results: dict[str, float] | None) -> None:
        """Save if the metric is better than ever before; rank 0 decides.  Collective."""
        if not self.val_metric:
            return
        value = comm.all_gather((results or {}).get(self.val_metric))[0]
        if value is None:
            self._warn_once(results or {})
            return
        # A value that is not finite, such as NaN, is never the best one.
        if not math.isfinite(value):
            return
        if self.best is not None and self.sign * value <= self.sign * self.best:
            return
        self.best = float(value)
        self.checkpointer.logger.info("Best %s so far: %.5g", self.val_metric, self.best)
        record = {self.val_metric: self.best, "iteration": iteration}
        self.checkpointer.save(self.file_prefix, tag_checkpoint=False, **record, **self.kwargs)
        # If a kill comes between the two files, the json file has the value before, so the same
        # evaluation, which is repeated then, is the best one again.
        if self.checkpointer.save_dir and self.checkpointer.save_to_disk:
            write_atomically(self._path, lambda file: file.write(json.dumps(record).encode()))

    def _warn_once(self, results: dict) -> None:
        if not self._has_warned:
            self._has_warned = True
            self.checkpointer.logger.warning(
                "There is no %s among the results (%s), so no best model is saved",
                self.val_metric,
                ", ".join(results),
            )

    def _read_best(self) -> float | None:
        """Read the best value of an earlier session; None if there is none."""
        checkpoint = self._path.removesuffix(".json") + ".pth"
        unusable = (SettingsError, OSError, ValueError, TypeError, KeyError, RecursionError)
        try:
            # The tensors, which are nearly all of the file, are not needed.
            best = read_file(checkpoint, check_tensors=False).content[self.val_metric]
            with contextlib.suppress(*unusable), open(self._path) as file:
                best = json.load(file)[self.val_metric]
            return float(best)
        except UnsafeFileError:
            raise
        except unusable as error:
            if os.path.exists(checkpoint) or os.path.exists(self._path):
                self.checkpointer.logger.warning("The best value so far is not known: %s", error)
            return None
