"""The folder of a run: who may use it, and the log in it."""

import contextlib
import errno
import fcntl
import logging
import os
import platform
import re
import sys
import time
import uuid
from typing import IO, NamedTuple

import torch

from plumbing import comm
from plumbing.errors import SettingsError

_NOTE = "launcher.txt"
_LOG_FORMAT = "[%(asctime)s %(levelname)s %(name)s]: %(message)s"
_DATE_FORMAT = "%m/%d %H:%M:%S"
_HELD_BY_ANOTHER = (errno.EAGAIN, errno.EACCES)
_SECONDS_TO_SEE_A_FILE = 30.0
_POLL_SECONDS = 0.2

# Files that a run writes.  Those of _RUN show that there is something to lose.
_FILES = re.compile(
    r"(log\.txt.*|(config|results|metrics)\.\w+|last_checkpoint|model_\w+\.\w+)(\.tmp)?"
)
_RUN = re.compile(r".*\.pth|last_checkpoint|(metrics|results)\.json")

_output_dir: str | None = None
_locks: list[IO] = []  # the open files that hold the locks of this process


# A run must not write over another one, and two jobs must not write to one folder at a time.  The
# file launcher.txt serves both.  The order of events:
#
#   1. Each rank says which launcher (torchrun) has started it.  Rank 0 does the steps 2 to 5.
#   2. It reads launcher.txt.  If one of the launchers stands there, then the run in the folder was
#      started by this torchrun, which now starts it again because a rank has died, or because a
#      machine has come or gone.  That is a resume, although nobody has said --resume.  Rank 0 may
#      be on another machine than before, but one of the launchers has lived on.
#   3. It refuses a folder that holds a run, if this is neither a resume nor an evaluation.
#   4. It locks the file, until its process ends in any way.  (Loader workers do not inherit the
#      lock of a process, so one that lives on does not hold it.)
#   5. It looks a second time, as another job may have come and gone before the lock, and writes
#      the file anew: its host and process, for the message to a job that comes too early, all the
#      launchers, and a random token.
#   6. Every other rank looks for the token in its own view of the folder.  A rank that does not
#      find it has another disk, and would train on, save and resume by itself.


def open_run(output_dir: str, resume: bool, eval_only: bool) -> bool:
    """Make and lock the folder of a run, and begin its log.  Collective.

    Args:
        output_dir: the same on all ranks, and on a disk that all of them share.
        resume: whether the user wants to continue a run.
        eval_only: whether nothing will be trained, and so no run can be overwritten.

    Returns:
        Whether to resume: the user wants it, or torchrun starts this run again.

    Raises:
        SettingsError: the folder holds a run, is in use, cannot be written to or is not shared, or
            the ranks have different flags, or different versions of Python or torch.
    """
    global _output_dir
    comm.require_same(resume, "--resume")
    comm.require_same(eval_only, "--eval-only")
    comm.require_same(output_dir, "OUTPUT_DIR")
    comm.require_same(platform.python_version(), "version of Python")
    comm.require_same(torch.__version__, "version of torch")

    launchers = sorted(set(comm.all_gather(_launcher())) - {""})
    may_exist = resume or eval_only
    opened = comm.from_main_process(lambda: _open_folder(output_dir, may_exist, launchers))
    _require_shared(output_dir, opened.token)
    _start_log(output_dir)
    _output_dir = output_dir
    if opened.warning:
        logging.getLogger(__name__).warning(opened.warning)
    return resume or opened.is_restart


def output_dir() -> str | None:
    """The folder that this process has opened, or None."""
    return _output_dir


class _Opened(NamedTuple):
    is_restart: bool  # by the torchrun that has started the run in the folder
    token: str
    warning: str


def _launcher() -> str:
    """A name of the torchrun that started this process, or "" without torchrun.

    The number of a process is used again after its end; the moment at which it was started makes
    the name unique.
    """
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return ""
    parent = os.getppid()
    started = "unknown"
    # Linux has it in the 22nd field of this file (see proc(5)).  The second field is the name of
    # the program in brackets, which may hold spaces and brackets, so it is counted from its end.
    with contextlib.suppress(OSError), open(f"/proc/{parent}/stat") as file:
        fields_from_third = file.read().rpartition(")")[2].split()
        started = fields_from_third[22 - 3]
    return f"{platform.node()} {parent} {started} {os.environ['TORCHELASTIC_RUN_ID']}"


