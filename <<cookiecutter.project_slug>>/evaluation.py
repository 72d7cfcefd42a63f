"""How the model is judged.  An evaluator has reset, process, tensors and evaluate."""

import contextlib
import datetime
import json
import logging
import math
import operator
import os
import pickle
import time
from collections.abc import Mapping

import torch
from torch.nn import functional

from plumbing import comm
from plumbing.checkpoint.files import load_file, write_atomically
from plumbing.events import EventStorage, get_event_storage, has_event_storage

logger = logging.getLogger(__name__)

_LOG_SECONDS = 5.0  # between two lines on the progress
_WARMUP_BATCHES = 5  # at the start, left out of the seconds per batch
_FIXED_POINT = 2**24  # parts of 1: sums of integers do not depend on their order
_LARGEST = 2**20  # nats of one sample; more counts as infinite


def build_evaluators(cfg, name):
    """The evaluators of the test set called ``name``; each of their metrics has another name."""
    return [
        DigitsEvaluator(name, cfg.MODEL.NUM_CLASSES, cfg.MODEL.DEVICE),
        CalibrationEvaluator(cfg.MODEL.DEVICE),
    ]


class Evaluator:
    """Judges the predictions on one test set (compare detectron2's DatasetEvaluator).

    ``process`` keeps what it needs on the device and reads nothing there, so that it never waits.
    What ``tensors`` returns is sent for all evaluators in one message.  An evaluator whose results
    have another length on each rank returns none, and calls ``comm.gather`` in ``evaluate``.
    """

    def reset(self):
        """Forget all batches."""

    def process(self, data, predictions):
        """See a batch of data.py and what the model made of it."""

    def tensors(self):
        """What this rank has found: tensors whose shapes are the same on all ranks."""
        return ()

    def evaluate(self, *ranks):
        """{metric: number}, which may be nested, or None.  Called on all ranks.

        A metric that is undefined is left out; the name of one of a single class has a "-".

        Args:
            ranks: for each of ``tensors`` those of all ranks, (ranks, ...) on the CPU.
        """
        raise NotImplementedError


class DigitsEvaluator(Evaluator):
    """Accuracy in all and for each class.

    It also puts two images: the confusion matrix (rows: labels, columns: predictions), and a sheet
    of the ``num_shown`` digits that were misclassified with the most confidence.
    """

    def __init__(self, name, num_classes, device, num_shown=16):
        self.name, self.num_classes = name, num_classes
        self.device, self.num_shown = device, num_shown
        self.reset()

    def reset(self):
        num_pairs = self.num_classes**2
        self.counts = torch.zeros(num_pairs, dtype=torch.int64, device=self.device)
        self.confidence = torch.zeros(self.num_shown, device=self.device)  # when wrong; 0: none
        self.images = torch.zeros(self.num_shown, 8, 8, device=self.device)

    def process(self, data, predictions):
        """predictions: logits, (B, num_classes)."""
        labels, probabilities = data["labels"], predictions.float().softmax(dim=1)
        confidence, predicted = probabilities.max(dim=1)
        pairs = labels * self.num_classes + predicted
        self.counts.scatter_add_(0, pairs, torch.ones_like(pairs))
        wrong = torch.cat([self.confidence, confidence * (predicted != labels)])
        self.confidence, order = wrong.topk(self.num_shown)
        self.images = torch.cat([self.images, data["images"][:, 0]])[order]

    def tensors(self):
        return self.counts, self.confidence, self.images

    def evaluate(self, counts, confidence, images):
        counts = counts.sum(dim=0).view(self.num_classes, self.num_classes)
        confidence, order = confidence.flatten().topk(self.num_shown)
        images = images.flatten(0, 1)[order] * (confidence > 0).view(-1, 1, 1)
        if has_event_storage():
            self._put_images(counts, images)

        correct, totals = counts.diagonal().tolist(), counts.sum(dim=1).tolist()
        results = {f"accuracy-{i}": correct[i] / n for i, n in enumerate(totals) if n}
        return {"accuracy": sum(correct) / sum(totals), **results} if results else None

    def _put_images(self, counts, images):
        storage = get_event_storage()
        rates = (counts / counts.sum(dim=1, keepdim=True).clamp(min=1)).float()
        storage.put_image(f"{self.name}/confusion", _enlarge(rates, 16))
        if len(images):
            storage.put_image(f"{self.name}/misclassified", _enlarge(_sheet(images), 8))


