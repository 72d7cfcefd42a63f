"""How a process of the training begins and ends.

``launch`` calls the main function and sees to it that the reason for every end is found: in the log
of the rank, in torchrun's report and, if it is a mistake of the user, in one line on the screen.
"""

import contextlib
import errno
import logging
import os
import platform
import sys
import time
import traceback
import uuid
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import get_error_handler

from plumbing import comm, preemption, run_folder
from plumbing.environment import allow_open_files
from plumbing.errors import NonFiniteError, SettingsError, StoppedBySignal, last_checkpoint

logger = logging.getLogger(__name__)
_DISK_IS_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_ERROR_STATUS = 2
_SECONDS_FOR_OTHERS = 10.0
_ELASTIC_SECONDS = 3.0
_POLL_SECONDS = 0.02
# A rank that waits for a batch gives up after TIMEOUT_SECONDS.  The others wait for it somewhat
# longer, so that its error is the first one.
_MARGIN_SECONDS = 10.0


# Start


def launched_ranks() -> int:
    """Return the number of ranks that a launcher starts together, before they have met."""
    return int(os.environ.get("WORLD_SIZE", 1))


def choose_device(name: str) -> torch.device:
    """Choose the device of this rank.

    Args:
        name: "cpu", "cuda", or "auto" for a GPU if the machine has one, and the CPU otherwise.

    Raises:
        SettingsError: there is no GPU, or there are fewer GPUs than ranks on this machine.
    """
    if name == "cpu":
        return torch.device("cpu")
    num_gpus = torch.cuda.device_count()
    if num_gpus == 0:
        if name == "auto":
            return torch.device("cpu")
        reason = "torch finds no GPU"
        if torch.version.cuda is None:
            reason = "this torch was built without CUDA"
        raise SettingsError(
            f"MODEL.DEVICE: {name}, but there is no GPU on {platform.node()} ({reason}): set it to"
            " cpu or auto"
        )
    num_ranks = comm.get_local_size()
    if num_ranks > num_gpus:
        raise SettingsError(
            f"{num_ranks} ranks on a machine with {num_gpus} GPUs: lower --nproc_per_node, or set"
            " MODEL.DEVICE to cpu"
        )
    device = torch.device("cuda", comm.get_local_rank())
    torch.cuda.set_device(device)
    return device


