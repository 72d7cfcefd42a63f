"""One file for all ranks: each of them must read the same content, or none trains.

When a run is resumed,

1. rank 0 looks for the newest whole file, and the others look whether they see any file at all;
2. they exchange what they found: all take the file of rank 0, or all raise the same error;
3. every rank reads that file, and they exchange its size and checksum;
4. each rank checks its share of the files in the folder beside it, if there is one; if one of
   them is damaged, all begin again without this file;
5. only if all have read the same does any rank load the content.

So a rank on a machine that does not share the folder, or has an older copy of it, is noticed before
anything is trained.
"""

import logging
import os
from collections.abc import Callable
from typing import NamedTuple

from plumbing import comm
from plumbing.errors import SettingsError

from .archive import CheckpointFile, Fingerprint
from .newest import find_newest, has_candidates

logger = logging.getLogger("plumbing.checkpoint")


# Each report below goes through one collective, in which a rank takes part also if it has failed.
# So no rank waits for another one in vain, and all raise the same error.
class _Found(NamedTuple):
    """What one rank reports about the folder."""

    has_candidates: bool
    # Of rank 0 only: the name of the file, and why there is none.
    name: str
    error: SettingsError | None


class _Read(NamedTuple):
    """What one rank reports about the file."""

    fingerprint: Fingerprint | None
    error: SettingsError | None


def read_newest(
    folder: str, tagged: str, read: Callable[[str], CheckpointFile]
) -> CheckpointFile | None:
    """Read the newest whole checkpoint of a folder, the same on all ranks.  Collective.

    Args:
        tagged: path of the tagged file; "" if there is none.
        read: reads a file, or raises SettingsError if it is damaged.

    Returns:
        None if there is nothing to resume.

    Raises:
        SettingsError: on all ranks, if no file is whole, or the ranks do not see the same files.
    """

    def read_with_folder(path: str) -> CheckpointFile:
        file = read(path)
        if file.shards is not None:
            file.shards.check_sizes()
        return file

    damaged: list[str] = []
    while True:
        path, file_of_main_process = agree_on_newest(
            folder,
            lambda: find_newest(folder, tagged, read_with_folder, damaged),
            has_candidates(folder, tagged),
        )
        if not path:
            return None
        known = {path: file_of_main_process} if file_of_main_process is not None else {}
        file = read_alike(
            path,
            # Rank 0 has read it already, to see whether it is whole.
            lambda path, known=known: known.get(path) or read_with_folder(path),
            "OUTPUT_DIR must be a folder that all ranks share",
        )
        error = _error_in_folder(file)
        if error is None:
            return file
        logger.warning("Passing over a file: %s", error)
        damaged.append(path)


def check_folder(file: CheckpointFile) -> None:
    """Check the folder of a checkpoint, each rank a share of it.  Collective if there is one.

    Raises:
        SettingsError: a file in it is damaged or missing; all ranks raise it.
    """
    error = _error_in_folder(file)
    if error is not None:
        raise error


def _error_in_folder(file: CheckpointFile) -> SettingsError | None:
    if file.shards is None:
        return None
    own_error = None
    try:
        file.shards.check(comm.get_rank(), comm.get_world_size())
    except SettingsError as caught:
        own_error = caught
    errors = [error for error in comm.all_gather(own_error) if error is not None]
    return errors[0] if errors else None


def agree_on_newest(
    folder: str, find: Callable[[], CheckpointFile | None], has_candidates: bool
) -> tuple[str, CheckpointFile | None]:
    """Let rank 0 choose the file that all ranks resume from.  Collective.

    Args:
        find: reads the newest whole file; it is called on rank 0 only.
        has_candidates: whether this rank sees any file to resume from.

    Returns:
        The path of the file, "" if there is nothing to resume; on rank 0 also the file, which has
        been read.

    Raises:
        SettingsError: on all ranks, if ``find`` raised it, or if only other ranks see files.
    """
    file = None
    error = None
    if comm.is_main_process():
        try:
            file = find()
        except SettingsError as caught:
            error = caught
    name = os.path.basename(file.path) if file is not None else ""
    every = comm.all_gather(_Found(has_candidates, name, error))
    if every[0].error is not None:
        raise every[0].error
    # Starting from scratch would overwrite the run that the other rank sees.
    for rank, found in enumerate(every):
        if found.has_candidates and not every[0].name:
            raise SettingsError(
                f"--resume: rank {rank} sees checkpoints in {folder}, and rank 0 sees none:"
                " OUTPUT_DIR must be a folder that all ranks share"
            )
    if not every[0].name:
        return "", None
    return os.path.join(folder, every[0].name), file


def read_alike(path: str, read: Callable[[str], CheckpointFile], advice: str) -> CheckpointFile:
    """Read a file on every rank, and check that all have read the same.  Collective.

    Args:
        read: reads the file, or raises SettingsError.
        advice: what the user can do if the ranks do not see the same file.

    Raises:
        SettingsError: the same on all ranks.
    """
    file = None
    fingerprint = None
    error = None
    try:
        file = read(path)
        fingerprint = file.fingerprint
    except SettingsError as caught:
        error = caught
    every = comm.all_gather(_Read(fingerprint, error))
    # If rank 0 cannot read the file either, sharing is not what is wrong.
    first = every[0]
    if first.error is not None:
        raise first.error
    for rank, other in enumerate(every):
        if other.error is not None:
            raise SettingsError(
                f"rank {rank} cannot read what rank 0 reads: {other.error}: {advice}"
            )
        if other.fingerprint != first.fingerprint:
            raise SettingsError(
                f"{path} on rank {rank} is not the file that rank 0 reads"
                f" ({_describe(other.fingerprint)}; on rank 0 {_describe(first.fingerprint)}):"
                f" {advice}"
            )
    return file


def _describe(fingerprint: Fingerprint) -> str:
    return f"{fingerprint.size} bytes, checksum {fingerprint.checksum:08x}"
