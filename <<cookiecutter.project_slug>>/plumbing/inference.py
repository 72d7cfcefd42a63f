"""The loop of an evaluation: one pass of the model over a test set, for all its evaluators."""

import contextlib
import datetime
import logging
import math
import operator
import time
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

from plumbing.buffers import averaged_buffers
from plumbing.errors import StoppedBySignal
from plumbing.events import EventStorage
from plumbing.preemption import current_request

logger = logging.getLogger(__name__)

_LOG_SECONDS = 5.0  # between two lines about the progress
_WARMUP_BATCHES = 5  # at the start, which do not count in the seconds per batch
_TABLE_COLUMNS = 3  # metrics side by side


class DatasetEvaluator:
    """Judges a model on a test set; the protocol is that of detectron2's DatasetEvaluator.

    ``reset`` is called once, then ``process`` for each batch of this rank, then ``evaluate``.
    Keep in ``process`` what is needed as tensors on the device: to read them there (``item()``,
    ``cpu()``) would make a GPU wait.  The ranks communicate in ``evaluate``, see plumbing.comm.
    """

    def reset(self) -> None:
        """Forget all batches."""

    def process(self, inputs: Any, outputs: Any) -> None:
        """Look at a batch and at the predictions of the model for it.

        Args:
            inputs: a batch of this rank, which may be empty (its tensors have length 0).
            outputs: what the model returned for it.
        """

    def evaluate(self) -> dict | None:
        """Return {metric: number}, which may be nested, or None.  Called on all ranks.

        The name of a metric of a single class has a "-" in it, such as "accuracy-7": a table shows
        it last.  Leave out a metric that is not defined, such as the accuracy of no samples.
        """
        raise NotImplementedError


def inference_on_dataset(
    model: nn.Module,
    data_loader: Iterable,
    evaluators: DatasetEvaluator | list[DatasetEvaluator],
    name: str = "",
) -> dict[str, float]:
    """Show each batch, and the predictions of the model for it, to all evaluators.

    Each batch passes through the model once, in evaluation mode and without gradients.  Nothing is
    read from the device between two batches.  Collective.

    Args:
        data_loader: has the same number of batches on all ranks; see loading.InferenceLoader.
        evaluators: one, or several whose metrics have different names.
        name: of the test set, for the log and for errors.

    Returns:
        {metric: number}; the names of nested metrics are joined by "/".  On ranks on which an
        evaluator returns None its metrics are missing.

    Raises:
        ValueError: two evaluators give the same metric, or one gives something else than numbers.
        StoppedBySignal: a signal asked the run to stop; all ranks raise it after the same batch.
    """
    if isinstance(evaluators, DatasetEvaluator):
        evaluators = [evaluators]
    timer = InferenceTimer(name, operator.length_hint(data_loader, 0))
    for evaluator in evaluators:
        evaluator.reset()

    with inference_context(model):
        for inputs in timer.timed(data_loader):
            outputs = model(inputs)
            for evaluator in evaluators:
                evaluator.process(inputs, outputs)
            _leave_if_asked(name)

    # Outside of the context, so that an evaluator puts its images into the storage of the training.
    results: dict[str, float] = {}
    for evaluator in evaluators:
        for metric, value in _flattened(evaluator.evaluate(), name):
            if metric in results:
                raise ValueError(f"{name}: two evaluators give {metric}: rename one of them")
            results[metric] = _number(value, metric, name)
    timer.log_total(getattr(data_loader, "num_samples", None))
    return results


def _leave_if_asked(name: str) -> None:
    # The run was saved before the evaluation, so nothing is lost.  Without this, a launcher that
    # waits for 30 s after its signal would kill a longer evaluation.
    request = current_request()
    if request is not None and request.agreed():
        raise StoppedBySignal(f"a signal ended the evaluation of {name}; --resume begins it again")


