"""What a signal does to a training: the first one asks it to stop, a later one ends it."""

import logging
import multiprocessing
import os
import select
import signal
import threading
import time
from types import FrameType

logger = logging.getLogger(__name__)

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)
_POLL_SECONDS = 0.5
_SECONDS_OF_ONE_SIGNAL = 2.0
_END = 0  # a byte in the pipe that is not the number of a signal

_watcher: "SignalWatcher | None" = None  # the one that has the signals of this process


# Python calls the handler of a signal in the main thread, between two steps of the program.  That
# is enough to ask for a stop, but the main thread may be stuck, in a kernel or in a wait for a
# batch, and never come to its next step.  So Python also writes the number of each signal into a
# pipe, as soon as it comes.  A thread reads it there and decides:
#
#   * The first signal asks for a stop.
#   * Another one within two seconds is the same one: a terminal and torchrun each send it.
#   * A later one means "now".  The thread kills the workers and ends the process.  Once the run is
#     stopping, only SIGINT means that: a scheduler repeats its SIGTERM while the run is saved, and
#     that must not cost the save.
#
# The thread also looks whether torchrun is still there.  If only torchrun is killed, nobody could
# stop its ranks any more, and they would hold the GPUs: that asks for a stop, too.


class SignalWatcher:
    """Has the signals of this process between ``start`` and ``stop``.

    A signal that the process ignores stays ignored, such as SIGHUP under nohup.

    Attributes:
        asked: whether this process was asked to stop.
        is_stopping: set by the owner once the run is on its way to the end.
        is_alone: set by the owner if a stop cannot be agreed on any more; then a signal does what
            it does to any program.
    """

    def __init__(self) -> None:
        # A plain bool and not an Event: a handler may interrupt another one that holds the lock of
        # the Event.
        self.asked = False
        self.is_stopping = False
        self.is_alone = False
        self._first_signal_time: float | None = None

    def start(self) -> None:
        """Take the signals; called in the main thread."""
        global _watcher
        self._handlers = {}  # those before
        for number in SIGNALS:
            handler = signal.getsignal(number)
            # None stands for a handler that was not installed by Python.
            if handler is not None and handler != signal.SIG_IGN:
                self._handlers[number] = handler
        # Without torchrun the parent is a shell or a scheduler, and a run may outlive a shell.
        self._has_torchrun = "TORCHELASTIC_RUN_ID" in os.environ
        self._parent = os.getppid()

        self._pipe, self._pipe_end = os.pipe()
        os.set_blocking(self._pipe_end, False)
        self._old_pipe_end = signal.set_wakeup_fd(self._pipe_end, warn_on_full_buffer=False)
        for number in self._handlers:
            signal.signal(number, self._handle)
        self._thread = threading.Thread(target=self._read_pipe, daemon=True)
        self._thread.start()
        _watcher = self

    def stop(self) -> None:
        """Give the signals back; called in the main thread.

        After a request to stop the process ends, and a repeated signal must not disturb it, except
        for SIGINT, the way out if something hangs.
        """
        global _watcher
        _watcher = None
        for number, handler in self._handlers.items():
            if (self.asked or self.is_stopping) and number != signal.SIGINT:
                handler = _do_nothing
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._old_pipe_end)
        os.write(self._pipe_end, bytes([_END]))
        self._thread.join()
        os.close(self._pipe)
        os.close(self._pipe_end)

    def launcher_is_gone(self) -> None:
        """Ask for a stop, because nobody else can stop this run any more; in any thread."""
        if not self.asked:
            self.asked = True
            _log("torchrun is gone: this run is saved and stops at the end of the iteration")

    def leave_to_parent(self) -> None:
        """In a process that was forked off this one, let signals do what they did before.

        The two processes share the pipe, so a signal to the new one would seem to be for this one.
        """
        signal.set_wakeup_fd(-1)
        for number, handler in self._handlers.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.asked = True
        if self.is_alone:
            end_workers()
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)

    def _read_pipe(self) -> None:
        while True:
            timeout = _POLL_SECONDS if self._has_torchrun else None
            readable, _, _ = select.select([self._pipe], [], [], timeout)
            numbers = os.read(self._pipe, 64) if readable else b""
            for number in numbers:
                if number == _END:
                    return
                if number in self._handlers:
                    self._signal_came(number)
            # A process whose parent ends gets another parent.
            if self._has_torchrun and os.getppid() != self._parent:
                self._has_torchrun = False
                self.launcher_is_gone()

    def _signal_came(self, number: int) -> None:
        name = signal.Signals(number).name
        now = time.monotonic()
        if self._first_signal_time is None:
            self._first_signal_time = now
            self.asked = True
            _log(
                f"{name}: this run is saved and stops at the end of the iteration, or in an"
                f" evaluation; another signal after {_SECONDS_OF_ONE_SIGNAL:.0f} s or more ends it"
                " at once, without a save"
            )
            return
        if now - self._first_signal_time < _SECONDS_OF_ONE_SIGNAL:
            return
        if self.is_stopping and number != signal.SIGINT:
            return
        end_workers()
        _log(f"{name} again: this run ends at once, without a save")
        os._exit(128 + number)  # what a shell shows for a process that a signal has ended


def end_workers() -> None:
    """Kill all processes that multiprocessing has started, such as the workers of data loaders.

    They ignore the signals of ``SIGNALS``, and one that is stuck would not end by itself.
    """
    for worker in multiprocessing.active_children():
        worker.kill()


def _after_fork_in_child() -> None:
    global _watcher
    if _watcher is not None:
        _watcher.leave_to_parent()
        _watcher = None


os.register_at_fork(after_in_child=_after_fork_in_child)


def _do_nothing(number: int, frame: FrameType | None) -> None:
    # Not SIG_IGN: a later watcher would take that for the wish of the user.
    pass


def _log(message: str) -> None:
    """Log from the thread that reads the pipe, which must go on in any case.

    The main thread may hold the lock of the log while it is stuck in a write to a dead disk.  So
    another thread logs, and is waited for only for a moment.
    """
    thread = threading.Thread(target=logger.warning, args=[message], daemon=True)
    thread.start()
    thread.join(timeout=1)
