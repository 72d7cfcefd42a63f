import contextlib
import math
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.compiler import is_dynamo_compiling

from plumbing import comm

from .history import HistoryBuffer
from .media import Medium, copied_image, make_histogram
from .reduction import (
    average_over_ranks,
    gather_numbers,
    list_values,
    read,
    require_finite_losses,
)
from .scalar import Scalar, checked_number, merged, require_scalar, without_dimensions

_WAITING_LENGTH = 100_000  # tensors that may wait, should nothing ever be due
_MEDIA_LENGTH = 1000  # images, and histograms, that may wait for a writer

_CURRENT_STORAGE_STACK: list["EventStorage"] = []  # of the open `with` blocks, the innermost last


def get_event_storage() -> "EventStorage":
    """Return the storage of the innermost open ``with EventStorage(...)`` block."""
    assert _CURRENT_STORAGE_STACK, (
        "get_event_storage() works only inside a `with EventStorage(...)` block"
    )
    return _CURRENT_STORAGE_STACK[-1]


def has_event_storage() -> bool:
    return bool(_CURRENT_STORAGE_STACK)


# The way of a value.
#
# 1. put_scalar: a number goes into the history of its name at once.  A tensor is copied on its
#    device and waits unread, so that the loop never waits for a GPU.
# 2. reduce, which all ranks call when something is due: reads what waits, averages it over the
#    ranks with one message, checks the losses, and records everything in the histories.
# 3. The writers of rank 0 then find numbers only.


