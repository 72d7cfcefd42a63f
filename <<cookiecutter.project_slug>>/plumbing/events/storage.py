import contextlib
import math
import zlib
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from itertools import repeat
from typing import Any

import torch

from plumbing import comm

from .history import HistoryBuffer

_STACK = []  # the storages of the open `with` blocks, the innermost last
_HISTORY_LENGTH = 1000  # values kept of each scalar: memory is bounded
_WAITING_LENGTH = 100_000  # tensors that may wait, should nothing ever be due
_MESSAGE_LENGTH = 1024  # float64 values that each rank sends in one collective
_ITEM = torch.Tensor.item


def get_event_storage() -> "EventStorage":
    """The storage of the innermost open ``with EventStorage(...)``."""
    assert _STACK, "get_event_storage() works only inside a `with EventStorage(...)` block"
    return _STACK[-1]


def has_event_storage() -> bool:
    return bool(_STACK)


class EventStorage:
    """Keeps what is put, under the iteration ``iter``; inside a ``with`` it is the current storage.

    Several puts of a name in one iteration are averaged.  Numbers are this rank's own.  Tensors
    stay unread until ``reduce`` averages them over the ranks; before, this rank's value is given.
    """

    def __init__(self, start_iter: int = 0) -> None:
        self.iter, self._prefix = start_iter, ""
        self._histories: dict[str, HistoryBuffer] = {}
        self._hints: dict[str, bool] = {}
        self._puts: dict[str, tuple[int, float, int]] = {}  # where several: iteration, sum, count
        self._waiting: list[tuple[str, int, list[torch.Tensor]]] = []
        self._read: list[float] = []  # this rank's values of the first ones of them
        self._finite: tuple[str, ...] = ("loss",)  # as in the last ``reduce``
        self._shown: tuple[int, dict] | None = None  # what writers got last, while it holds
        length = 1000 * comm.is_main_process()  # which alone has writers
        self._vis_data, self._histogram_data = deque(maxlen=length), deque(maxlen=length)

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
        """Keep a number or a tensor of one element, for ``iter`` or ``cur_iter``; never waits.

        With the hint, which must not change, writers show a median, otherwise the newest value.
        """
        iteration = self.iter if cur_iter is None else cur_iter
        if isinstance(value, torch.Tensor):
            if value.ndim > 0 and value.numel() != 1:
                raise ValueError(f"scalar {name}: needs one element, got {tuple(value.shape)}")
            # A result of autograd is fresh; memory of another tensor may be changed by its owner.
            value = value.detach().clone() if value.is_leaf or value._is_view() else value.detach()
            self._waiting.append((self._hint(name, smoothing_hint), iteration, [value]))
        else:
            self._record(self._hint(name, smoothing_hint), float(value), iteration)

    def put_norm(self, name: str, tensors: list[torch.Tensor]) -> None:
        """Like ``put_scalar`` of the norm of tensors of one element, which must not change."""
        self._waiting.append((self._hint(name, True), self.iter, tensors))

    def _hint(self, name: str, smoothing_hint: bool) -> str:
        name = self._prefix + name
        if self._hints.setdefault(name, smoothing_hint) != smoothing_hint:
            raise ValueError(f"scalar {name}: smoothing_hint was {not smoothing_hint} before")
        if len(self._waiting) >= _WAITING_LENGTH:
            self.reduce(self._finite)
        return name

    def put_scalars(
        self, scalars: Mapping[str, Any] | None = None, /, *,
        smoothing_hint: bool = True, cur_iter: int | None = None, **kwargs: Any,
    ) -> None:  # fmt: skip
        """``put_scalar`` for each item of a dict, whatever its name, and each keyword."""
        for name, value in ({**(scalars or {}), **kwargs} if kwargs else scalars or {}).items():
            self.put_scalar(name, value, smoothing_hint, cur_iter)

    def put_image(self, img_name: str, img_tensor: torch.Tensor) -> None:
        """Keep an image for the writers: (C, H, W), RGB or grey, uint8 or float in [0, 1]."""
        image = torch.as_tensor(img_tensor).detach().clone()  # its owner may change it
        self._vis_data.append((self._prefix + img_name, image, self.iter))

    def put_histogram(self, hist_name: str, hist_tensor: torch.Tensor, bins: int = 1000) -> None:
        """Keep the histogram of a tensor's finite elements; reads it, so on a GPU this waits."""
        values = torch.as_tensor(hist_tensor).detach().float().flatten().cpu()
        if len(values := values[values.isfinite()]):
            counts, edges = torch.histogram(values, bins)  # widens a range of one value itself
            limits = {"min": values.min().item(), "max": values.max().item(), "num": len(values)}
            sums = {"sum": values.sum().item(), "sum_squares": values.square().sum().item()}
            buckets = {"bucket_limits": edges[1:].tolist(), "bucket_counts": counts.tolist()}
            histogram = {**limits, **sums, **buckets}
            self._histogram_data.append((self._prefix + hist_name, histogram, self.iter))

    def clear_images(self) -> None:
        self._vis_data.clear()

    def clear_histograms(self) -> None:
        self._histogram_data.clear()

    def history(self, name: str) -> HistoryBuffer:
        """Raises a KeyError for a name that was never put."""
        return self.histories()[name]

    def histories(self) -> dict[str, HistoryBuffer]:
        if unread := self._waiting[len(self._read) :]:
            values = _read([tensors for _, _, tensors in unread])
            for (name, iteration, _), value in zip(unread, values):
                self._record(name, value, iteration)
            self._read += values
        return self._histories

    def latest(self) -> dict[str, tuple[float, int]]:
        """{name: (newest value, its iteration)}"""
        return {name: (h.latest(), h.latest_iteration()) for name, h in self.histories().items()}

    def latest_with_smoothing_hint(self, window_size: int = 20) -> dict[str, tuple[float, int]]:
        """Like ``latest``, but names put with the hint get their median over a window."""
        histories, latest = self.histories(), {}
        if self._shown is None or self._shown[0] != window_size:
            for name, history in histories.items():
                value = history.latest()
                if self._hints[name]:
                    value = history.median(history.count_samples(window_size))
                latest[name] = value, history.latest_iteration()
            self._shown = window_size, latest
        return dict(self._shown[1])

    def count_samples(self, name: str, window_size: int = 20) -> int:
        return self.histories().get(name, HistoryBuffer()).count_samples(window_size)

    def smoothing_hints(self) -> dict[str, bool]:
        return self._hints

    def reduce(self, finite: tuple[str, ...] = ("loss", "grad_norm")) -> None:
        """Read all that waits: means over the ranks, of ``*_time`` the maximum.  Collective.

        On all ranks it is a NonFiniteError if a name with a part in ``finite`` is not, on any rank.
        """
        self._finite = finite
        names, iterations, tensors = zip(*self._waiting) if self._waiting else ((), (), ())
        if comm.get_world_size() == 1:
            self.histories()
            ranks = [self._read]
        else:
            for name, iteration in zip(names[: len(self._read)], iterations):
                self._puts.pop(name, None)
                while self._histories[name].latest_iteration() >= iteration:
                    self._histories[name].pop()
            ranks = _gather(_read(tensors), names)
            for name, iteration, *values in zip(names, iterations, *ranks):
                slowest = name.endswith("_time")
                self._record(name, max(values) if slowest else sum(values) / len(values), iteration)
        self._waiting, self._read = [], []
        if not math.isfinite(sum(map(sum, ranks))):
            puts = [zip(iterations, names, repeat(rank), v) for rank, v in enumerate(ranks)]
            self._require_finite([put for rank in puts for put in rank], finite)

    def _require_finite(self, puts: list[tuple[int, str, int, float]], checked: tuple) -> None:
        if bad := [p for p in puts if not math.isfinite(p[3]) and any(c in p[1] for c in checked)]:
            # A loss comes before the gradients, which are bad on all ranks.
            first, _, rank, _ = min(bad, key=lambda put: (put[0], "loss" not in put[1]))
            rates = self._histories.get("lr", HistoryBuffer()).values()
            values = [(name, v) for i, name, r, v in puts if (i, r) == (first, rank)]
            values += [("lr", rate) for rate, i in rates if i == first]
            listing = ", ".join(f"{name} {value:.4g}" for name, value in values)
            raise comm.NonFiniteError(
                f"not finite at iteration {first} on rank {rank}: {listing}; last good checkpoint:"
                f" {comm.last_checkpoint}; lower SOLVER.BASE_LR or CLIP_GRAD_NORM, or mend the data"
            )

    def _record(self, name: str, value: float, iteration: int) -> None:
        history = self._histories.get(name)
        if history is None:
            history = self._histories[name] = HistoryBuffer(_HISTORY_LENGTH)
        elif history.latest_iteration() == iteration:
            newest, total, count = self._puts.get(name, (None, 0.0, 0))
            total, count = (total, count) if newest == iteration else (history.latest(), 1)
            self._puts[name] = iteration, total + value, count + 1
            history.pop()
            value = (total + value) / (count + 1)
        history.update(value, iteration)
        self._shown = None

    def state_dict(self) -> dict:
        histories = {name: history.state_dict() for name, history in self.histories().items()}
        media = {"images": list(self._vis_data), "histograms": list(self._histogram_data)}
        return {"histories": histories, "smoothing_hints": dict(self._hints), **media}

    def load_state_dict(self, state: dict) -> None:
        self._hints = dict(state["smoothing_hints"])
        self._vis_data.extend(map(tuple, state.get("images", ())))
        self._histogram_data.extend(map(tuple, state.get("histograms", ())))
        for name, history in state["histories"].items():
            self._histories[name] = HistoryBuffer(_HISTORY_LENGTH)
            self._histories[name].load_state_dict(history)
            # A put for the iteration that the state ends with takes its value's place.
            self._puts[name] = self._histories[name].latest_iteration(), 0.0, 0
        self._shown = None


