import logging
import os
import re
from collections import defaultdict
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from plumbing import comm

from .files import load_file, to_plain_types, write_atomically


class IncompatibleKeys(NamedTuple):
    missing_keys: list[str]
    unexpected_keys: list[str]
    incorrect_shapes: list[tuple[str, tuple, tuple]]  # name, shape in the file, in the model

    def __str__(self) -> str:
        shapes = [f"{name} {old} in the file, {new} here" for name, old, new in self[2]]
        parts = {
            "missing in the file": _grouped(self.missing_keys),
            "only in the file": _grouped(self.unexpected_keys),
            "other shapes": shapes,
        }
        return "; ".join(f"{what}: {', '.join(names)}" for what, names in parts.items() if names)


class Checkpointer:
    """Saves and loads a model, and other objects that have state_dict and load_state_dict.

    Args:
        model: saved bare, without what DataParallel, DistributedDataParallel and compile wrap.
        save_dir: folder of the files; "" saves nothing.
        save_to_disk: by default on the main process only.
        checkpointables: other objects, saved under the name of their keyword.
    """

    def __init__(
        self,
        model: nn.Module,
        save_dir: str = "",
        *,
        save_to_disk: bool | None = None,
        **checkpointables: Any,
    ) -> None:
        if isinstance(model, (DataParallel, DistributedDataParallel)):
            model = model.module
        self.model = getattr(model, "_orig_mod", model)
        self.save_dir = save_dir
        self.save_to_disk = comm.is_main_process() if save_to_disk is None else save_to_disk
        self.logger = logging.getLogger("plumbing.checkpoint")
        self.checkpointables = {}
        self._resumed = {}  # what was resumed and no object has taken yet
        for key, checkpointable in checkpointables.items():
            self.add_checkpointable(key, checkpointable)

    def add_checkpointable(self, key: str, checkpointable: Any) -> None:
        """Save this too; if its state was just resumed, it gets it now."""
        if key in self.checkpointables:
            raise KeyError(f"{key} is a checkpointable already")
        if not hasattr(checkpointable, "state_dict"):
            raise TypeError(f"{key} needs state_dict, which {type(checkpointable)} has not")
        self.checkpointables[key] = checkpointable
        if key in self._resumed:
            checkpointable.load_state_dict(self._resumed.pop(key))

    def save(self, name: str, tag_checkpoint: bool = True, **kwargs: Any) -> None:
        """Write ``name``.pth.  All ranks call it; buffers are saved as their mean over the ranks.

        Args:
            tag_checkpoint: whether a resume is to start from this file.
            kwargs: more to save, such as the iteration.
        """
        if not self.save_dir:
            return
        with comm.averaged_buffers(self.model) as rank_buffers:
            data = {"model": self.model.state_dict(), "rank_buffers": rank_buffers}
            data.update((key, each.state_dict()) for key, each in self.checkpointables.items())
            data.update(kwargs)
            if self.save_to_disk:
                os.makedirs(self.save_dir, exist_ok=True)
                path = os.path.join(self.save_dir, f"{name}.pth")
                self.logger.info("Saving checkpoint to %s", path)
                write_atomically(path, lambda file: torch.save(to_plain_types(data), file))
                if tag_checkpoint:
                    self.tag_last_checkpoint(os.path.basename(path))

    def tag_last_checkpoint(self, last_filename_basename: str) -> None:
        path = os.path.join(self.save_dir, "last_checkpoint")
        write_atomically(path, lambda file: file.write(last_filename_basename.encode()))

    def has_checkpoint(self) -> bool:
        return os.path.exists(os.path.join(self.save_dir, "last_checkpoint"))

    def get_checkpoint_file(self) -> str:
        """Path of the file that was tagged last, "" if none was."""
        try:
            with open(os.path.join(self.save_dir, "last_checkpoint")) as file:
                name = os.path.basename(file.read().strip())
        except (OSError, UnicodeDecodeError):
            name = ""
        return os.path.join(self.save_dir, name) if name else ""

    def get_all_checkpoint_files(self) -> list[str]:
        names = sorted(os.listdir(self.save_dir)) if os.path.isdir(self.save_dir) else []
        return [os.path.join(self.save_dir, name) for name in names if name.endswith(".pth")]

    def load(self, path: str, checkpointables: list[str] | None = None) -> dict:
        """Load a file; where the model differs from it, that is logged and left as it was.

        Args:
            path: "" loads nothing.
            checkpointables: names of the other objects to load, by default all.
        Returns:
            what else the file holds.
        Raises:
            SettingsError: the file is missing or damaged.
        """
        if not path:
            self.logger.info("No weights are given: the model starts from its initialization")
            return {}
        self.logger.info("Loading the model from %s", path)
        checkpoint = load_file(path)
        self._log_incompatible_keys(self._load_model(checkpoint))
        self._load_checkpointables(checkpoint, path, checkpointables)
        return checkpoint

    def resume_or_load(self, path: str, *, resume: bool = True) -> dict:
        """Resume from the newest good file in ``save_dir``, or load the model only.  Collective.

        Args:
            path: where the model comes from when there is nothing to resume; "" for nowhere.
        Returns:
            what else the file holds, such as the iteration; {} unless resumed.
        Raises:
            SettingsError: no file is good, or the model is another than the one that was saved.
        """
        file = comm.from_main_process(self._newest_good_file) if resume else ""
        if not file:
            self.load(path, checkpointables=[])
            return {}
        self.logger.info("Resuming from %s", file)
        checkpoint = load_file(file)
        rank_buffers = checkpoint.get("rank_buffers", [])
        incompatible = self._load_model(checkpoint)
        if any(incompatible):
            raise comm.SettingsError(
                f"--resume: the model in {file} is another one ({incompatible}): restore the"
                " settings, or start in a new OUTPUT_DIR with MODEL.WEIGHTS set to this file"
            )
        if len(rank_buffers) == comm.get_world_size():
            comm.load_buffers(self.model, rank_buffers[comm.get_rank()])
        self._load_checkpointables(checkpoint, file, None)
        self._resumed = checkpoint
        return checkpoint

    def _newest_good_file(self) -> str:
        tagged = self.get_checkpoint_file()
        numbered = [p for p in self.get_all_checkpoint_files() if re.search(r"_\d{7,}\.pth$", p)]
        numbered.sort(key=lambda path: int(re.findall(r"\d+", path)[-1]), reverse=True)
        files = [tagged] * bool(tagged) + [path for path in numbered if path != tagged]
        for file in files:
            try:
                load_file(file)
                return file
            except comm.SettingsError as error:
                self.logger.warning("Passing over a file: %s", error)
        if files:
            raise comm.SettingsError(
                f"--resume: none of the {len(files)} checkpoints in {self.save_dir} is good:"
                " restore one from a backup, or start again in another OUTPUT_DIR"
            )
        self.logger.warning("--resume: no checkpoint in %s: starting from scratch", self.save_dir)
        return ""

    def _load_model(self, checkpoint: dict) -> IncompatibleKeys:
        checkpoint.pop("rank_buffers", None)
        state = {key: torch.as_tensor(value) for key, value in checkpoint.pop("model").items()}
        if state and all(key.startswith("module.") for key in state):
            state = {key.removeprefix("module."): value for key, value in state.items()}
        incorrect_shapes = []
        for key, own in self.model.state_dict(keep_vars=True).items():
            if key in state and not nn.parameter.is_lazy(own) and state[key].shape != own.shape:
                shapes = tuple(state.pop(key).shape), tuple(own.shape)
                incorrect_shapes.append((key, *shapes))
        missing, unexpected = self.model.load_state_dict(state, strict=False)
        names_of = defaultdict(list)  # a shared tensor has several names, one of them is enough
        for key, own in self.model.state_dict(keep_vars=True).items():
            names_of[id(own)].append(key)
        found = {key for names in names_of.values() for key in names if state.keys() & set(names)}
        found.update(key for key, *_ in incorrect_shapes)
        missing = [key for key in missing if key not in found]
        return IncompatibleKeys(missing, unexpected, incorrect_shapes)

    def _log_incompatible_keys(self, incompatible: IncompatibleKeys) -> None:
        if any(incompatible):
            self.logger.warning("The model is not the one that was saved.  %s", incompatible)

    def _load_checkpointables(self, checkpoint: dict, path: str, keys: list[str] | None) -> None:
        for key in self.checkpointables if keys is None else keys:
            if key in checkpoint:
                self.checkpointables[key].load_state_dict(checkpoint.pop(key))
            else:
                self.logger.warning("%s holds no %s, which starts anew", path, key)


def _grouped(keys: list[str]) -> list[str]:
    """["a.b.weight", "a.b.bias", "c"] -> ["a.b.{weight, bias}", "c"]"""
    groups = defaultdict(list)
    for key in keys:
        prefix, _, name = key.rpartition(".")
        groups[prefix].append(name)
    return [
        ".".join(filter(None, [prefix, names[0] if len(names) == 1 else f"{{{', '.join(names)}}}"]))
        for prefix, names in groups.items()
    ]
