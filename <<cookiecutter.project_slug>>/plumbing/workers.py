"""A DataLoader whose waits for a batch have a limit, and whose workers always end."""

import atexit
import contextlib
import errno
import multiprocessing
import multiprocessing.connection
import os
import pickle
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NoReturn

import torch
from torch.utils.data import DataLoader, Dataset

from plumbing import comm
from plumbing.errors import SettingsError
from plumbing.preemption import SIGNALS
from plumbing.shared_memory import REMEDY, NoSharedMemory, ToSharedMemory, free_shared_memory

# How long a worker may take to end after it was asked.
GRACE_SECONDS = 5.0

# How often a wait for a batch looks whether a worker has died and whether the limit has passed.
POLL_SECONDS = 5.0

# torch raises a RuntimeError that begins so when a step of the wait is over; the next step may
# then follow, as if nothing had happened.  (A test notices if torch changes either.)
_STEP_IS_OVER = "DataLoader timed out"

# What a system answers that has no room for another process or for its queues.
_NO_ROOM = (errno.ENOSPC, errno.ENOMEM, errno.EAGAIN, errno.EMFILE)

_END = object()  # in place of a batch: the pass is over

# All workers that this process has started; those of a loader that is gone leave by themselves.
_workers: weakref.WeakSet = weakref.WeakSet()