class CalibrationEvaluator(Evaluator):
    """Whether the probabilities can be believed: two numbers that are better when lower.

    ``expected_calibration_error``, in [0, 1]: how far confidence and accuracy are apart, the mean
    over samples in ``num_bins`` bins of equal width (Guo et al., On Calibration of Modern Neural
    Networks, 2017).  ``negative_log_likelihood``: of the labels, in nats, the mean over samples;
    inf if that of a sample is not finite.

    Sums are in fixed point, of 2**-24 each: batches and ranks may be divided in any way.
    """

    def __init__(self, device, num_bins=15):
        self.device, self.num_bins = device, num_bins
        self.reset()

    def reset(self):
        self.bins = torch.zeros(3, self.num_bins, dtype=torch.int64, device=self.device)
        self.sums = torch.zeros(2, dtype=torch.int64, device=self.device)

    def process(self, data, predictions):
        """predictions: logits, (B, num_classes)."""
        labels, log_probabilities = data["labels"], predictions.float().log_softmax(dim=1)
        confidence, predicted = log_probabilities.exp().max(dim=1)
        confidence = confidence.double().nan_to_num()
        bins = ((confidence * self.num_bins).ceil().long() - 1).clamp(0, self.num_bins - 1)
        correct = (predicted == labels).long()
        values = torch.stack([torch.ones_like(correct), correct, _fixed_point(confidence)])
        self.bins.scatter_add_(1, bins.expand_as(values), values)

        losses = -log_probabilities.gather(1, labels[:, None]).double()
        finite = losses < _LARGEST  # not if NaN
        losses = _fixed_point(torch.where(finite, losses, 0.0))
        self.sums += torch.stack([losses.sum(), (~finite).sum()])

    def tensors(self):
        return self.bins, self.sums

    def evaluate(self, bins, sums):
        counts, correct, confidence = bins.sum(dim=0).tolist()
        losses, num_infinite = sums.sum(dim=0).tolist()
        if not sum(counts):
            return None
        gaps = [abs(one - other / _FIXED_POINT) for one, other in zip(correct, confidence)]
        return {
            "expected_calibration_error": math.fsum(gaps) / sum(counts),
            "negative_log_likelihood": (
                math.inf if num_infinite else losses / _FIXED_POINT / sum(counts)
            ),
        }


def inference_on_dataset(model, data_loader, evaluators, name="", autocast=None):
    """Show all evaluators this rank's batches and what the model predicts: {metric: number}.

    Each batch passes through the model once.  On all ranks the numbers are those of all; for them
    the ranks communicate twice at most: for the buffers of the model, and for the evaluators.
    Nothing is read from the device before the last batch.  Collective.

    Args:
        data_loader: one that has a ``len`` also tells how long it will take.
        name: of the test set, for the log and for errors.
        autocast: context of the forward pass.

    Raises:
        ValueError: two evaluators give the same metric, or one gives something that is no number.
    """
    autocast = contextlib.nullcontext() if autocast is None else autocast
    timer = InferenceTimer(name, operator.length_hint(data_loader, 0))
    for evaluator in evaluators:
        evaluator.reset()
    with inference_context(model):
        for data in timer.timed(data_loader):
            with autocast:
                predictions = model(data)
            for evaluator in evaluators:
                evaluator.process(data, predictions)

    # Outside of the context: images are put into the storage of the training.
    parts = [list(evaluator.tensors()) for evaluator in evaluators]
    ranks = iter(_gather([*sum(parts, []), torch.tensor(timer.num_samples)]))
    every = [e.evaluate(*(next(ranks) for _ in part)) for e, part in zip(evaluators, parts)]
    timer.log_total(int(next(ranks).sum()))
    return _merge(every, name)


class InferenceTimer:
    """Logs how an evaluation gets on: every 5 s, and at the end.  It reads nothing from a device.

    On a GPU the seconds of a batch are those until its work was handed over; the seconds of all,
    at the end, are true.  The first batches are left out, as in detectron2.

    Args:
        num_batches: how many there will be on this rank; 0: not known.
    """

    def __init__(self, name, num_batches=0):
        self.name, self.num_batches = name, num_batches
        self.num_done, self.num_samples = 0, 0
        self.data_seconds, self.compute_seconds, self._num_timed = 0.0, 0.0, 0
        self._start = self._logged = time.perf_counter()

    def timed(self, data_loader):
        """Hand on the batches; what is done with one until the next is wanted is "compute"."""
        warmup = min(_WARMUP_BATCHES, self.num_batches - 1) if self.num_batches else _WARMUP_BATCHES
        moment = time.perf_counter()
        for data in data_loader:
            fetched = time.perf_counter()
            self.num_samples += len(next(iter(data.values())))
            yield data
            done = time.perf_counter()
            self.num_done, self._num_timed = self.num_done + 1, self._num_timed + 1
            self.data_seconds += fetched - moment
            self.compute_seconds += done - fetched
            moment = done
            if done - self._logged >= _LOG_SECONDS:
                self._logged = done
                self._log_progress()
            if self.num_done == warmup:
                self.data_seconds, self.compute_seconds, self._num_timed = 0.0, 0.0, 0

    def _log_progress(self):
        data, compute = self.data_seconds / self._num_timed, self.compute_seconds / self._num_timed
        total, eta = "", ""
        if self.num_batches:
            seconds = int((self.num_batches - self.num_done) * (data + compute))
            total, eta = f" of {self.num_batches}", f"  eta: {datetime.timedelta(seconds=seconds)}"
        logger.info(
            "Evaluating on %s: batch %d%s  data: %.4f s/batch  compute: %.4f s/batch"
            "  total: %.4f s/batch%s",
            self.name, self.num_done, total, data, compute, data + compute, eta,
        )  # fmt: skip

    def log_total(self, num_samples):
        """num_samples: of all ranks."""
        seconds = time.perf_counter() - self._start
        logger.info(
            "Evaluated %d samples of %s in %.2f s, %.1f samples/s",
            num_samples, self.name, seconds, num_samples / seconds,
        )  # fmt: skip


