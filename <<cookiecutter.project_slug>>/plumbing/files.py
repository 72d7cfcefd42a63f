"""Files that are whole or absent, whenever the process or the machine stops."""

import contextlib
import errno
import os
import shutil
from collections.abc import Callable
from typing import Any, BinaryIO

# How file systems say that they do not flush a folder, for example SMB and the mounts of WSL.
_FOLDER_CANNOT_BE_FLUSHED = {
    errno.EINVAL,
    errno.ENOTSUP,
    errno.EOPNOTSUPP,
    errno.EIO,
    errno.EBADF,
    errno.EACCES,
    errno.EPERM,
}


def write_atomically(path: str, write: Callable[[BinaryIO], Any]) -> None:
    """Write a file that appears under its name when it is whole and on the disk.

    If something fails, the file that had this name before stays as it was.

    Args:
        write: is called with a binary file, and writes its content.

    Raises:
        OSError: names ``path``.
    """
    temporary = f"{path}.tmp"
    try:
        with open(temporary, "w+b") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException as error:
        with contextlib.suppress(OSError):
            os.remove(temporary)
        # If the disk is full, torch.save raises an error of its own on top of the OSError.
        if isinstance(error.__context__, OSError):
            error = error.__context__
        if isinstance(error, OSError):
            error.filename = path
        raise error from None
    flush_folder(os.path.dirname(path))


def link_or_copy(source: str, path: str) -> None:
    """Give a file a second name; where the file system has no hard links, copy it.

    A file that has the name ``path`` is replaced.  Files that are later written by
    ``write_atomically`` do not change the other name, because each of them is a new file.
    """
    # Renaming one link of a file to another one does nothing and leaves both, so return before.
    if os.path.exists(path) and os.path.samefile(source, path):
        return
    temporary = f"{path}.tmp"
    with contextlib.suppress(OSError):
        os.remove(temporary)
    try:
        os.link(source, temporary)
    except OSError:
        with open(source, "rb") as original:
            write_atomically(path, lambda file: shutil.copyfileobj(original, file, 2**20))
        return
    os.replace(temporary, path)
    flush_folder(os.path.dirname(path))


def flush_folder(folder: str) -> None:
    """Make a new name in a folder outlive a power cut, if the file system can."""
    descriptor = None
    try:
        descriptor = os.open(folder or ".", os.O_RDONLY)
        os.fsync(descriptor)
    except OSError as error:
        # The file itself is on the disk; after a power cut only its name may be missing.
        if error.errno not in _FOLDER_CANNOT_BE_FLUSHED:
            raise
    finally:
        if descriptor is not None:
            os.close(descriptor)