# The life of a worker, in the order of events:
#
# 1. The workers start with the first batch of a pass.  The signals that stop a training are
#    blocked meanwhile, and each worker ignores them: torchrun sends them to all processes, and a
#    rank still needs its workers for the iteration that it finishes.
# 2. A worker computes a batch and puts it into shared memory.  It does so before the batch goes
#    into torch's queue: there, a batch for which shared memory is too small would be lost without
#    a word, and the worker would go on.
# 3. The rank waits for the batch in steps.  After each one it looks whether a worker has died and
#    whether the limit has passed.  Either kills all workers and raises a SettingsError of one line.
# 4. ``close`` asks the workers to end, and kills those that have not after GRACE_SECONDS: one
#    that is stuck in a sample, for example.
# 5. If the process ends without ``close``, it kills its workers on the way out.  If it is killed
#    itself, each worker notices that its parent is gone, and ends.
class WorkerLoader:
    """Iterates over the batches of a data set, which workers may compute.

    Args:
        dataset: see torch.utils.data.DataLoader; so are ``batch_sampler`` and ``collate_fn``.
        num_workers: processes that load; 0 loads in this process, where a wait has no limit.
        keep_workers: whether the workers wait for another pass when one is over.
        pin_memory: whether batches are copied to pinned memory, for a GPU.
        timeout_seconds: limit of the wait for one batch.
        name: of this loader, for messages.
    """

    def __init__(
        self,
        dataset: Dataset,
        batch_sampler: Iterable,
        collate_fn: Callable[[list], Any],
        *,
        num_workers: int,
        keep_workers: bool,
        pin_memory: bool,
        timeout_seconds: float,
        name: str,
    ) -> None:
        self._timeout_seconds = timeout_seconds
        self._name = name
        self._workers: list = []  # processes
        self._data_loader: DataLoader | None = None
        self._iterator: Any = None  # torch's, to which the workers belong
        self._pass_is_open = False
        if num_workers > 0:
            worker_options = {
                "collate_fn": ToSharedMemory(collate_fn),
                "num_workers": num_workers,
                "worker_init_fn": _prepare_worker,
                "persistent_workers": keep_workers,
                "timeout": min(POLL_SECONDS, timeout_seconds),
                "multiprocessing_context": _start_method(),
            }
        else:
            worker_options = {"collate_fn": collate_fn}
        # The generator is of its own, so that a pass draws nothing from the one of the training.
        self._data_loader_options = {
            "dataset": dataset,
            "batch_sampler": batch_sampler,
            "pin_memory": pin_memory,
            "generator": torch.Generator(),
            **worker_options,
        }

    def __iter__(self) -> Iterator[Any]:
        if self._pass_is_open:
            self.close()  # an earlier pass was left in its midst
        self._start_pass()
        self._pass_is_open = True
        iterator = self._iterator
        try:
            while (batch := self._wait_for_batch(iterator)) is not _END:
                yield batch
            self._pass_is_open = False
        finally:
            if iterator is self._iterator and self._pass_is_open:
                self.close()

    def close(self) -> None:
        """End the workers; the next pass starts new ones."""
        iterator = self._iterator
        self._iterator = None
        self._data_loader = None
        self._pass_is_open = False
        if not any(worker.is_alive() for worker in self._workers):
            return
        killer = threading.Timer(GRACE_SECONDS, _kill, args=[self._workers])
        killer.daemon = True
        killer.start()
        # The public way is to drop the last reference to the iterator, but a traceback may hold
        # others.  torch waits a while for each worker; the timer cuts that short for all.
        iterator._shutdown_workers()
        killer.cancel()
        _kill(self._workers)
        self._workers = []

    def _start_pass(self) -> None:
        if self._data_loader is None:
            self._data_loader = DataLoader(**self._data_loader_options)
        handler = signal.getsignal(signal.SIGCHLD)
        others = set(multiprocessing.active_children())
        try:
            with _signals_blocked():
                self._iterator = iter(self._data_loader)
        except Exception as error:
            self._explain_failed_start(error)
            raise
        finally:
            # torch's own handler raises an error about a dead worker wherever the process happens
            # to be, in the midst of a save too.  Ours comes where a batch is missing.
            if threading.current_thread() is threading.main_thread():
                signal.signal(signal.SIGCHLD, handler)
            started = set(multiprocessing.active_children()) - others
            self._workers.extend(started)
            _register(started)

    def _explain_failed_start(self, error: Exception) -> None:
        where = f"DATALOADER.NUM_WORKERS: cannot start the workers of the {self._name}: {error}"
        if isinstance(error, pickle.PicklingError) or "pickle" in str(error):
            method = multiprocessing.get_start_method()
            raise SettingsError(
                f"{where}; under the start method {method} the data set, its transforms and its"
                " collate_fn are sent to them: define functions and classes at the top level of a"
                " module (no lambdas), or set it to 0"
            ) from None
        if isinstance(error, OSError) and error.errno in _NO_ROOM:
            raise SettingsError(f"{where}; {REMEDY}") from None

    def _wait_for_batch(self, iterator: Iterator) -> Any:
        """Return the next batch, or _END."""
        deadline = time.monotonic() + self._timeout_seconds
        while True:
            try:
                batch = next(iterator, _END)
            except Exception as error:
                if not self._workers:
                    raise
                step_is_over = str(error).startswith(_STEP_IS_OVER)
                if step_is_over and time.monotonic() < deadline:
                    continue
                self._raise_if_one_died()
                _kill(self._workers)
                if step_is_over:
                    self._raise_timeout()
                raise
            if isinstance(batch, NoSharedMemory):
                _kill(self._workers)
                raise SettingsError(
                    f"DATALOADER.NUM_WORKERS: a worker of the {self._name} on rank"
                    f" {comm.get_rank()} has no shared memory for a batch ({batch.cause});"
                    f" {REMEDY}"
                )
            return batch

    def _raise_if_one_died(self) -> None:
        # Its pipes may be closed a moment before it has ended.
        sentinels = [worker.sentinel for worker in self._workers]
        ended = multiprocessing.connection.wait(sentinels, timeout=1)
        for worker in self._workers:
            if worker.sentinel in ended:
                worker.join(timeout=10)
        exit_codes = [worker.exitcode for worker in self._workers if worker.exitcode]
        if not exit_codes:
            return
        # A worker that waits for a lock of the dead one would not end by itself.
        _kill(self._workers)
        if exit_codes[0] < 0:
            cause = signal.Signals(-exit_codes[0]).name
        else:
            cause = f"exit status {exit_codes[0]}"
        raise SettingsError(
            f"DATALOADER.NUM_WORKERS: a worker of the {self._name} on rank {comm.get_rank()} died"
            f" of {cause}; if memory was short, {REMEDY}, then --resume"
        ) from None

    def _raise_timeout(self) -> NoReturn:
        raise SettingsError(
            f"DATALOADER.NUM_WORKERS: none of the {len(self._workers)} workers of the"
            f" {self._name} on rank {comm.get_rank()} gave a batch within"
            f" {self._timeout_seconds:g} s (TIMEOUT_SECONDS): a sample takes too long, or a worker"
            f" is stuck, or shared memory is full{free_shared_memory()}: look at the samples with"
            f" NUM_WORKERS 0, or {REMEDY}"
        ) from None


@contextlib.contextmanager
def _signals_blocked() -> Iterator[None]:
    """Block the signals that stop a training; processes that start inside never get them."""
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _start_method() -> str | None:
    """How workers start: by a fork on Linux, unless the program has chosen another method.

    Python 3.14 starts them from a server by default, which imports torch anew and takes seconds
    instead of a tenth of one.  A worker computes batches only, so a fork is safe enough for it.
    """
    if sys.platform == "linux" and multiprocessing.get_start_method(allow_none=True) is None:
        return "fork"
    return None


def _prepare_worker(worker_id: int) -> None:
    # Only a worker that is forked inherits what _signals_blocked has blocked.
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """End this worker, whatever it is doing, as soon as its rank is gone."""
    multiprocessing.parent_process().join()
    os._exit(1)


def _register(workers: Iterable) -> None:
    """Have these processes killed when this one ends."""
    _workers.update(workers)
    # What is registered last is called first: before the functions of multiprocessing and torch,
    # which would wait for workers, after a SIGTERM that the workers ignore.
    atexit.unregister(_kill_all)
    atexit.register(_kill_all)


def _kill_all() -> None:
    _kill(_workers)


def _kill(workers: Iterable) -> None:
    for worker in list(workers):
        if worker.is_alive():
            worker.kill()
