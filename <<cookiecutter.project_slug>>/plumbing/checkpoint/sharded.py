"""Tensors that are divided between the ranks, which torch calls DTensors, in a checkpoint.

torch's ``fully_shard`` makes them.  A checkpoint with such tensors is a file and a folder beside
it.  The order of events when all ranks save ``NAME``:

1. Rank 0 draws a token, so that the folder ``NAME.TOKEN.shards`` is a new one.
2. All ranks write their parts of the tensors into the folder, with torch.distributed.checkpoint,
   and flush them to the disk.  No rank gets the parts of another one.
3. They exchange the sizes and checksums of the files that they have written.
4. Rank 0 writes ``NAME.pth`` as always.  It holds everything else, the token, the sizes and the
   checksums, and a tensor without data (on the device "meta") in the place of each divided one.
5. Rank 0 removes other folders of this name.

A kill before step 4 has ended leaves the checkpoint that had this name before, with its folder, and
a folder that no file knows: the first save of the next session removes it.
"""

import functools
import glob
import os
import shutil
import sys
import zlib
from collections.abc import Iterable
from typing import Any

import torch

from plumbing.errors import SettingsError
from plumbing.files import flush_folder, link_or_copy

_CHUNK = 2**20


def is_sharded(value: Any) -> bool:
    """Whether a value is a DTensor, without an import that takes seconds."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)


def refuse_sharded(values: Any, what: str) -> None:
    """Raise SettingsError if there is a DTensor in nested dicts, lists and tuples."""
    if is_sharded(values):
        raise SettingsError(
            f"{what} is divided between the ranks (a DTensor), and the state of each rank apart"
            " can only hold whole tensors: give its object to the Checkpointer without per_rank"
        )
    for key, value in _items(values):
        refuse_sharded(value, f"{what}.{key}")


def take_sharded(values: Any, key: str, taken: dict[str, torch.Tensor]) -> Any:
    """Replace each DTensor in nested dicts, lists and tuples by a tensor without data.

    Args:
        key: of the values; that of a tensor is such as "model.layer.weight".
        taken: the DTensors are added here, by their keys.
    """
    if is_sharded(values):
        if key in taken:
            raise ValueError(f"two tensors of a checkpoint have the same name: {key}")
        taken[key] = values
        return torch.empty(values.shape, dtype=values.dtype, device="meta")
    return _mapped(values, lambda name, value: take_sharded(value, f"{key}.{name}", taken))


class ShardFolder:
    """The folder of a checkpoint; it need not be there as long as nothing is read from it.

    Args:
        path: of the file of the checkpoint.
        record: what the file holds about the folder: "token", and "files", {name: [size in bytes,
            checksum]}.
    """

    def __init__(self, path: str, record: dict) -> None:
        self.record = record
        self._path = path

    def find(self) -> str:
        """Return the path of the folder.

        A file that was renamed, or that a symbolic link points at, has a folder of another name
        with the same token.

        Raises:
            SettingsError: there is none.
        """
        token = self.record["token"]
        folder = _folder_of(self._path, token)
        if os.path.isdir(folder):
            return folder
        parent = glob.escape(os.path.dirname(self._path))
        others = glob.glob(os.path.join(parent, f"*.{token}.shards"))
        if not others:
            raise SettingsError(
                f"checkpoint {self._path} is not whole: the folder {folder} is missing; keep the"
                " two beside each other"
            )
        return others[0]

    def check_sizes(self) -> None:
        """Raise SettingsError unless all files are there and have their sizes; quick."""
        folder = self.find()
        for name, (size, _) in self.record["files"].items():
            path = os.path.join(folder, name)
            found = os.path.getsize(path) if os.path.isfile(path) else None
            if found != size:
                raise SettingsError(
                    f"checkpoint {self._path} is damaged: {path} must have {size} bytes and has"
                    f" {found}"
                )

    def check(self, rank: int = 0, num_ranks: int = 1) -> None:
        """Raise SettingsError if a file is damaged; each rank reads its share of the files."""
        self.check_sizes()
        folder = self.find()
        for name in sorted(self.record["files"])[rank::num_ranks]:
            path = os.path.join(folder, name)
            if checksum_of(path) != self.record["files"][name][1]:
                raise SettingsError(
                    f"checkpoint {self._path} is damaged: the checksum of {path} is wrong"
                )

    @functools.cached_property
    def reader(self) -> Any:
        # Imported here because it takes seconds.
        from .shard_files import ShardReader

        return ShardReader(self.find())


class SavedShards:
    """A divided tensor of a checkpoint that was read; its data are still in the files.

    Attributes:
        shape: of the whole tensor.
        dtype: of its elements.
    """

    def __init__(self, key: str, placeholder: torch.Tensor, folder: ShardFolder) -> None:
        self.shape = placeholder.shape
        self.dtype = placeholder.dtype
        self._key = key
        self._folder = folder

    def copy_to(self, tensor: torch.Tensor) -> None:
        """Read into a tensor of this shape; one that is divided gets the parts of this rank."""
        self._folder.reader.read_tensor(self._key, tensor)

    def full_tensor(self) -> torch.Tensor:
        """Read the whole tensor, on the CPU."""
        tensor = torch.empty(self.shape, dtype=self.dtype)
        self.copy_to(tensor)
        return tensor


def bind_shards(values: Any, key: str, folder: ShardFolder) -> Any:
    """Replace the tensors without data in what a file holds by ``SavedShards``."""
    if isinstance(values, torch.Tensor) and values.is_meta:
        return SavedShards(key, values, folder)
    return _mapped(values, lambda name, value: bind_shards(value, f"{key}.{name}", folder))


def unbind_shards(values: Any) -> Any:
    """Undo ``bind_shards``."""
    if isinstance(values, SavedShards):
        return torch.empty(values.shape, dtype=values.dtype, device="meta")
    return _mapped(values, lambda _, value: unbind_shards(value))


def has_shards(values: Any) -> bool:
    """Whether something in nested dicts, lists and tuples has to be read from a folder."""
    if isinstance(values, SavedShards):
        return True
    return any(has_shards(value) for _, value in _items(values))


def whole(values: Any) -> Any:
    """Read all tensors in nested dicts, lists and tuples that are in a folder."""
    if isinstance(values, SavedShards):
        return values.full_tensor()
    return _mapped(values, lambda _, value: whole(value))


def copy_saved(saved: torch.Tensor | SavedShards, target: torch.Tensor) -> torch.Tensor:
    """Copy a saved tensor into one of the same shape, whether any of them is divided or not."""
    target = target.detach()
    if isinstance(saved, SavedShards):
        saved.copy_to(target)
        return target
    if is_sharded(target):
        from torch.distributed.tensor import distribute_tensor

        # Every rank has the whole tensor, so none has to be sent.
        saved = distribute_tensor(
            saved.to(target.device), target.device_mesh, target.placements, src_data_rank=None
        )
    return target.copy_(saved)


def fit_to(own: Any, saved: Any) -> Any:
    """Divide the tensors of a saved state as those in the state of the object are now.

    Args:
        own: the present state of the object; what is not in it stays as it is.
        saved: nested dicts, lists and tuples.
    """
    if is_sharded(own) and isinstance(saved, (torch.Tensor, SavedShards)):
        return copy_saved(saved, torch.empty_like(own, dtype=saved.dtype, requires_grad=False))
    if isinstance(saved, SavedShards):
        return saved.full_tensor()
    own_items = dict(_items(own))
    return _mapped(saved, lambda key, value: fit_to(own_items.get(key), value))


# The folder and its names.  Only the rank that writes calls these.


def save_record(token: str, files: dict[str, tuple[int, int]]) -> dict:
    """Return what the file of a checkpoint holds about its folder."""
    return {"token": token, "files": {name: list(files[name]) for name in sorted(files)}}


def link_checkpoint(source: str, path: str) -> None:
    """Give a checkpoint, the file and its folder, a second name; see ``link_or_copy``."""
    seconds = []
    for folder in _folders_of(source):
        second = _folder_of(path, _token_of(folder))
        seconds.append(second)
        os.makedirs(second, exist_ok=True)
        for name in os.listdir(folder):
            link_or_copy(os.path.join(folder, name), os.path.join(second, name))
        flush_folder(os.path.dirname(path))
    link_or_copy(source, path)
    for folder in _folders_of(path):
        if folder not in seconds:
            shutil.rmtree(folder, ignore_errors=True)


def remove_checkpoint(path: str) -> None:
    """Remove a checkpoint, the file first: a folder without its file is a torn save."""
    os.remove(path)
    remove_folders(path)


def remove_folders(path: str, but_token: str = "") -> None:
    """Remove the folders of a checkpoint, except the one with this token."""
    for folder in _folders_of(path):
        if _token_of(folder) != but_token:
            shutil.rmtree(folder, ignore_errors=True)


def checkpoints_with_folders(parent: str) -> set[str]:
    """Return the paths of files, which may be missing, to which folders in ``parent`` belong."""
    folders = glob.glob(os.path.join(glob.escape(parent), "*.shards"))
    return {folder.rsplit(".", 2)[0] + ".pth" for folder in folders}


def checksum_of(path: str) -> int:
    """Return the CRC-32 of a file."""
    checksum = 0
    with open(path, "rb") as file:
        while chunk := file.read(_CHUNK):
            checksum = zlib.crc32(chunk, checksum)
    return checksum


def _folder_of(path: str, token: str) -> str:
    return f"{path.removesuffix('.pth')}.{token}.shards"


def _folders_of(path: str) -> list[str]:
    return glob.glob(_folder_of(glob.escape(path.removesuffix(".pth")), "*"))


def _token_of(folder: str) -> str:
    return folder.rsplit(".", 2)[1]


def _items(values: Any) -> Iterable[tuple[Any, Any]]:
    if isinstance(values, dict):
        return values.items()
    if isinstance(values, (list, tuple)):
        return enumerate(values)
    return ()


def _mapped(values: Any, function: Any) -> Any:
    """Call ``function(key, value)`` for what is in a dict, list or tuple; keep anything else."""
    if isinstance(values, dict):
        return {key: function(key, value) for key, value in values.items()}
    if isinstance(values, (list, tuple)):
        return type(values)(function(key, value) for key, value in enumerate(values))
    return values
