import contextlib
import math
from collections import deque
from collections.abc import Iterator
from typing import Any

import torch

from plumbing.comm import NonFiniteError

from .history import HistoryBuffer
from .reading import read_tensors

_STACK = []  # the storages of the open `with` blocks, the innermost last
_HISTORY_LENGTH = 1000  # values kept of each scalar: memory is bounded
_WAITING_LENGTH = 100_000  # tensors that may wait, should nothing ever be due
_IMAGES_LENGTH = 100  # images, and histograms, that may wait for a writer; the oldest go first


def get_event_storage() -> "EventStorage":
    """The storage of the innermost open ``with EventStorage(...)``."""
    assert _STACK, "get_event_storage() works only inside a `with EventStorage(...)` block"
    return _STACK[-1]


def has_event_storage() -> bool:
    return bool(_STACK)


class EventStorage:
    """Keeps what is put, under the iteration ``iter``; inside a ``with`` it is the current storage.

    Several puts of one name in one iteration (micro-batches) are averaged.  Tensors stay unread on
    their device until ``reduce``, or until someone asks for a value and gets this rank's own;
    numbers are this rank's own always.
    """

    def __init__(self, start_iter: int = 0) -> None:
        self.iter = start_iter
        self._prefix = ""
        self._histories: dict[str, HistoryBuffer] = {}
        self._hints: dict[str, bool] = {}
        self._puts: dict[str, tuple[int, float, int]] = {}  # newest iteration, sum, count
        self._waiting: list[tuple[str, int, torch.Tensor]] = []
        self._num_read = 0  # so many of the waiting stand in the histories with this rank's value
        self._vis_data = deque(maxlen=_IMAGES_LENGTH)
        self._histogram_data = deque(maxlen=_IMAGES_LENGTH)

    @property
    def iteration(self) -> int:
        return self.iter

    def step(self) -> None:
        self.iter += 1

    def __enter__(self) -> "EventStorage":
        _STACK.append(self)
        return self

    def __exit__(self, *_: Any) -> None:
        _STACK.pop()

    @contextlib.contextmanager
    def name_scope(self, name: str) -> Iterator[None]:
        """Inside, all names get the prefix ``name/``; scopes nest."""
        outer = self._prefix
        self._prefix = f"{outer}{name.rstrip('/')}/"
        try:
            yield
        finally:
            self._prefix = outer

    def put_scalar(
        self, name: str, value: Any, smoothing_hint: bool = True, cur_iter: int | None = None
    ) -> None:
        """Keep a number or a tensor of one element; never waits for the device.

        Args:
            smoothing_hint: writers show the median of a window, otherwise the newest value.
            cur_iter: the iteration it belongs to, by default ``iter``.
        Raises:
            ValueError: ``smoothing_hint`` changed, or the tensor has more than one element.
        """
        name = self._prefix + name
        if self._hints.setdefault(name, smoothing_hint) != smoothing_hint:
            raise ValueError(f"scalar {name}: smoothing_hint was {not smoothing_hint} before")
        iteration = self.iter if cur_iter is None else cur_iter
        if not isinstance(value, torch.Tensor):
            self._record(name, float(value), iteration)
            return
        if value.numel() != 1:
            raise ValueError(f"scalar {name}: needs one element, got shape {tuple(value.shape)}")
        # What autograd made is fresh; another tensor may be a buffer that its owner changes later.
        value = value.detach() if value.requires_grad else value.clone()
        self._waiting.append((name, iteration, value))
        if len(self._waiting) >= _WAITING_LENGTH:
            self.reduce()

    def put_scalars(
        self,
        scalars: dict[str, Any] | None = None,
        /,
        *,
        smoothing_hint: bool = True,
        cur_iter: int | None = None,
        **kwargs: Any,
    ) -> None:
        """``put_scalar`` for every item of a dict, whatever its name, and every keyword."""
        for name, value in (scalars or {}).items():
            self.put_scalar(name, value, smoothing_hint, cur_iter)
        for name, value in kwargs.items():
            self.put_scalar(name, value, smoothing_hint, cur_iter)

    def put_image(self, img_name: str, img_tensor: torch.Tensor) -> None:
        """Keep an image for the writers: (C, H, W), RGB or grey, uint8 or float in [0, 1]."""
        self._vis_data.append((self._prefix + img_name, img_tensor, self.iter))

    def put_histogram(self, hist_name: str, hist_tensor: torch.Tensor, bins: int = 1000) -> None:
        """Keep the histogram of a tensor of any shape and dtype, without non-finite elements.

        Reads the tensor: on a GPU this waits.
        """
        values = hist_tensor.detach().float().flatten().cpu()
        values = values[values.isfinite()]
        if len(values) == 0:
            return
        low, high = values.min().item(), values.max().item()
        margin = 0.0 if high > low else 1e-3 * max(1.0, abs(low))
        counts, edges = torch.histogram(values, bins, range=(low - margin, high + margin))
        self._histogram_data.append(
            {
                "tag": self._prefix + hist_name,
                "min": low,
                "max": high,
                "num": len(values),
                "sum": values.sum().item(),
                "sum_squares": values.square().sum().item(),
                "bucket_limits": edges[1:].tolist(),
                "bucket_counts": counts.tolist(),
                "global_step": self.iter,
            }
        )

    def clear_images(self) -> None:
        self._vis_data.clear()

    def clear_histograms(self) -> None:
        self._histogram_data.clear()

    def history(self, name: str) -> HistoryBuffer:
        """Raises a KeyError for a name that was never put."""
        return self.histories()[name]

    def histories(self) -> dict[str, HistoryBuffer]:
        self._read()
        return self._histories

    def latest(self) -> dict[str, tuple[float, int]]:
        """{name: (newest value, its iteration)}"""
        return {name: (h.latest(), h.latest_iteration()) for name, h in self.histories().items()}

    def latest_with_smoothing_hint(self, window_size: int = 20) -> dict[str, tuple[float, int]]:
        """Like ``latest``, but a name put with the hint gets its median over a window."""
        latest = self.latest()
        for name in latest:
            if self._hints[name]:
                median = self._histories[name].median(self.count_samples(name, window_size))
                latest[name] = (median, latest[name][1])
        return latest

    def count_samples(self, name: str, window_size: int = 20) -> int:
        """Number of values in the ``window_size`` iterations that end with the newest value."""
        if window_size < 1:
            raise ValueError(f"window_size must be at least 1, got {window_size}")
        history = self.histories().get(name, HistoryBuffer())
        return history.count_since(history.latest_iteration() - window_size)

    def smoothing_hints(self) -> dict[str, bool]:
        return self._hints

    def reduce(self, grad_may_overflow: bool = False) -> None:
        """Read all that waits: the mean over the ranks, of ``*_time`` the maximum.  Collective.

        Args:
            grad_may_overflow: a non-finite grad_norm is no error (float16: its step was skipped).
        Raises:
            NonFiniteError: a loss or grad_norm of some rank is not finite; on every rank.
            ValueError: the ranks put different tensors.
        """
        self._forget_local_values()
        waiting, self._waiting = self._waiting, []
        ranks = read_tensors(waiting, all_ranks=True)
        for (name, iteration, _), *values in zip(waiting, *ranks):
            slowest = name.endswith("_time")
            self._record(name, max(values) if slowest else sum(values) / len(values), iteration)
        for rank, values in enumerate(ranks):
            if not math.isfinite(sum(values)):
                self._require_finite(waiting, rank, values, grad_may_overflow)

    def _read(self) -> None:
        unread = self._waiting[self._num_read :]
        if unread:
            for (name, iteration, _), value in zip(unread, read_tensors(unread)[0]):
                self._record(name, value, iteration)
            self._num_read = len(self._waiting)

    def _forget_local_values(self) -> None:
        for name, iteration, _ in self._waiting[: self._num_read]:
            self._puts.pop(name, None)
            while self._histories[name].latest_iteration() >= iteration:
                self._histories[name].pop()
        self._num_read = 0

    def _record(self, name: str, value: float, iteration: int) -> None:
        history = self._histories.get(name)
        if history is None:
            history = self._histories[name] = HistoryBuffer(_HISTORY_LENGTH)
        newest, total, count = self._puts.get(name, (None, 0.0, 0))
        if newest != iteration:
            total, count = 0.0, 0
        if history.latest_iteration() == iteration:
            history.pop()
        self._puts[name] = iteration, total + value, count + 1
        history.update((total + value) / (count + 1), iteration)

    def _require_finite(self, waiting: list, rank: int, values: list, overflow: bool) -> None:
        def is_bad(name: str, value: float) -> bool:
            checked = "loss" in name or ("grad_norm" in name and not overflow)
            return checked and not math.isfinite(value)

        bad = [put[1] for put, value in zip(waiting, values) if is_bad(put[0], value)]
        if bad:
            first = min(bad)
            at_first = {put[0]: v for put, v in zip(waiting, values) if put[1] == first}
            lr = [v for v, i in self.histories().get("lr", HistoryBuffer()).values() if i == first]
            listing = ", ".join(f"{name} {value:.4g}" for name, value in at_first.items())
            raise NonFiniteError(
                f"not finite at iteration {first} on rank {rank}: {listing}, lr {lr}.  The newest"
                " checkpoint is good: resume from it with a lower SOLVER.BASE_LR or a"
                " SOLVER.CLIP_GRAD_NORM, or look at the data of that iteration"
            )

    def state_dict(self) -> dict:
        histories = {name: history.state_dict() for name, history in self.histories().items()}
        return {"histories": histories, "smoothing_hints": dict(self._hints)}

    def load_state_dict(self, state: dict) -> None:
        self._hints = dict(state["smoothing_hints"])
        self._histories = {name: HistoryBuffer(_HISTORY_LENGTH) for name in state["histories"]}
        for name, history in self._histories.items():
            history.load_state_dict(state["histories"][name])