def _open_folder(folder: str, may_exist: bool, launchers: list[str]) -> _Opened:
    path = os.path.join(folder, _NOTE)
    note = _read_note(path)
    is_restart = any(launcher in note.get("launchers", []) for launcher in launchers)
    may_exist = may_exist or is_restart
    _require_usable(folder, may_exist)
    try:
        os.makedirs(folder, exist_ok=True)
        # Not cut to length 0: another job may hold it.
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    except OSError as error:
        raise SettingsError(f"OUTPUT_DIR: cannot write to {folder}: {error.strerror}") from None
    file = os.fdopen(descriptor, "r+", encoding="utf-8")
    warning = _lock(file, folder, note)
    _require_usable(folder, may_exist)
    token = uuid.uuid4().hex
    _write_note(file, token, launchers)
    return _Opened(is_restart, token, warning)


def _lock(file: IO, folder: str, note: dict) -> str:
    """Lock the file; return a warning if the file system has no locks, else ""."""
    # A lock belongs to the process, and is lost when the process closes any file object of this
    # path.  So this one stays open, and nothing in this process opens the path again.
    _locks.append(file)
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in _HELD_BY_ANOTHER:
            holder = note.get("process", "unknown")
            raise SettingsError(
                f"OUTPUT_DIR: {folder} is in use by another job ({holder}): wait for its end, stop"
                " it, or change OUTPUT_DIR"
            ) from None
        return (
            f"OUTPUT_DIR: {folder} has no locks ({error.strerror}): see that only one job at a time"
            " uses it"
        )
    return ""


def _read_note(path: str) -> dict:
    """What launcher.txt says: {"process": ..., "token": ..., "launchers": [...]}, or {}."""
    note = {"launchers": []}
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            for line in file:
                key, _, value = line.rstrip("\n").partition(": ")
                if key == "launcher":
                    note["launchers"].append(value)
                else:
                    note[key] = value
    except OSError:
        return {}
    return note


def _write_note(file: IO, token: str, launchers: list[str]) -> None:
    file.seek(0)
    file.truncate()
    file.write(f"process: {os.getpid()} on {platform.node()}\n")
    file.write(f"token: {token}\n")
    for launcher in launchers:
        file.write(f"launcher: {launcher}\n")
    file.flush()
    # Other machines see it after this.  Some network file systems refuse it.
    with contextlib.suppress(OSError):
        os.fsync(file.fileno())


def _require_shared(folder: str, token: str) -> None:
    """Check that all ranks see the file that rank 0 has written.  Collective."""
    sees_it = comm.is_main_process()
    # A network file system may show a new file a little later on other machines.
    deadline = time.monotonic() + _SECONDS_TO_SEE_A_FILE
    while not sees_it:
        sees_it = _read_note(os.path.join(folder, _NOTE)).get("token") == token
        if sees_it or time.monotonic() > deadline:
            break
        time.sleep(_POLL_SECONDS)
    for rank, (host, sees) in enumerate(comm.all_gather((platform.node(), sees_it))):
        if not sees:
            raise SettingsError(
                f"OUTPUT_DIR must be a folder that all nodes share: rank {rank} on {host} does not"
                f" see in {folder} what rank 0 has written there"
            )


def _require_usable(folder: str, may_exist: bool) -> None:
    """Check that the files of a run can be written, and that none of a run is in the way."""
    if not os.path.isdir(folder):
        return
    if not os.access(folder, os.W_OK):
        raise SettingsError(f"OUTPUT_DIR: cannot write to {folder}: its permissions forbid it")
    names = sorted(os.listdir(folder))
    for name in names:
        if not _FILES.fullmatch(name):
            continue
        path = os.path.join(folder, name)
        # Checkpoints are replaced and never written to.
        mode = os.R_OK if ".pth" in name else os.R_OK | os.W_OK
        if not os.path.isfile(path) or not os.access(path, mode):
            raise SettingsError(
                f"OUTPUT_DIR: {path} is not a file that can be read and written: move it away"
            )
    run_files = [name for name in names if _RUN.fullmatch(name)]
    if run_files and not may_exist:
        raise SettingsError(
            f"OUTPUT_DIR: {folder} holds a run ({run_files[0]}): add --resume to continue it, or"
            " change OUTPUT_DIR"
        )


def _start_log(folder: str) -> None:
    """Log to a file of this rank, and on rank 0 to the screen as well."""
    rank = comm.get_rank()
    name = "log.txt" if rank == 0 else f"log.txt.rank{rank}"
    handlers: list[logging.Handler] = []
    handlers.append(logging.FileHandler(os.path.join(folder, name), encoding="utf-8"))
    if rank == 0:
        handlers.append(logging.StreamHandler(sys.stdout))
    # A log that cannot be written, on a full disk, must not fill the screen with tracebacks.  The
    # next checkpoint ends the run with one line.
    logging.raiseExceptions = False
    logging.basicConfig(
        level="INFO", format=_LOG_FORMAT, datefmt=_DATE_FORMAT, handlers=handlers, force=True
    )
