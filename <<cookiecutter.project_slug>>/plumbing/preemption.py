"""Stopping by a signal: all ranks stop at the same point of the program."""

import enum
import itertools
import logging
import os
import signal
import threading
from typing import Any

import torch
import torch.distributed as dist

from plumbing import comm
from plumbing.signals import SIGNALS, SignalWatcher

__all__ = ["SIGNALS", "StopRequest", "current_request", "stop_launcher", "was_stopped"]

logger = logging.getLogger(__name__)
_POLL_SECONDS = 0.5

_numbers = itertools.count()  # of the requests of this process, the same on all ranks
_current: "StopRequest | None" = None
_was_stopped = False
_was_asked = False


class Phase(enum.Enum):
    """How far the ranks have come in agreeing where to stop."""

    RUNNING = "no rank was asked to stop, as far as this one knows"
    DECIDING = "a rank was asked, and all say how far they are"
    DECIDED = "all know where they stop, or all have finished"
    FAILED = "another rank is gone, so they cannot agree"


# A single process stops at the next call of ``agreed`` after a signal.
#
# On several ranks the signal may come to one of them only, and the ranks are not at the same point:
# until they wait for each other they may be most of an iteration apart.  All must stop at the same
# call of ``agreed``, or one would wait for ever for the next sum of gradients.  Every rank calls it
# at the same points of the program, so a call has the same number on all ranks.  In each rank a
# thread does the following beside the training:
#
#   1. RUNNING: Twice a second it looks for the key "asked" in the store of the process group, and
#      sets it if its own rank was asked.  Meanwhile ``agreed`` only counts its calls.
#   2. DECIDING: The key is there.  A call of ``agreed`` that begins now waits.  The threads tell
#      each other the number of the call that comes next on their rank.  The largest of these
#      numbers is the call at which all stop: no rank is past it, and every rank comes to it.
#   3. DECIDED: Calls go on.  The one with that number returns True, and so does each later one.
#
# The threads have a process group of their own for step 2, because the training may be waiting in
# the other one.  Each uses it exactly once: a rank that finishes without a stop takes part as well,
# because another one may have been asked in the meantime.
#
# Step 2 does not use the store, because that lives in torchrun.  If torchrun was killed, all
# threads see in step 1 that the store is gone, and take that for a request.


class StopRequest:
    """Inside this context a signal to any rank stops all ranks at the same call of ``agreed``.

    signals.py says which signals, and what a second one does.  To enter it is collective, and so is
    to leave it without an error.
    """

    def __init__(self) -> None:
        self._signals = SignalWatcher()
        self._is_single_process = comm.get_world_size() == 1
        self._has_stopped = False
        # On several ranks; the condition guards the next three.
        self._phase_changed = threading.Condition()
        self._phase = Phase.RUNNING
        self._num_calls = 0
        self._last_call: int | None = None
        self._left = threading.Event()
        self._left_after_error = False

    def __enter__(self) -> "StopRequest":
        global _current, _was_stopped
        if not self._is_single_process:
            prefix = f"stop {next(_numbers)}"
            group = comm.new_group()
            self._thread = threading.Thread(target=self._agree, args=[prefix, group], daemon=True)
            self._thread.start()
        self._signals.start()
        _current = self
        _was_stopped = False
        return self

    def __exit__(self, error: type | None, *_: Any) -> None:
        global _current, _was_asked
        _current = None
        # After an error the other ranks may never come to this point: do not wait for them.
        self._left_after_error = error is not None
        self._left.set()
        if not self._is_single_process:
            self._thread.join(timeout=2 * _POLL_SECONDS if self._left_after_error else None)
        self._signals.stop()
        _was_asked = self._signals.asked

    def agreed(self) -> bool:
        """Whether all ranks stop here.

        All ranks call it at the same points in the same order: after each iteration, and after
        each batch of an evaluation.  A call does not communicate.  Once one has returned True, all
        later ones do.
        """
        global _was_stopped
        if self._is_single_process:
            stop = self._signals.asked
        else:
            with self._phase_changed:
                while self._phase is Phase.DECIDING:
                    self._phase_changed.wait()
                stop = self._last_call is not None and self._num_calls >= self._last_call
                self._num_calls += 1
        if stop and not self._has_stopped:
            self._has_stopped = True
            self._signals.is_stopping = True
            _was_stopped = True
            logger.info("All ranks stop here, because of a signal")
        return stop

    def _agree(self, prefix: str, group: dist.ProcessGroup) -> None:
        """Runs in the thread of this rank."""
        self._wait_for_request(prefix)
        if self._left_after_error:
            return
        with self._phase_changed:
            self._phase = Phase.DECIDING
            next_call = self._num_calls
        last_call = None
        phase = Phase.DECIDED
        try:
            state = torch.tensor([int(self._signals.asked), next_call])
            dist.all_reduce(state, dist.ReduceOp.MAX, group=group)
            is_asked, largest_call = state.tolist()
            if is_asked:
                last_call = largest_call
        except RuntimeError:
            # Another rank is gone.  The next collective of the training raises an error, and
            # torchrun ends the job.
            phase = Phase.FAILED
            self._signals.is_alone = True
        with self._phase_changed:
            self._last_call = last_call
            self._phase = phase
            self._phase_changed.notify_all()

    def _wait_for_request(self, prefix: str) -> None:
        """Return when a rank was asked, when this rank has left, or when the store is gone."""
        # torch has no public way to the store.  The thread needs a connection of its own: on a
        # shared one it would block the training, or wait for it.
        shared = dist.distributed_c10d._get_default_store()
        try:
            self._poll(dist.PrefixStore(prefix, shared.clone()))
            return
        except dist.DistError:
            logger.info("A connection to the store is lost: another one is used")
        # If only this connection broke, the other ranks know nothing of it.  This rank must not
        # begin to decide alone: it would wait for them, and they for its next gradients.
        try:
            self._poll(dist.PrefixStore(prefix, shared))
        except dist.DistError:
            self._signals.launcher_is_gone()

    def _poll(self, store: dist.Store) -> None:
        while not self._left.wait(_POLL_SECONDS):
            if self._signals.asked:
                store.set("asked", "")
            if store.check(["asked"]):
                return


def current_request() -> StopRequest | None:
    """The request whose context this process is in, or None."""
    return _current


def was_stopped() -> bool:
    """Whether the ranks have stopped at the last request of this process."""
    return _was_stopped


# With several nodes a signal may come to one torchrun only, and the others do not know of it.  When
# the ranks of another node end, their torchrun takes that for the end of the training.  It then
# waits until every other torchrun says the same, which the one with the signal does not: 5 minutes,
# which no option of torch shortens, and in which it does not even react to a signal.  So a rank
# hands the signal on before it ends.  Then every torchrun ends in the same way.


def stop_launcher() -> None:
    """After a stop, end the torchrun of this node if the signal went to another.  Collective."""
    if comm.get_num_nodes() == 1:
        return
    node = os.environ["GROUP_RANK"]
    try:
        # This also waits until rank 0 has saved.  The torchrun that ends may be the one that all
        # others need, and a torchrun that loses it kills its ranks 30 seconds later.
        every = comm.all_gather((node, _was_asked))
    except RuntimeError:
        return  # A rank has ended in another way, and so will its torchrun.
    knows_it = all(was_asked for other, was_asked in every if other == node)
    if comm.get_local_rank() == 0 and not knows_it:
        os.kill(os.getppid(), signal.SIGTERM)
