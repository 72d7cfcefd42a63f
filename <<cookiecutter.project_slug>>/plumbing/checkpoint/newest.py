"""Which checkpoint of a folder a run is resumed from."""

import contextlib
import logging
import os
import re
from collections.abc import Callable, Collection, Iterator
from typing import NamedTuple

from plumbing.errors import SettingsError

from .archive import CheckpointFile, UnsafeFileError, read_file
from .sharded import checkpoints_with_folders, remove_folders

logger = logging.getLogger("plumbing.checkpoint")

_NUMBERED = re.compile(r"model_(\d{7,})\.pth")
_FINAL = "model_final.pth"
_BEST = "model_best.pth"
_TORN = re.compile(r"model_.*\.pth\.tmp")


class Candidate(NamedTuple):
    """A file that a run may be resumed from."""

    path: str
    # The iteration that its name promises; None if any is right.
    number: int | None
    # Whether it must say which iteration it holds.
    needs_iteration: bool


def find_newest(
    folder: str,
    tagged: str,
    read: Callable[[str], CheckpointFile],
    damaged: Collection[str] = (),
) -> CheckpointFile | None:
    """Read the newest checkpoint of a folder that is whole.

    The candidates, in the order in which they are tried:

    1. the file that the tag "last_checkpoint" names;
    2. numbered files, the newest first, and among them the final file, whose number is the
       iteration that it holds (it may be that of a shorter run, which was continued later);
    3. the best file.

    A file is whole if its checksum is right, if its parts can be states, and if it holds the
    iteration that its name promises.  Each other one is passed over with a warning.

    Args:
        tagged: path of the tagged file; "" if there is none.
        read: reads a file, or raises SettingsError if it is damaged.
        damaged: paths that are already known to be damaged, and are passed over.

    Returns:
        None if the folder has no candidates.

    Raises:
        UnsafeFileError: a candidate holds code, which is no accident.
        SettingsError: there are candidates, and none of them is whole.
    """
    num_tried = 0
    for candidate in _candidates(folder, tagged):
        num_tried += 1
        if candidate.path in damaged:
            continue
        file = _read_if_whole(candidate, read)
        if file is not None:
            return file
    if num_tried > 0:
        raise SettingsError(
            f"--resume: no good checkpoint in {folder}: restore one from a backup, or start again"
            " with another OUTPUT_DIR"
        )
    return None


def has_candidates(folder: str, tagged: str) -> bool:
    """Whether a folder has files that a run may be resumed from; none is read."""
    names = _names_in(folder)
    numbered = any(_NUMBERED.fullmatch(name) for name in names)
    return bool(tagged) or numbered or _FINAL in names or _BEST in names


def remove_torn_files(folder: str) -> None:
    """Remove what is left of saves that a kill cut off."""
    for name in _names_in(folder):
        if _TORN.fullmatch(name):
            with contextlib.suppress(OSError):
                os.remove(os.path.join(folder, name))
    for path in checkpoints_with_folders(folder):
        with contextlib.suppress(SettingsError):
            remove_folders(path, but_token=_token_in(path))


def _candidates(folder: str, tagged: str) -> Iterator[Candidate]:
    if tagged:
        match = _NUMBERED.fullmatch(os.path.basename(tagged))
        # A user may have written any name into the tag.
        yield Candidate(tagged, int(match[1]) if match else None, match is not None)
    names = _names_in(folder)
    in_turn = []
    for name in names:
        match = _NUMBERED.fullmatch(name)
        if match:
            in_turn.append(Candidate(os.path.join(folder, name), int(match[1]), True))
    if _FINAL in names:
        final = Candidate(os.path.join(folder, _FINAL), None, True)
        in_turn.append(final._replace(number=_iteration_of(final.path)))
    # Without an iteration, a final file is damaged: it comes last, and gets its warning there.
    in_turn.sort(key=lambda candidate: -1 if candidate.number is None else candidate.number)
    for candidate in reversed(in_turn):
        if candidate.path != tagged:
            yield candidate
    best = os.path.join(folder, _BEST)
    if _BEST in names and best != tagged:
        yield Candidate(best, None, True)


def _read_if_whole(
    candidate: Candidate, read: Callable[[str], CheckpointFile]
) -> CheckpointFile | None:
    try:
        file = read(candidate.path)
        iteration = file.content.get("iteration")
        # A bool is an int for isinstance.
        is_known = type(iteration) is int
        if (candidate.needs_iteration or iteration is not None) and not is_known:
            raise SettingsError(f"checkpoint {candidate.path} is damaged: iteration {iteration}")
        if candidate.number is not None and iteration != candidate.number:
            raise SettingsError(
                f"checkpoint {candidate.path} is not what its name says: it holds iteration"
                f" {iteration}"
            )
    except UnsafeFileError:
        # Somebody has put this file here: passing over it would hide that.
        raise
    except SettingsError as error:
        logger.warning("Passing over a file: %s", error)
        return None
    return file


def _token_in(path: str) -> str:
    """The token of the folder that a file knows; "" if there is no file, or none for a folder.

    Raises:
        SettingsError: the file is damaged, so it is not known which folder is right.
    """
    if not os.path.exists(path):
        return ""
    shards = read_file(path, check_tensors=False).shards
    return shards.record["token"] if shards is not None else ""


def _iteration_of(path: str) -> int | None:
    try:
        iteration = read_file(path, check_tensors=False).content.get("iteration")
    except UnsafeFileError:
        raise
    except SettingsError:
        return None
    return iteration if type(iteration) is int else None


def _names_in(folder: str) -> list[str]:
    if not os.path.isdir(folder):
        return []
    return sorted(os.listdir(folder))
