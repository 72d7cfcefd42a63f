"""What happens before training: output folder, log, random state."""

import contextlib
import errno
import fcntl
import logging
import os
import platform
import random
import re
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import get_error_handler, record

from plumbing import comm
from plumbing.comm import SettingsError

_FILES = r"(log\.txt.*|(config|results|metrics)\.\w+|last_checkpoint|model_\w+\.\w+)(\.tmp)?"
_locks = []  # files that stay open


def launch(main: Callable[..., Any], *args: Any) -> None:
    """Call ``main``; an error that is for the user ends the program with one line on one rank."""
    status = record(_one_line)(main, args)  # so that torchrun shows whose exception was the first
    if dist.is_initialized():
        dist.destroy_process_group()  # before the exit, which its threads may abort
    if status:
        sys.exit(status)


def _one_line(main: Callable[..., Any], args: tuple) -> int | str | None:
    try:
        main(*args)
    except SystemExit as stop:
        return stop.code
    except (SettingsError, comm.NonFiniteError, OSError) as error:
        advice = ": make room, then --resume" if isinstance(error, OSError) else ""
        if advice and error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise
        if advice:
            get_error_handler().record_exception(error)  # or torchrun may blame another rank
        rank, torchrun = os.environ.get("RANK", "0"), "TORCHELASTIC_RUN_ID" in os.environ
        if rank != "0" and torchrun:
            time.sleep(10)  # it ends this rank meanwhile, unless the first one has no such error
        if rank == "0" or torchrun:
            print(f"error: {error}{advice}", file=sys.stderr, flush=True)
        return 2


def set_random_state(seed: int, iteration: int = 0, rank: int = 0) -> None:
    """Set torch's, numpy's and Python's generators as a function of the three numbers."""
    mixed = (seed * 0x9E3779B97F4A7C15 + iteration) * 0xBF58476D1CE4E5B9 + rank
    mixed = ((mixed ^ (mixed >> 29)) * 0x94D049BB133111EB) % 2**63
    torch.default_generator.manual_seed(mixed)
    if torch.cuda.is_initialized():  # and this is no forked worker, which must not touch it
        torch.cuda.default_generators[torch.cuda.current_device()].manual_seed(mixed)
    np.random.seed(mixed % 2**32)
    random.seed(mixed)


def setup_run(output_dir: str, may_exist: bool) -> bool:
    """Make the folder of a run, and start the log.  Collective.

    Returns whether torchrun has started this run before, in the folder, and now starts it again.
    """
    restarted = comm.from_main_process(lambda: _make_folder(output_dir, may_exist))
    rank = comm.get_rank()
    path = os.path.join(output_dir, f"log.txt.rank{rank}" if rank else "log.txt")
    form, date = "[%(asctime)s %(levelname)s %(name)s]: %(message)s", "%m/%d %H:%M:%S"
    handlers = [logging.FileHandler(path, encoding="utf-8")]
    handlers += [] if rank else [logging.StreamHandler(sys.stdout)]
    logging.raiseExceptions = False  # a full disk is told where it costs something, in one line
    logging.basicConfig(level="INFO", format=form, datefmt=date, handlers=handlers, force=True)
    return restarted


def _make_folder(folder: str, may_exist: bool) -> bool:
    note, launcher = os.path.join(folder, "launcher.txt"), f"{platform.node()} {os.getppid()}"
    with contextlib.suppress(OSError), open(f"/proc/{os.getppid()}/stat") as file:
        launcher += f" {file.read().rpartition(')')[2].split()[19]}\n"  # since when it runs
    restarted = False
    if os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0":
        with contextlib.suppress(OSError), open(note) as file:
            restarted = file.read() == launcher  # the same torchrun
    _check_folder(folder, may_exist or restarted)
    try:
        os.makedirs(folder, exist_ok=True)
        _locks.append(file := open(note, "a", buffering=1))  # noqa: SIM115
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # until this process ends, however it does
    except BlockingIOError:
        raise SettingsError(f"OUTPUT_DIR: {folder} is in use by another job: wait for it") from None
    except OSError as error:
        if error.errno not in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):
            raise SettingsError(f"OUTPUT_DIR: cannot write to {folder}: {error.strerror}") from None
        logging.warning("OUTPUT_DIR: %s has no locks: see that one job at a time uses it", folder)
    _check_folder(folder, may_exist or restarted)  # another job may have come and gone meanwhile
    if not may_exist:
        file.truncate(0)
        file.write(launcher)
    return restarted


def _check_folder(folder: str, may_exist: bool) -> None:
    names = sorted(os.listdir(folder)) if os.path.isdir(folder) else []
    if os.path.isdir(folder) and not os.access(folder, os.W_OK):
        raise SettingsError(f"OUTPUT_DIR: cannot write to {folder}")
    run = [n for n in names if re.fullmatch(r".*\.pth|last_checkpoint|(metrics|results)\.json", n)]
    for name in filter(re.compile(_FILES).fullmatch, names):
        path, mode = os.path.join(folder, name), os.R_OK | os.W_OK * (".pth" not in name)
        if not (os.path.isfile(path) and os.access(path, mode)):
            raise SettingsError(f"OUTPUT_DIR: {path} is no file to read and write: move it away")
    if run and not may_exist:
        raise SettingsError(f"OUTPUT_DIR: {folder} holds a run ({run[0]}): --resume, or change it")
