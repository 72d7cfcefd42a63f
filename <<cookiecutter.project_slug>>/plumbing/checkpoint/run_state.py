"""Everything of a run that is saved: the model, and the objects beside it."""

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

from torch import nn

from plumbing import comm
from plumbing.buffers import averaged_buffers, load_buffers
from plumbing.errors import NonFiniteError, SettingsError, last_checkpoint
from plumbing.parallel import unwrap

from .archive import CheckpointFile, read_file
from .model_state import check_model_state, describe, load_model_state, not_finite
from .object_state import errors_in_one_line, has_dict, load_object, save_object
from .plain import to_plain_types
from .release import released_module_by_module
from .sharded import refuse_sharded

# Keys of a file that are not objects of the user.
_RESERVED = ("model", "config", "rank_buffers", "per_rank", "checkpointables", "sharded")


class RunState:
    """Collects the states of all objects, and hands them back.

    Of the objects in ``checkpointables`` the state of rank 0 counts, and of those in ``per_rank``
    that of each rank.

    Args:
        model: its bare module counts, without what DistributedDataParallel or compile add.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = unwrap(model)
        self.checkpointables: dict[str, Any] = {}
        self.per_rank: dict[str, Any] = {}
        # By the names of modules.  For example a mask of -inf, which is a buffer.
        self._may_be_infinite = {"model": set(not_finite(self.model.state_dict()))}

    def add(self, key: str, checkpointable: Any, per_rank: bool) -> None:
        """Add an object.

        Raises:
            KeyError: the name is used.
            TypeError: the object lacks a method.
        """
        self.refuse_used_names([key])
        for method in ("state_dict", "load_state_dict"):
            if not callable(getattr(checkpointable, method, None)):
                raise TypeError(
                    f"{key}, a {type(checkpointable).__name__}, has no {method}, so it cannot be"
                    " saved and resumed"
                )
        if isinstance(checkpointable, nn.Module):
            checkpointable = unwrap(checkpointable)
            self._may_be_infinite[key] = set(not_finite(checkpointable.state_dict()))
        if per_rank:
            self.per_rank[key] = checkpointable
        else:
            self.checkpointables[key] = checkpointable

    def names(self) -> list[str]:
        """Names of all objects beside the model."""
        return [*self.checkpointables, *self.per_rank]

    def modules(self) -> dict[str, nn.Module]:
        """The model and the other modules, by name."""
        modules = {"model": self.model}
        for key, checkpointable in self.checkpointables.items():
            if isinstance(checkpointable, nn.Module):
                modules[key] = checkpointable
        return modules

    def refuse_used_names(self, names: Iterable[str]) -> None:
        """Raise KeyError if one of these names is used."""
        used = {*_RESERVED, *self.names()}
        for name in names:
            if name in used:
                raise KeyError(f"{name} is in the checkpoints already: choose a different name")

    @contextlib.contextmanager
    def collected(self) -> Iterator[dict]:
        """Context of a save, in which floating point buffers are means over ranks.  Collective.

        Yields:
            The content of a file, in plain types.  Tensors that are divided between the ranks are
            DTensors.

        Raises:
            NonFiniteError: a weight is NaN or infinite on any rank; all ranks raise it.
            SettingsError: a tensor of an object in ``per_rank`` is divided between the ranks.
        """
        modules = self.modules()
        with contextlib.ExitStack() as stack:
            rank_buffers = {}
            for key, module in modules.items():
                all_buffers = stack.enter_context(averaged_buffers(module))
                if all_buffers:
                    rank_buffers[key] = all_buffers
            # Each state_dict is called on all ranks, because some of them communicate.
            content = {"model": to_plain_types(self.model.state_dict(), "model")}
            for key, checkpointable in self.checkpointables.items():
                content[key] = save_object(key, checkpointable, modules)
            self._refuse_what_is_not_finite({key: content[key] for key in modules})
            if self.per_rank:
                own = {key: save_object(key, each, modules) for key, each in self.per_rank.items()}
                refuse_sharded(own, "per_rank")
                every = comm.all_gather(own)
                # From a list of dicts to a dict of lists.
                content["per_rank"] = {key: [states[key] for states in every] for key in own}
            content["rank_buffers"] = rank_buffers
            content["checkpointables"] = self.names()
            yield content

    def read(self, path: str) -> CheckpointFile:
        """Read a file, and check that its parts can be the states of these objects.

        Rank 0 may call this alone, so no method of an object is called here.

        Raises:
            SettingsError: the file is damaged.
        """
        file = read_file(path)
        check_model_state(file.content["model"], path)
        for key, checkpointable in self.checkpointables.items():
            if has_dict(checkpointable) and not isinstance(file.content.get(key, {}), dict):
                raise SettingsError(f"checkpoint {path} is damaged: its {key} is not a dict")
        return file

    def load_model(self, file: CheckpointFile, advice: str) -> str:
        """Load as much of the model as fits, and remove it from the file's content.

        Args:
            advice: what the user can do if nothing fits.

        Returns:
            What does not fit, in one line; "" if all does.
        """
        state = file.content.pop("model")
        with (
            errors_in_one_line(file.path, "the model"),
            released_module_by_module(self.model, state, file.release),
        ):
            incompatible = load_model_state(self.model, state, file.path, advice)
        file.release(state)
        return describe(incompatible)

    def load_objects(
        self, keys: Iterable[str], file: CheckpointFile, rank_states: dict[str, list]
    ) -> None:
        """Load the objects of these names, and remove their states from the file's content.

        Args:
            rank_states: of the objects in ``per_rank``, the states of all ranks.
        """
        modules = self.modules()
        # Modules come first, while the optimizers, which are larger, have no state yet.
        for key in sorted(keys, key=lambda key: key not in modules):
            if key in self.checkpointables:
                owner = self.checkpointables[key]
                state = file.content.pop(key, None)
            else:
                owner = self.per_rank[key]
                state = _state_of_this_rank(key, rank_states.pop(key, None), file.path)
            load_object(key, owner, state, modules, file.path, file.release)

    def load_buffers(self, keys: Iterable[str], rank_buffers: dict[str, dict], path: str) -> None:
        """Give each rank its own buffers, if there are as many ranks as were saved."""
        modules = self.modules()
        for key in keys:
            saved = rank_buffers.get(key)
            # With a different number of ranks, the means that the module has loaded are right.
            if saved and len(saved["ranks"]) == comm.get_world_size():
                with errors_in_one_line(path, f"the buffers of {key}"):
                    load_buffers(modules[key], saved, comm.get_rank())

    def _refuse_what_is_not_finite(self, states: dict[str, dict]) -> None:
        """Raise NonFiniteError if a weight on any rank is not finite.  Collective.

        Args:
            states: of the model and the other modules, by name.
        """
        own = []
        for key, state in states.items():
            prefix = "" if key == "model" else f"{key}."
            for name in not_finite(state):
                if name not in self._may_be_infinite[key]:
                    own.append(f"{prefix}{name}")
        # A rank alone that raises would leave the others waiting for it.
        for names in comm.all_gather(own):
            if names:
                raise NonFiniteError(
                    f"nothing is saved, because these weights are not finite: {', '.join(names)};"
                    f" last good checkpoint: {last_checkpoint()}; lower SOLVER.BASE_LR, or check"
                    " the data"
                )


def _state_of_this_rank(key: str, states: list | None, path: str) -> Any:
    if states is None:
        return None
    if len(states) != comm.get_world_size():
        raise SettingsError(
            f"--resume: {path} holds the {key} of {len(states)} ranks, and there are"
            f" {comm.get_world_size()}: start {len(states)} processes"
        )
    return states[comm.get_rank()]
