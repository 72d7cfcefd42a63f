"""Saves and resumes a run."""

import logging
import os
from typing import Any, NamedTuple

from torch import nn

from plumbing import comm
from plumbing.errors import SettingsError, remember_checkpoint
from plumbing.files import write_atomically

from .agreement import check_folder, read_alike, read_newest
from .archive import CheckpointFile, copied, save_file
from .newest import remove_torn_files
from .object_state import is_empty
from .plain import to_plain_types
from .run_state import RunState
from .sharded import has_shards, link_checkpoint, take_sharded


class _Resumed(NamedTuple):
    """The file that a run was resumed from, until the next save that is tagged."""

    # Its content is what no object has taken so far.  Nothing of it is in memory if it is mapped.
    file: CheckpointFile
    iteration: Any
    rank_states: dict[str, list]
    rank_buffers: dict[str, dict]
    # The objects whose states are lost with the first save, if none with that name is added.
    untaken: set[str]


class Checkpointer:
    """Save and load a model, and other objects with state_dict and load_state_dict by keyword.

    The interface is fvcore's.  In addition:

    * Files are written whole or not at all, have checksums, and never run code when they are read.
      A resume takes the newest file that is whole (see newest.py).
    * Optimizers are saved by the names of their parameters, and keep the settings of the present
      run (see optimizer_state.py).  The schedulers of torch resume exactly (scheduler_state.py).
    * Each rank gets its own buffers back, such as batch-norm statistics.  The model in the file
      has the means over the ranks.
    * Weights that are not finite are not saved.
    * Tensors that are divided between the ranks (DTensors) are saved in a folder beside the file,
      each part by its rank, and are loaded into any number of ranks (see sharded.py).

    All ranks call ``save``, ``load`` and ``resume_or_load``, and so state_dict and load_state_dict
    of every object are called on all ranks.  The state of rank 0 is saved; see ``per_rank``.

    Args:
        model: its bare module is saved, without what DistributedDataParallel or compile add.
        save_dir: "" saves nothing.
        config: the settings as text; each file has them under "config".
        save_to_disk: whether this process writes; by default rank 0 does.
        per_rank: objects, by name, whose state is saved and resumed for each rank apart, such
            as the position in a stream.  A resume needs the same number of ranks then.
        checkpointables: all other objects, by name.
    """

    def __init__(
        self,
        model: nn.Module,
        save_dir: str = "",
        *,
        config: str = "",
        save_to_disk: bool | None = None,
        per_rank: dict[str, Any] | None = None,
        **checkpointables: Any,
    ) -> None:
        self._state = RunState(model)
        self.model = self._state.model
        self.checkpointables = self._state.checkpointables
        self.save_dir = save_dir
        self.config = config
        self.save_to_disk = comm.is_main_process() if save_to_disk is None else save_to_disk
        self.logger = logging.getLogger("plumbing.checkpoint")
        self._has_saved = False
        self._resumed: _Resumed | None = None
        for key, checkpointable in checkpointables.items():
            self.add_checkpointable(key, checkpointable)
        for key, checkpointable in (per_rank or {}).items():
            self.add_checkpointable(key, checkpointable, per_rank=True)

    def add_checkpointable(self, key: str, checkpointable: Any, per_rank: bool = False) -> None:
        """Save this object too; if its state has just been resumed, it gets it now."""
        self._state.add(key, checkpointable, per_rank)
        if self._resumed is not None:
            self._resumed.untaken.discard(key)
            file = self._resumed.file
            self._state.load_objects([key], file, self._resumed.rank_states)
            self._state.load_buffers([key], self._resumed.rank_buffers, file.path)

    # Saving

    def save(self, name: str, tag_checkpoint: bool = True, **kwargs: Any) -> None:
        """Write ``name``.pth.  Collective.

        Args:
            tag_checkpoint: whether a resume shall begin with this file.
            kwargs: what else to keep, such as the iteration.

        Raises:
            NonFiniteError: a weight is NaN or infinite on any rank; all ranks raise it.
            OSError: a file cannot be written.
        """
        if not self.save_dir:
            return
        self._state.refuse_used_names(kwargs.keys())
        path = os.path.join(self.save_dir, f"{name}.pth")
        # On all ranks: a state that cannot be saved is an error on all of them.
        with self._state.collected() as content:
            content.update(to_plain_types(kwargs))
            if self.config:
                content["config"] = self.config
            if self.save_to_disk:
                os.makedirs(self.save_dir, exist_ok=True)
                if not self._has_saved:
                    remove_torn_files(self.save_dir)
                self._keep_file_of_untaken_states()
                self.logger.info("Saving checkpoint to %s", path)
            content = self._with_shards(content, path)
            if self.save_to_disk:
                save_file(path, content)
                if tag_checkpoint:
                    self.tag_last_checkpoint(f"{name}.pth")
        self._has_saved = True
        # The best model is saved between two tagged files, and does not change the run.
        if tag_checkpoint:
            self._resumed = None
            remember_checkpoint(path)

    def _with_shards(self, content: dict, path: str) -> dict:
        """Write what is divided between the ranks; return what the file shall hold.  Collective."""
        divided: dict[str, Any] = {}
        content = {key: take_sharded(value, key, divided) for key, value in content.items()}
        if divided:
            # Imported here because it takes seconds.
            from .shard_files import save_shards

            content["sharded"] = save_shards(path, divided, self.save_to_disk)
        return content

    def link(self, source: str, name: str, tag_checkpoint: bool = False) -> None:
        """Give a file of the folder a second name, ``name``.pth, without writing it again."""
        if self.save_dir and self.save_to_disk:
            link_checkpoint(source, os.path.join(self.save_dir, f"{name}.pth"))
            if tag_checkpoint:
                self.tag_last_checkpoint(f"{name}.pth")

    def tag_last_checkpoint(self, last_filename_basename: str) -> None:
        """Make this file of the folder the one that a resume begins with."""
        path = os.path.join(self.save_dir, "last_checkpoint")
        write_atomically(path, lambda file: file.write(last_filename_basename.encode()))

    def has_checkpoint(self) -> bool:
        """Whether a file of the folder was tagged."""
        return os.path.exists(os.path.join(self.save_dir, "last_checkpoint"))

    def get_checkpoint_file(self) -> str:
        """Return the path of the file that was tagged last; "" if there is none."""
        try:
            with open(os.path.join(self.save_dir, "last_checkpoint")) as file:
                name = os.path.basename(file.read().strip())
        except (OSError, UnicodeDecodeError):
            return ""
        return os.path.join(self.save_dir, name) if name else ""

    def get_all_checkpoint_files(self) -> list[str]:
        """Return the paths of all checkpoints in the folder, sorted by name."""
        if not os.path.isdir(self.save_dir):
            return []
        names = sorted(os.listdir(self.save_dir))
        return [os.path.join(self.save_dir, name) for name in names if name.endswith(".pth")]

    # Loading

    def load(self, path: str, checkpointables: list[str] | None = None) -> dict:
        """Load as much of the model as fits, and other objects.  Collective.

        Args:
            path: "" loads nothing.
            checkpointables: names of the objects to load; by default all.

        Returns:
            What else the file holds.

        Raises:
            SettingsError: the file is damaged, or has nothing for this model, or is not the same
                on all ranks.
        """
        if not path:
            return {}
        if checkpointables is None:
            checkpointables = self._state.names()
        return copied(self._load(path, checkpointables))

    def resume_or_load(self, path: str, *, resume: bool = True) -> dict:
        """Resume from the newest whole file, or load only the model from ``path``.  Collective.

        Returns:
            What else the file holds that a run was resumed from, such as the iteration; {} if
            nothing was resumed.

        Raises:
            SettingsError: all files are damaged, or the model has changed, or the ranks do not
                see the same files; all ranks raise it.
        """
        file = None
        if resume:
            file = read_newest(self.save_dir, self.get_checkpoint_file(), self._state.read)
        if file is not None:
            return self._resume(file)
        if resume:
            self.logger.warning("Nothing to resume in %s: starting from scratch", self.save_dir)
        if path:
            self._load(path, [])
        return {}

    def resumed_file(self, iteration: int) -> str:
        """The file that this iteration was resumed from, if nothing was saved since; else ""."""
        if self._resumed is not None and self._resumed.iteration == iteration:
            return self._resumed.file.path
        return ""

    def _load(self, path: str, keys: list[str]) -> dict:
        """Load a file that need not be of this model; the rest is still part of the file."""
        self.logger.info("Loading the model from %s", path)
        file = read_alike(
            path, self._state.read, "MODEL.WEIGHTS must be the same file on all machines"
        )
        content = file.content
        # The folder of an exported model need not be there.
        if has_shards([content["model"], *(content.get(key) for key in keys)]):
            check_folder(file)
        # Neither belongs to what else a file holds.
        content.pop("rank_buffers", None)
        content.pop("checkpointables", None)
        advice = "rename the entries of the file, or choose a different file"
        differences = self._state.load_model(file, advice)
        if differences:
            self.logger.warning("The model is not the one that was saved: %s", differences)
        self._state.load_objects(keys, file, content.pop("per_rank", {}))
        return content

    def _resume(self, file: CheckpointFile) -> dict:
        """Load a file of this run."""
        path = file.path
        content = file.content
        self.logger.info("Resuming from %s", path)
        remember_checkpoint(path)
        rank_buffers = copied(content.pop("rank_buffers", {}))
        rank_states = copied(content.pop("per_rank", {}))
        saved_keys = content.pop("checkpointables", [])
        advice = "restore the settings of the run, or start elsewhere with it as MODEL.WEIGHTS"
        # Part by part: each gives back the memory of the file before the next one is loaded.
        differences = self._state.load_model(file, advice)
        if differences:
            raise SettingsError(f"--resume: {path} has a different model: {differences}: {advice}")
        self._state.load_objects(self._state.names(), file, rank_states)
        self._state.load_buffers(self._state.modules(), rank_buffers, path)

        rest = {key: value for key, value in content.items() if key not in saved_keys}
        untaken = set()
        for key in saved_keys:
            if key in rank_states or not is_empty(content.get(key, {})):
                untaken.add(key)
        # An evaluation wants nothing but the model.
        if untaken and self._state.names():
            self.logger.warning(
                "%s holds %s, but no object has this name: the next checkpoints are without it",
                path,
                ", ".join(sorted(untaken)),
            )
        iteration = rest.get("iteration")
        self._resumed = _Resumed(file, iteration, rank_states, rank_buffers, untaken)
        return copied(rest)

    def _keep_file_of_untaken_states(self) -> None:
        """Give the file with states that new files lack a name that is never deleted."""
        if self._resumed is None or not self._resumed.untaken:
            return
        names = sorted(self._resumed.untaken)
        self._resumed.untaken.clear()
        path = self._resumed.file.path
        stem = os.path.basename(path).removesuffix(".pth")
        kept = os.path.join(self.save_dir, f"{stem}_with_{'_'.join(names)}.pth")
        try:
            link_checkpoint(path, kept)
        except OSError as error:
            self.logger.warning("%s could not be kept: %s", path, error)
            return
        self.logger.warning(
            "New checkpoints have no %s; %s has it, and is not deleted: to go back to that file,"
            " write its name into last_checkpoint",
            ", ".join(names),
            kept,
        )