class EventStorage:
    """Keeps what is put, under the iteration ``iter``; inside a ``with`` it is the current storage.

    Several puts of a name in one iteration are averaged.  Numbers are this rank's own.  Tensors
    stay unread until ``reduce`` averages them over the ranks.

    Attributes:
        iter: the current iteration; the loop sets it.
        start_iter: the first iteration of this session, also after ``load_state_dict``.
    """

    def __init__(self, start_iter: int = 0) -> None:
        self.iter = start_iter
        self.start_iter = start_iter
        self._prefix = ""
        self._scalars: dict[str, Scalar] = {}
        self._num_waiting = 0  # tensors that ``reduce`` has not seen
        # Only rank 0 has writers.  detectron2's writers know these two names.
        length = _MEDIA_LENGTH if comm.is_main_process() else 0
        self._vis_data: deque[Medium] = deque(maxlen=length)
        self._histograms: deque[Medium] = deque(maxlen=length)

    @property
    def iteration(self) -> int:
        return self.iter

    def step(self) -> None:
        """Go to the next iteration."""
        self.iter += 1

    def __enter__(self) -> "EventStorage":
        _CURRENT_STORAGE_STACK.append(self)
        return self

    def __exit__(self, *_: Any) -> None:
        _CURRENT_STORAGE_STACK.pop()

    @contextlib.contextmanager
    def name_scope(self, name: str) -> Iterator[None]:
        """Give all names inside the prefix ``name/``; scopes nest."""
        outer = self._prefix
        self._prefix = f"{outer}{name.rstrip('/')}/"
        try:
            yield
        finally:
            self._prefix = outer

    # Scalars: what goes in

    def put_scalar(
        self, name: str, value: Any, smoothing_hint: bool = True, cur_iter: int | None = None
    ) -> None:
        """Keep a number, or a tensor of one element; a tensor is not read, so nothing waits.

        Args:
            name: all ranks must put the same tensors in the same order.
            smoothing_hint: whether writers show a median instead of the newest value; the same in
                each put of a name.
            cur_iter: the iteration, by default ``iter``.
        """
        # In a compiled model: traced, the lists below would be compiled anew in each iteration.
        if is_dynamo_compiling():
            torch.compiler.disable(self.put_scalar)(name, value, smoothing_hint, cur_iter)
            return
        iteration = self.iter if cur_iter is None else cur_iter
        self._put(self._prefix + name, value, smoothing_hint, iteration)

    def _put(self, name: str, value: Any, smoothing_hint: bool, iteration: int) -> None:
        scalar = self._scalars.get(name)
        if scalar is None or scalar.smoothing_hint != smoothing_hint:
            scalar = self._new_scalar(name, value, smoothing_hint)
        if isinstance(value, torch.Tensor):
            if value.ndim > 0:
                value = without_dimensions(name, value)
            scalar.waiting_values.append(_kept(value))
            scalar.waiting_iterations.append(iteration)
            self._num_waiting += 1
            if self._num_waiting >= _WAITING_LENGTH:
                self.reduce()
        elif scalar.waiting_values:
            # It must come after the tensors of its name that were put earlier.
            scalar.waiting_values.append(checked_number(name, value))
            scalar.waiting_iterations.append(iteration)
        else:
            scalar.record(checked_number(name, value), iteration)

    def _new_scalar(self, name: str, value: Any, smoothing_hint: bool) -> Scalar:
        if name in self._scalars:
            raise ValueError(f"scalar {name}: smoothing_hint was {not smoothing_hint} before")
        require_scalar(name, value)
        self._scalars[name] = Scalar(name, smoothing_hint)
        return self._scalars[name]

    def put_scalars(
        self,
        scalars: Mapping[str, Any] | None = None,
        /,
        *,
        smoothing_hint: bool = True,
        cur_iter: int | None = None,
        **kwargs: Any,
    ) -> None:
        """Do what ``put_scalar`` does for each item of a dict and for each keyword.

        A name that is given twice is an error.  Scalars called smoothing_hint or cur_iter, as the
        two arguments are, can only be in the dict.

        Raises:
            TypeError: what is put is not a dict, for example what a model has predicted.
        """
        if is_dynamo_compiling():
            put_scalars = torch.compiler.disable(self.put_scalars)
            put_scalars(scalars, smoothing_hint=smoothing_hint, cur_iter=cur_iter, **kwargs)
            return
        if not isinstance(smoothing_hint, bool) or isinstance(cur_iter, torch.Tensor):
            raise TypeError("put_scalars: smoothing_hint and cur_iter are arguments; put a dict")
        if kwargs or not isinstance(scalars, (dict, Mapping)):  # dict first: it is quicker
            scalars = merged(scalars, kwargs)
        iteration = self.iter if cur_iter is None else cur_iter
        for name, value in scalars.items():
            self._put(self._prefix + name, value, smoothing_hint, iteration)

    def reduce(self) -> None:
        """Read what waits and average it over the ranks; ``*_time`` is the maximum.  Collective.

        Raises:
            NonFiniteError: a tensor with "loss" in its name is not finite on some rank.  All ranks
                raise it, after everything was recorded.
        """
        scalars = [scalar for scalar in self._scalars.values() if scalar.waiting_values]
        read(scalars)
        numbers = [scalar.waiting_numbers for scalar in scalars]
        ranks = [numbers]
        if comm.get_world_size() > 1:
            ranks = gather_numbers(scalars, numbers)
            numbers = average_over_ranks(scalars, ranks)
        values = []
        # One sum tells in nearly all cases that there is nothing to look for.
        if not math.isfinite(sum(sum(row) for rank in ranks for row in rank)):
            values = list_values(scalars, ranks)
        for scalar, row in zip(scalars, numbers):
            scalar.settle(row)
        self._num_waiting = 0
        if values:
            learning_rates = self._scalars["lr"].history.values() if "lr" in self._scalars else []
            require_finite_losses(values, learning_rates)

    # Scalars: what comes out.  Before ``reduce`` the values are this rank's own.

    def history(self, name: str) -> HistoryBuffer:
        """Return the history of one name; a KeyError if it was never put."""
        return self.histories()[name]

    def histories(self) -> dict[str, HistoryBuffer]:
        self._preview()
        return {name: scalar.history for name, scalar in self._scalars.items()}

    def _preview(self) -> None:
        """Record what waits in the histories, until ``reduce``."""
        scalars = [scalar for scalar in self._scalars.values() if scalar.waiting_values]
        if scalars:
            read(scalars)
            for scalar in scalars:
                scalar.preview()

    def latest(self) -> dict[str, tuple[float, int]]:
        """Return {name: (newest value, its iteration)}."""
        latest = {}
        for name, history in self.histories().items():
            latest[name] = (history.latest(), history.latest_iteration())
        return latest

    def latest_with_smoothing_hint(self, window_size: int = 20) -> dict[str, tuple[float, int]]:
        """Return the same, but the smoothed value of names that were put with the hint.

        It is the median over the last ``window_size`` iterations, without values that are not
        finite: a skipped step must not hide the others.
        """
        self._preview()
        latest = {}
        for name, scalar in self._scalars.items():
            history = scalar.history
            value = scalar.smoothed(window_size) if scalar.smoothing_hint else history.latest()
            latest[name] = (value, history.latest_iteration())
        return latest

    def count_samples(self, name: str, window_size: int = 20) -> int:
        """Return the number of values in the last ``window_size`` iterations before the newest."""
        return self.histories().get(name, HistoryBuffer()).count_samples(window_size)

    def smoothing_hints(self) -> dict[str, bool]:
        return {name: scalar.smoothing_hint for name, scalar in self._scalars.items()}

    # Images and histograms

    def put_image(self, img_name: str, img_tensor: torch.Tensor) -> None:
        """Keep an image for the writers: (C, H, W), RGB or grey, uint8 or float in [0, 1]."""
        if is_dynamo_compiling():
            torch.compiler.disable(self.put_image)(img_name, img_tensor)
        elif self._vis_data.maxlen > 0:
            name = self._prefix + img_name
            self._vis_data.append(Medium(name, copied_image(name, img_tensor), self.iter))

    def put_histogram(self, hist_name: str, hist_tensor: torch.Tensor, bins: int = 1000) -> None:
        """Keep the histogram of the finite elements of a tensor; on a GPU this waits for them.

        Of a complex tensor it shows the magnitudes, of a sparse tensor the elements that are
        stored.
        """
        if is_dynamo_compiling():
            torch.compiler.disable(self.put_histogram)(hist_name, hist_tensor, bins)
        elif self._histograms.maxlen > 0:
            name = self._prefix + hist_name
            histogram = make_histogram(name, hist_tensor, bins)
            if histogram is not None:
                self._histograms.append(Medium(name, histogram, self.iter))

    def clear_images(self) -> None:
        self._vis_data.clear()

    def clear_histograms(self) -> None:
        self._histograms.clear()

    # Checkpoints

    def state_dict(self) -> dict:
        histories = self.histories()
        return {
            "iter": self.iter,
            "histories": {name: history.state_dict() for name, history in histories.items()},
            "smoothing_hints": self.smoothing_hints(),
            # Those of the iteration that is saved: a resume hides it in the old event file.
            "images": [tuple(image) for image in self._vis_data],
            "histograms": [tuple(histogram) for histogram in self._histograms],
        }

    def load_state_dict(self, state: dict) -> None:
        """Restore everything; the next iteration is the first of this session."""
        self._num_waiting = 0
        self.iter = state["iter"]
        self.start_iter = self.iter + 1
        self._scalars = {}
        for name, history in state["histories"].items():
            scalar = Scalar(name, state["smoothing_hints"][name])
            scalar.load_history(history)
            self._scalars[name] = scalar
        self.clear_images()
        self.clear_histograms()
        self._vis_data.extend(Medium(*image) for image in state["images"])
        self._histograms.extend(Medium(*histogram) for histogram in state["histograms"])


def _kept(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor of the shape () that keeps the present value; nothing is read.

    The memory of a tensor may be written again: by its owner, by the optimizer, or by the next
    iteration of a compiled model that uses CUDA graphs.  So it is copied.  The losses on a CPU are
    not, since copies would double the time of a put: memory that an operation of autograd has just
    filled belongs to nobody else.  If it is changed in place nevertheless, ``read`` notices.
    """
    if not tensor.requires_grad:
        return tensor.clone()
    # Autograd counts the changes of a tensor in place, but the count has no public name.
    is_just_filled = not tensor.is_leaf and not tensor._is_view() and tensor._version == 0
    if is_just_filled and tensor.is_cpu:
        return tensor.detach()
    return tensor.detach().clone()