def _read(waiting: Sequence[list[torch.Tensor]]) -> list[float]:
    """The values of single tensors, and the norms of several; a copy for each type on GPUs."""
    on_gpu, read = [t for each in waiting for t in each if t.is_cuda], {}
    for kind in {(tensor.dtype, tensor.device) for tensor in on_gpu}:
        alike = [each for each in on_gpu if (each.dtype, each.device) == kind]
        values = torch.stack([each.view(()) for each in alike]).tolist()
        read.update(zip(map(id, alike), values))
    number = (lambda each: read[id(each)] if each.is_cuda else each.item()) if read else _ITEM
    return [float(number(*t)) if len(t) == 1 else math.hypot(*map(number, t)) for t in waiting]


def _gather(values: list[float], names: Sequence[str]) -> list[list[float]]:
    """The values of each rank; a message has one length and says what is in it."""
    label, ranks = float(zlib.crc32(repr(names).encode())), []
    for part in torch.tensor(values, dtype=torch.float64).split(_MESSAGE_LENGTH - 1):
        message = torch.full((_MESSAGE_LENGTH,), label, dtype=torch.float64)
        message[1 : 1 + len(part)] = part
        received = comm.gather_tensor(message).tolist()
        if any(other[0] != label for other in received):
            comm.require_same_keys(list(names), "EventStorage.reduce")
        ranks = ranks or [[] for _ in received]
        for numbers, other in zip(ranks, received):
            numbers += other[1 : 1 + len(part)]
    return ranks