def _flattened(results: Any, name: str, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (metric, value) of nested dicts; the names are joined by "/"."""
    if results is None:
        return
    if not isinstance(results, dict):
        raise ValueError(f"{name}: an evaluator must return a dict or None, not {results!r}")
    for key, value in results.items():
        if isinstance(value, dict):
            yield from _flattened(value, name, f"{prefix}{key}/")
        else:
            yield f"{prefix}{key}", value


def _number(value: Any, metric: str, name: str) -> float:
    try:
        # float("1.0") is a number, but an evaluator that returns strings is a mistake.
        if isinstance(value, str):
            raise TypeError
        return float(value)
    except (TypeError, ValueError, RuntimeError):
        raise ValueError(f"{name}: {metric} is not a number: {value!r}") from None


@contextlib.contextmanager
def inference_context(model: nn.Module) -> Iterator[None]:
    """Inside, the model is in evaluation mode and computes no gradients.  Collective.

    Its floating point buffers (statistics of batch norm) are averaged over the ranks, so that all
    ranks evaluate the same model.  What the model puts into the storage is dropped.  Afterwards
    everything is as before; each module has its own mode again, also after an error.
    """
    # model.train() would also set modules that were frozen by eval().
    modes = [(module, module.training) for module in model.modules()]
    try:
        model.eval()
        with torch.no_grad(), averaged_buffers(model), EventStorage():
            yield
    finally:
        for module, training in modes:
            module.training = training


class InferenceTimer:
    """Logs how an evaluation proceeds, every 5 s and at the end; reads nothing from a device.

    On a GPU the seconds of a batch last until its work was handed over; the seconds at the end,
    after the evaluators have read their results, are those of everything.

    Args:
        name: of the test set.
        num_batches: of this rank; 0 means unknown.
    """

    def __init__(self, name: str, num_batches: int = 0) -> None:
        self.name = name
        self.num_batches = num_batches
        self.num_done = 0
        self._num_warmup = _WARMUP_BATCHES
        if num_batches > 0:
            self._num_warmup = min(_WARMUP_BATCHES, num_batches - 1)
        # Since the end of the warm-up:
        self._num_timed = 0
        self._data_seconds = 0.0
        self._compute_seconds = 0.0
        self._start = time.perf_counter()
        self._last_logged = self._start

    def timed(self, data_loader: Iterable) -> Iterator[Any]:
        """Pass on the batches; "compute" is the time until the next one is wanted."""
        start = time.perf_counter()
        for data in data_loader:
            loaded = time.perf_counter()
            yield data
            end = time.perf_counter()
            self.num_done += 1
            self._num_timed += 1
            self._data_seconds += loaded - start
            self._compute_seconds += end - loaded
            start = end
            if end - self._last_logged >= _LOG_SECONDS:
                self._last_logged = end
                self._log_progress()
            if self.num_done == self._num_warmup:
                self._num_timed = 0
                self._data_seconds = 0.0
                self._compute_seconds = 0.0

    def _log_progress(self) -> None:
        data = self._data_seconds / self._num_timed
        compute = self._compute_seconds / self._num_timed
        total = data + compute
        batches = f"batch {self.num_done}"
        eta = ""
        if self.num_batches > 0:
            batches += f" of {self.num_batches}"
            seconds = int((self.num_batches - self.num_done) * total)
            eta = f"  eta: {datetime.timedelta(seconds=seconds)}"
        logger.info(
            "Evaluating on %s: %s  data: %.4f s/batch  compute: %.4f s/batch"
            "  total: %.4f s/batch%s",
            self.name,
            batches,
            data,
            compute,
            total,
            eta,
        )

    def log_total(self, num_samples: int | None = None) -> None:
        """Log the time of the whole evaluation.

        Args:
            num_samples: of all ranks; None if the loader does not know it.
        """
        seconds = time.perf_counter() - self._start
        if num_samples is None:
            logger.info("Evaluated %d batches of %s in %.2f s", self.num_done, self.name, seconds)
        else:
            logger.info(
                "Evaluated %d samples of %s in %.2f s, %.1f samples/s",
                num_samples,
                self.name,
                seconds,
                num_samples / seconds,
            )


def log_results(name: str, results: dict[str, float]) -> None:
    """Log the metrics of a test set, as a table and as comma-separated lines to copy.

    The lines are those of detectron2's print_csv_format, without metrics of single classes.
    """
    main_results = {metric: value for metric, value in results.items() if "-" not in metric}
    logger.info("Results on %s:\n%s", name, _table(results) or "none")
    logger.info("copypaste: Task: %s", name)
    logger.info("copypaste: %s", ",".join(main_results))
    logger.info("copypaste: %s", ",".join(f"{value:.4f}" for value in main_results.values()))


def _table(results: dict[str, float]) -> str:
    """Format metrics as "| accuracy | 0.9900 | ..." in aligned columns, to be read row by row."""
    metrics = sorted(results, key=lambda metric: "-" in metric)  # those of single classes last
    cells = [(metric, _shown(results[metric])) for metric in metrics]
    rows = [cells[i : i + _TABLE_COLUMNS] for i in range(0, len(cells), _TABLE_COLUMNS)]
    # Empty cells complete the last row.
    if len(rows) > 1:
        missing = _TABLE_COLUMNS - len(rows[-1])
        rows[-1] = rows[-1] + [("", "")] * missing

    lines = [""] * len(rows)
    for column in zip(*rows):
        name_width = max(len(metric) for metric, _ in column)
        value_width = max(len(value) for _, value in column)
        for number, (metric, value) in enumerate(column):
            lines[number] += f"| {metric:<{name_width}} | {value:>{value_width}} "
    return "\n".join(f"{line}|" for line in lines)


def _shown(value: float) -> str:
    is_plain = value == 0 or 1e-3 <= abs(value) < 1e6 or not math.isfinite(value)
    return f"{value:.4f}" if is_plain else f"{value:.3e}"
