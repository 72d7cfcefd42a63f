import contextlib
import glob
import logging
import math
import os
import pickle
import re
from collections import defaultdict
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from plumbing import comm

from .files import load_file, save_file, write_atomically


class Checkpointer:
    """Saves and loads a model, and other objects with state_dict and load_state_dict by keyword.

    The model is saved bare, without what DataParallel, DistributedDataParallel and compile add.
    Only the main process writes, unless ``save_to_disk`` says so; without ``save_dir``, none.
    """

    def __init__(
        self, model: nn.Module, save_dir: str = "", *,
        save_to_disk: bool | None = None, **checkpointables: Any,
    ) -> None:  # fmt: skip
        parallel = nn.DataParallel, nn.parallel.DistributedDataParallel
        while isinstance(model, parallel) or hasattr(model, "_orig_mod"):
            model = model.module if isinstance(model, parallel) else model._orig_mod
        self.model, self.save_dir = model, save_dir
        self.save_to_disk = comm.is_main_process() if save_to_disk is None else save_to_disk
        self.logger = logging.getLogger("plumbing.checkpoint")
        self.checkpointables, self._resumed = {}, {}  # resumed, but no object has taken it yet
        for key, checkpointable in checkpointables.items():
            self.add_checkpointable(key, checkpointable)

    def add_checkpointable(self, key: str, checkpointable: Any) -> None:
        """Save this too; if its state has just been resumed, it gets it now."""
        if key in self.checkpointables:
            raise KeyError(f"{key} is a checkpointable already")
        if not hasattr(checkpointable, "state_dict"):
            raise TypeError(f"{key} has no state_dict: {type(checkpointable)}")
        self.checkpointables[key] = checkpointable
        if key in self._resumed:
            checkpointable.load_state_dict(self._resumed.pop(key))

    def save(self, name: str, tag_checkpoint: bool = True, **kwargs: Any) -> None:
        """Write ``name``.pth, with ``kwargs`` such as the iteration; all ranks call it.

        Floating point buffers are saved as means over the ranks; a resume begins at the newest tag.
        """
        if not self.save_dir:
            return
        path = os.path.join(self.save_dir, f"{name}.pth")
        with comm.averaged_buffers(self.model) as rank_buffers:
            data = {"model": self.model.state_dict(), "rank_buffers": rank_buffers}
            data.update((key, each.state_dict()) for key, each in self.checkpointables.items())
            data.update(kwargs)
            if self.save_to_disk:
                os.makedirs(self.save_dir, exist_ok=True)
                self.logger.info("Saving checkpoint to %s", path)
                save_file(path, data)
                if tag_checkpoint:
                    self.tag_last_checkpoint(f"{name}.pth")
        comm.last_checkpoint = path if tag_checkpoint else comm.last_checkpoint

    def tag_last_checkpoint(self, last_filename_basename: str) -> None:
        path = os.path.join(self.save_dir, "last_checkpoint")
        write_atomically(path, lambda file: file.write(last_filename_basename.encode()))

    def has_checkpoint(self) -> bool:
        return os.path.exists(os.path.join(self.save_dir, "last_checkpoint"))

    def get_checkpoint_file(self) -> str:
        """Path of the file that was tagged last; "" if none was."""
        path, name = os.path.join(self.save_dir, "last_checkpoint"), ""
        with contextlib.suppress(OSError, UnicodeDecodeError), open(path) as file:
            name = os.path.basename(file.read().strip())
        return os.path.join(self.save_dir, name) if name else ""

    def get_all_checkpoint_files(self) -> list[str]:
        names = sorted(os.listdir(self.save_dir)) if os.path.isdir(self.save_dir) else []
        return [os.path.join(self.save_dir, name) for name in names if name.endswith(".pth")]

    def load(self, path: str, checkpointables: list[str] | None = None) -> dict:
        """Load the model as far as it fits, and the objects of these names, by default all.

        Returns what else the file holds.  "" loads nothing, a damaged file is a SettingsError.
        """
        if not path:
            return {}
        self.logger.info("Loading the model from %s", path)
        keys = list(self.checkpointables) if checkpointables is None else checkpointables
        checkpoint = self._read(path, keys)
        if differences := _describe(self._load_model(checkpoint, path)):
            self.logger.warning("The model is not the one saved: %s", differences)
        self._load_checkpointables(checkpoint, path, keys)
        return checkpoint

    def resume_or_load(self, path: str, *, resume: bool = True) -> dict:
        """Resume from the newest good file, else load only a model from ``path``.  Collective.

        Returns what else a resumed file holds, otherwise {}.  It is a SettingsError if no file is
        good or the model is another one.
        """
        file = comm.from_main_process(self._newest_good_file) if resume else ""
        if not file:
            self.load(path, checkpointables=[])
            return {}
        self.logger.info("Resuming from %s", file)
        comm.last_checkpoint = file
        checkpoint = self._read(file, self.checkpointables)
        rank_buffers = checkpoint.get("rank_buffers")
        if differences := _describe(self._load_model(checkpoint, file)):
            advice = "restore its settings, or start elsewhere with this file as MODEL.WEIGHTS"
            raise comm.SettingsError(f"--resume: {file} has another model: {differences}: {advice}")
        if rank_buffers and len(rank_buffers["ranks"]) == comm.get_world_size():
            comm.load_buffers(self.model, rank_buffers, comm.get_rank())
        self._load_checkpointables(checkpoint, file, self.checkpointables)
        self._resumed = checkpoint
        return checkpoint

    def _newest_good_file(self) -> str:
        tagged = self.get_checkpoint_file()
        paths = self.get_all_checkpoint_files()
        found = [m for p in paths if (m := re.fullmatch(r".*/model_(\d{7,}|final|best)\.pth", p))]
        number_of = {m[0]: float({"final": "inf", "best": -1}.get(m[1], m[1])) for m in found}
        in_turn = [tagged] * bool(tagged) + sorted(number_of, key=number_of.get, reverse=True)
        files = {file: number_of.get(file, math.inf) for file in in_turn}
        for torn in glob.glob(os.path.join(glob.escape(self.save_dir), "model_*.pth.tmp")):
            with contextlib.suppress(OSError):
                os.remove(torn)
        final, end = "", -2  # of a shorter run perhaps, which went on: then others are newer
        for file, number in files.items():
            if number <= end:
                break
            try:
                iteration = self._read(file, self.checkpointables).get("iteration")
                fits = type(iteration) is int and number in (iteration, math.inf, -1)
                if not fits and (file in number_of or iteration is not None):
                    raise comm.SettingsError(f"checkpoint {file} is damaged: iteration {iteration}")
            except comm.SettingsError as error:
                if isinstance(error.__cause__, pickle.UnpicklingError):
                    raise  # not an accident: a file to look into, not to pass over
                self.logger.warning("Passing over a file: %s", error)
                continue
            if file == tagged or number < math.inf:
                return file
            final, end = file, iteration
        if files and not final:
            advice = "restore one from a backup, or start again in another OUTPUT_DIR"
            raise comm.SettingsError(f"--resume: no good checkpoint in {self.save_dir}: {advice}")
        if not final:
            self.logger.warning("nothing to resume in %s: starting from scratch", self.save_dir)
        return final

    def _read(self, path: str, keys: Iterable[str]) -> dict:
        """Read a file; a SettingsError if its parts of these names cannot be states."""
        checkpoint = load_file(path)
        owners = {"model": self.model, **{key: self.checkpointables[key] for key in keys}}
        for key, owner in owners.items():
            state, wanted = checkpoint.get(key, {}), owner.state_dict()
            if isinstance(wanted, dict) and not isinstance(state, dict):
                raise comm.SettingsError(f"checkpoint {path} is damaged: its {key} is no dict")
        for key, value in checkpoint["model"].items():
            if not (isinstance(value, (torch.Tensor, np.ndarray)) or key.endswith("_extra_state")):
                raise comm.SettingsError(f"checkpoint {path} is damaged: {key} is no tensor")
        return checkpoint

    def _load_model(self, checkpoint: dict, path: str) -> "_IncompatibleKeys":
        checkpoint.pop("rank_buffers", None)
        state = dict(checkpoint.pop("model"))
        for key in [key for key, value in state.items() if isinstance(value, np.ndarray)]:
            state[key] = torch.from_numpy(state[key])
        own_state = self.model.state_dict(keep_vars=True)
        parts = {key.partition(".")[0] for key in state}  # "module" or the like before every name?
        if len(parts) == 1 and not state.keys() & own_state.keys():
            state = {key.removeprefix(f"{min(parts)}."): value for key, value in state.items()}
        if own_state and not state.keys() & own_state.keys():
            names = f"{', '.join([*state][:3])}, not {', '.join([*own_state][:3])}: rename them"
            raise comm.SettingsError(f"{path} has nothing for this model: it holds {names}")
        incorrect_shapes, names_of = [], defaultdict(list)
        for key, own in own_state.items():
            names_of[id(own)].append(key)
            if key not in state or nn.parameter.is_lazy(own):
                continue
            shapes = [getattr(value, "shape", ()) for value in (state[key], own)]
            if shapes[0] != shapes[1]:
                del state[key]
                incorrect_shapes.append((key, *map(tuple, shapes)))
        missing, unexpected = self.model.load_state_dict(state, strict=False)
        # A shared tensor has several names, of which one in the file is enough.
        found = {key for names in names_of.values() for key in names if state.keys() & set(names)}
        found.update(key for key, *_ in incorrect_shapes)
        missing = [key for key in missing if key not in found]
        return _IncompatibleKeys(missing, unexpected, incorrect_shapes)

    def _load_checkpointables(self, checkpoint: dict, path: str, keys: Iterable[str]) -> None:
        for key in keys:
            if state := checkpoint.pop(key, None):
                self.checkpointables[key].load_state_dict(state)
            elif state is None or self.checkpointables[key].state_dict():  # else one that is off
                self.logger.warning("%s holds no %s, which starts anew", path, key)


class _IncompatibleKeys(NamedTuple):
    missing_keys: list[str]
    unexpected_keys: list[str]
    incorrect_shapes: list[tuple[str, tuple, tuple]]  # name, shape in the file, in the model


def _describe(incompatible: _IncompatibleKeys) -> str:
    groups = defaultdict(list)  # "missing", "layer": ["weight", "bias"]
    for what, keys in zip(("missing", "only in the file"), incompatible):
        for key in keys:
            groups[what, key.rpartition(".")[0]].append(key.rpartition(".")[2])
    parts = [f"{what}: {prefix}.{{{','.join(names)}}}" for (what, prefix), names in groups.items()]
    parts += [f"{name} is {old} in the file, {new} here" for name, old, new in incompatible[2]]
    return "; ".join(parts)