def init_process_group(device: torch.device, timeout_seconds: float) -> None:
    """Join the other ranks that torchrun started; a single process has nothing to do.  Collective.

    Args:
        device: of this rank.
        timeout_seconds: how long a rank waits for another one, here and in every collective; some
            seconds are added.

    Raises:
        SettingsError: WORLD_SIZE is set, but no launcher has set the rest; or the machine does not
            allow as many open files as so many ranks need.
        TimeoutError: not all ranks have come.
    """
    world_size = launched_ranks()
    if world_size == 1 or dist.is_initialized():
        return
    missing = [name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if missing:
        raise SettingsError(
            f"the environment has WORLD_SIZE={world_size} but no {' and no '.join(missing)}: start"
            " several ranks with torchrun, or `unset WORLD_SIZE` for a single process"
        )
    allow_open_files(world_size)
    timeout = timedelta(seconds=timeout_seconds + _MARGIN_SECONDS)
    comm.set_time_limit(timeout)
    store, rank, world_size = next(dist.rendezvous("env://", timeout=timeout))
    prefix = _agree_on_prefix(store, rank, world_size, timeout_seconds)
    backend = "gloo"
    device_id = None
    if device.type == "cuda":
        backend = "cpu:gloo,cuda:nccl"
        device_id = device
    dist.init_process_group(
        backend,
        store=dist.PrefixStore(prefix, store),
        rank=rank,
        world_size=world_size,
        timeout=timeout,
        device_id=device_id,
    )


# torchrun keeps one store, a table of keys and values, for as long as it runs.  When it restarts
# the ranks, they find there what the ranks before them have written, for example the addresses of
# processes that are dead.  So the keys of each start get a prefix of their own.  Neither the number
# of the restart nor anything else that a rank knows is different for every start, so rank 0 draws
# the prefix.  It must reach those ranks that started together with rank 0, and not be taken from
# what an earlier rank 0 has left in the store:
#
#   1. Rank r > 0 writes "hello r" with a token that it has just drawn.
#   2. Rank 0 answers under the token of each rank with the prefix.  An old token may still stand
#      under "hello r"; its answer is read by nobody, and rank r will write its new one over it.
#   3. Rank r reads the answer to its own token, and writes "joined" under the prefix.
#   4. Rank 0 goes on when all ranks have joined.


def _agree_on_prefix(store: dist.Store, rank: int, world_size: int, timeout_seconds: float) -> str:
    if rank > 0:
        token = uuid.uuid4().hex
        store.set(f"hello {rank}", token)
        prefix = store.get(f"answer {token}").decode()  # waits until it is there
        store.set(f"{prefix} {rank}", "joined")
        return prefix

    prefix = uuid.uuid4().hex
    others = range(1, world_size)
    deadline = time.monotonic() + timeout_seconds
    while not store.check([f"{prefix} {other}" for other in others]):
        for other in others:
            if store.check([f"hello {other}"]):
                token = store.get(f"hello {other}").decode()
                store.set(f"answer {token}", prefix)
        time.sleep(_POLL_SECONDS)
        if time.monotonic() > deadline:
            raise TimeoutError(
                f"not all of {world_size} ranks have come in TIMEOUT_SECONDS ({timeout_seconds} s):"
                " see the output of the others, and that WORLD_SIZE is not left from another job"
            )
    return prefix


# End


def launch(main: Callable[..., Any], *args: Any) -> None:
    """Call ``main(*args)``, and end the process so that the reason can be found.

    * A return, or a signal that stopped the run: the last line of the log says where the results
      are, and the exit status is 0.
    * A SettingsError, a NonFiniteError, a full disk, a time-out or the loss of another rank: one
      line, exit status 2.
    * Any other exception: its traceback.

    The line or the traceback stands in the log of this rank, too, and in torchrun's report.
    """
    # torchrun reads a file in which each rank notes its exception and the time; it reports the
    # first one as the root cause.  The handler writes that file.
    elastic = get_error_handler()
    elastic.initialize()
    status = 0
    try:
        main(*args)
    except StoppedBySignal:
        pass
    except SystemExit as stop:
        status = stop.code
    except KeyboardInterrupt:
        _write_to_log_file("Interrupted by SIGINT before the training, or after it")
        raise
    except Exception as error:
        message = _one_line(error)
        if message is None:
            _report_traceback(error)
            raise
        _report_line(error, message)
        status = _ERROR_STATUS
    if not status:
        _log_the_end()
    if preemption.was_stopped() and not status:
        preemption.stop_launcher()
    # Before the exit of Python, which the threads of the process group may abort.
    if dist.is_initialized():
        dist.destroy_process_group()
    if status:
        sys.exit(status)


def _one_line(error: Exception) -> str | None:
    """The message for an error whose traceback would not help the user, or None."""
    if isinstance(error, (SettingsError, NonFiniteError)):
        return str(error)
    if isinstance(error, OSError) and error.errno in _DISK_IS_FULL:
        return f"{error}: make room, then --resume"
    if isinstance(error, TimeoutError) and "TIMEOUT_SECONDS" in str(error):
        return str(error)
    if comm.is_timeout(error):
        reason = str(error).splitlines()[0]
        return (
            f"rank {os.environ.get('RANK', 0)} has waited for another rank for as long as"
            f" TIMEOUT_SECONDS allows ({reason}): see the logs of the other ranks, and raise"
            " TIMEOUT_SECONDS if one of them was still at work, for example with its data"
        )
    if comm.has_lost_a_rank(error):
        reason = str(error).splitlines()[0]
        return (
            f"rank {os.environ.get('RANK', 0)} has lost another rank ({reason}): see the logs of"
            " the other ranks; if a machine is gone, start all launchers again with --resume"
        )
    return None


def _report_traceback(error: Exception) -> None:
    # To the file only: Python itself prints the traceback on the screen.
    _write_to_log_file("".join(traceback.format_exception(error)).rstrip())
    get_error_handler().record_exception(error)


def _report_line(error: Exception, message: str) -> None:
    _write_to_log_file(f"error: {message}")
    has_torchrun = "TORCHELASTIC_RUN_ID" in os.environ
    if has_torchrun and comm.has_lost_a_rank(error):
        # If the other rank was on another machine, its error is not on the screen of this one.
        if comm.get_local_rank() == 0 and comm.get_num_nodes() > 1:
            _print_line(message)
        # torchrun counts in whole seconds, and would call this rank the root cause as well.
        # Meanwhile it ends this process with a signal, so that only the other one has an error.
        time.sleep(_ELASTIC_SECONDS)
        _record_line(error, message)
        return

    _record_line(error, message)
    rank = os.environ.get("RANK", "0")
    if rank != "0" and has_torchrun:
        # Most errors are raised on all ranks alike, and one line is enough.  The first rank that
        # ends is rank 0, or the one with the lowest number, and torchrun ends the others while
        # they sleep.
        time.sleep(_SECONDS_FOR_OTHERS + comm.get_local_rank())
    elif rank != "0" and isinstance(error, (SettingsError, NonFiniteError)):
        # Other launchers may let this rank live: leave the line to rank 0, and to the log.
        return
    _print_line(message)


def _print_line(message: str) -> None:
    print(f"error: {message}", file=sys.stderr, flush=True)


def _record_line(error: Exception, message: str) -> None:
    """Put one line into torchrun's report: the type and the message."""
    # torchrun prints the traceback of the exception that is being handled.  This one has no stack
    # and no causes.
    try:
        raise type(error)(message) from None
    except Exception as short:
        short.__context__ = None
        get_error_handler().record_exception(short.with_traceback(None))


def _write_to_log_file(message: str) -> None:
    """Log to the file of this rank, but not on the screen."""
    record = logger.makeRecord(logger.name, logging.ERROR, __file__, 0, message, (), None)
    for handler in logging.getLogger().handlers:
        if isinstance(handler, logging.FileHandler):
            # A full disk must not hide the error that is reported here.
            with contextlib.suppress(OSError, ValueError):
                handler.handle(record)


def _log_the_end() -> None:
    """Say at the end of the log whether the run has finished, and where its results are."""
    folder = run_folder.output_dir()
    if folder is None:
        return
    if preemption.was_stopped():
        logger.info(
            "Stopped by a signal; the same command with --resume continues from %s",
            last_checkpoint(),
        )
        return
    if os.path.dirname(last_checkpoint()) != folder:
        # An evaluation of MODEL.WEIGHTS, which writes nothing but the log.
        logger.info("Finished.  Log: %s", folder)
        return
    logger.info(
        "Finished.  Results: %s; newest checkpoint: %s; curves: tensorboard --logdir %s",
        folder,
        last_checkpoint(),
        folder,
    )
