"""Stopping by a signal, all ranks after the same iteration."""

import atexit
import contextlib
import itertools
import logging
import multiprocessing
import signal
import threading
from typing import Any

import torch.distributed as dist

from plumbing import comm

logger = logging.getLogger(__name__)
SIGNALS = signal.SIGTERM, signal.SIGINT, signal.SIGUSR1
_POLL_SECONDS = 0.5
_numbers = itertools.count()


@atexit.register
def _end_workers() -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch's would raise at each that ends
    for worker in multiprocessing.active_children():
        worker.kill()  # the signal that multiprocessing itself would send is held


class StopRequest:
    """Inside, a signal to any rank stops all of them; ``agreed`` tells after which iteration.

    A thread of each rank watches the store of the process group.  Once a rank was asked, each tells
    there which iteration it is in, and waits at its end until all have; the latest is the last.
    """

    def __init__(self, start_iter: int = 0) -> None:
        self._passed, self._hold, self._stop_at = start_iter - 1, None, None  # iterations
        self._asked, self._ended = threading.Event(), threading.Event()
        self._alone, self._change = comm.get_world_size() == 1, threading.Condition()
        self._thread = threading.Thread(target=self._watch, args=[next(_numbers)], daemon=True)

    def __enter__(self) -> "StopRequest":
        self._handlers = {number: signal.signal(number, self._ask) for number in SIGNALS}
        if not self._alone:
            self._thread.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join(timeout=10)
        over = self._asked.is_set() or self._stop_at is not None
        for number, handler in self._handlers.items():  # the process ends, asked again or not
            signal.signal(number, signal.SIG_IGN if over and number != signal.SIGINT else handler)

    def _ask(self, number: int, _: Any) -> None:
        self._asked.set()
        if not self._alone and not self._thread.is_alive() and self._stop_at is None:
            signal.signal(number, signal.SIG_DFL)  # torchrun is gone: nobody could agree
            signal.raise_signal(number)

    def agreed(self, iteration: int) -> bool:
        """Whether to stop after this iteration; every rank asks in every iteration."""
        stop = self._asked.is_set()
        if not self._alone:
            with self._change:
                self._change.wait_for(lambda: self._stop_at is not None or self._hold != iteration)
                self._passed = iteration
                stop = self._stop_at == iteration
        if stop:
            logger.info("Stopping after iteration %d; --resume goes on from there", iteration)
        return stop

    def _watch(self, number: int) -> None:
        shared = dist.distributed_c10d._get_default_store()
        store = dist.PrefixStore(f"stop{number}", shared.clone())
        with contextlib.suppress(dist.DistError):  # another rank is gone, and the job ends
            while not store.check(["asked"]) and not self._ended.wait(_POLL_SECONDS):
                if self._asked.is_set():
                    store.set("asked", "")
            with self._change:
                self._hold = self._passed + 1
            store.set(str(comm.get_rank()), str(self._hold))
            if store.check(["asked"]):
                ranks = range(comm.get_world_size())
                self._stop_at = max(int(store.get(str(rank))) for rank in ranks)
        with self._change:  # a rank that waits must not wait for a thread that has ended
            self._hold = None
            self._change.notify_all()