@contextlib.contextmanager
def inference_context(model):
    """Evaluation mode, no gradients, buffers averaged over the ranks; all of it only inside.

    What the model puts into the storage meanwhile is dropped: it is not of the training.
    """
    modes = [(module, module.training) for module in model.modules()]
    try:
        model.eval()
        with torch.no_grad(), comm.averaged_buffers(model), EventStorage():
            yield
    finally:
        for module, training in modes:
            module.training = training


def _gather(tensors):
    """Each tensor of all ranks, (ranks, ...) on the CPU: one message, one copy.  Collective."""
    flat = [tensor.detach().contiguous().view(-1).view(torch.uint8) for tensor in tensors]
    ranks = comm.gather_tensor(torch.cat([part.to(flat[0].device) for part in flat])).cpu()
    parts = ranks.split([len(part) for part in flat], dim=1)
    parts = [part.reshape(-1).clone() for part in parts]  # beginning where any type may
    return [p.view(t.dtype).view(len(ranks), *t.shape) for p, t in zip(parts, tensors)]


def _merge(every, name):
    """One dict of numbers from those of the evaluators; nested names are joined by "/"."""
    merged = {}
    for results in every:
        for key, value in _flattened(results or {}, name):
            if key in merged:
                raise ValueError(f"{name}: two evaluators give {key}: rename one of them")
            try:
                merged[key] = float(value)
            except (TypeError, ValueError, RuntimeError):
                raise ValueError(f"{name}: {key} is no number: {value!r}") from None
    return merged


def build_best_checkpointer(cfg, checkpointer):
    return BestCheckpointer(checkpointer, cfg.TEST.BEST_METRIC, cfg.TEST.BEST_MODE, seed=cfg.SEED)


class BestCheckpointer:
    """Saves model_best.pth, with ``kwargs``, when ``val_metric`` ("": none) beats all before.

    The best value is in it, and beside it in a json file, and so holds after a resume.  That begins
    with this file only if there is no other.
    """

    def __init__(self, checkpointer, val_metric, mode="max", file_prefix="model_best", **kwargs):
        self.checkpointer, self.val_metric, self.kwargs = checkpointer, val_metric, kwargs
        self.sign = {"max": 1, "min": -1}[mode]
        self.file_prefix = file_prefix
        self._path = os.path.join(checkpointer.save_dir, f"{file_prefix}.json")
        self.best = comm.from_main_process(self._read)

    def step(self, iteration, results):
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
        self.checkpointer.save(self.file_prefix, tag_checkpoint=False, **record, **self.kwargs)
        if self.checkpointer.save_to_disk:
            write_atomically(self._path, lambda file: file.write(json.dumps(record).encode()))

    def _read(self):
        unusable = OSError, ValueError, TypeError, KeyError, OverflowError, RecursionError
        checkpoint = self._path.removesuffix(".json") + ".pth"
        try:
            best = load_file(checkpoint)[self.val_metric]
            # Saved first: a kill may have come before the other, and then the step comes again.
            with contextlib.suppress(*unusable), open(self._path) as file:
                best = json.load(file)[self.val_metric]
            return float(best)
        except unusable as error:  # a SettingsError is a ValueError
            if isinstance(error.__cause__, pickle.UnpicklingError):
                raise  # not damaged, but a file to look into
            if os.path.exists(checkpoint) or os.path.exists(self._path):
                self.checkpointer.logger.warning("The best before is not known: %s", error)
            return None


def _flattened(results, name):
    if not isinstance(results, Mapping):
        raise ValueError(f"{name}: an evaluator must give a dict or None, and gave {results!r}")
    for key, value in results.items():
        if isinstance(value, Mapping):
            yield from ((f"{key}/{inner}", v) for inner, v in _flattened(value, name))
        else:
            yield str(key), value


def _fixed_point(values):
    return (values * _FIXED_POINT).round().long()


def _sheet(images):
    """(N, H, W) -> (side * (H + 2), side * (W + 2)), a square of framed images, row by row."""
    side = math.isqrt(len(images) - 1) + 1
    framed = functional.pad(images.float(), (1, 1, 1, 1), value=0.3)
    framed = functional.pad(framed, (0, 0, 0, 0, 0, side**2 - len(images)))
    rows = framed.view(side, side, *framed.shape[1:]).transpose(1, 2)
    return rows.reshape(side * framed.shape[1], side * framed.shape[2])


def _enlarge(image, factor):
    """(H, W) -> (1, H * factor, W * factor)"""
    return torch.kron(image, torch.ones(factor, factor))[None]
