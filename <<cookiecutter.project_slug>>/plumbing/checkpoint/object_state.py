"""The state of one object that is saved beside the model, by the kind of the object."""

import contextlib
import logging
import os
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from plumbing.errors import SettingsError

from .archive import copied
from .model_state import with_own_extra_states
from .optimizer_state import load_optimizer, save_optimizer
from .plain import to_plain_types
from .scheduler_state import is_scheduler_state, load_scheduler, save_scheduler
from .sharded import fit_to, has_shards

logger = logging.getLogger("plumbing.checkpoint")


def is_empty(state: Any) -> bool:
    """Whether a state is that of an object that is turned off, such as a GradScaler."""
    return isinstance(state, dict) and not state


def has_dict(owner: Any) -> bool:
    """Whether the state of an object is a dict for sure; its methods are not called."""
    return isinstance(owner, (nn.Module, Optimizer, LRScheduler))


def save_object(key: str, owner: Any, modules: dict[str, nn.Module]) -> Any:
    """Return the state of an object, in plain types.

    Args:
        modules: where the parameters of an optimizer may come from.
    """
    if isinstance(owner, Optimizer):
        state = save_optimizer(owner, modules)
    elif isinstance(owner, LRScheduler):
        state = save_scheduler(owner)
    else:
        state = owner.state_dict()
    return to_plain_types(state, key)


def load_object(
    key: str,
    owner: Any,
    state: Any,
    modules: dict[str, nn.Module],
    path: str,
    release: Callable[[Any], None],
) -> None:
    """Give an object the state that a file holds; without one it starts anew, with a warning.

    Args:
        state: None if the file has none.
        path: the file, for messages.
        release: is called with tensors of the file that are no longer needed.

    Raises:
        SettingsError: the state does not fit.
    """
    if state is None or is_empty(state):
        # The state is empty for a good reason if that of the object is empty, too.
        if isinstance(owner, nn.Module):
            logger.warning("%s holds no %s, whose weights stay as they were built", path, key)
        elif state is None or owner.state_dict():
            logger.warning("%s holds no %s, which starts anew", path, key)
        return
    with errors_in_one_line(path, key):
        if isinstance(owner, Optimizer):
            load_optimizer(owner, state, modules, path, release)
        elif isinstance(owner, LRScheduler):
            load_scheduler(owner, state, path)
        # A scheduler that is not torch's now took the place of one.
        elif is_scheduler_state(state):
            raise SettingsError(
                f"--resume: {path} holds the state of {state['kind']} as {key}, which is a"
                f" {type(owner).__name__} now: build the same kind again"
            )
        elif isinstance(owner, nn.Module):
            own_state = with_own_extra_states(state)
            owner.load_state_dict(fit_to(owner.state_dict(), own_state))
        else:
            # The object may keep the tensors, which must not be part of a file then.
            own_state = copied(state)
            release(state)
            if has_shards(own_state):
                own_state = fit_to(owner.state_dict(), own_state)
            owner.load_state_dict(own_state)
    release(state)


@contextlib.contextmanager
def errors_in_one_line(path: str, what: str) -> Iterator[None]:
    """Turn what an object raises about its state into one line with the file and the place."""
    try:
        yield
    except (SettingsError, torch.OutOfMemoryError):
        raise
    except (AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        # The innermost place is the one that a user of an own class has to look at.
        frame = traceback.extract_tb(error.__traceback__)[-1]
        reason = " ".join(str(error).split())
        raise SettingsError(
            f"{path}: the state of {what} does not fit: {type(error).__name__}: {reason}"
            f" ({os.path.basename(frame.filename)}, line {frame.lineno}): restore the code and the"
            " settings of the run, or choose a different file"
        ) from error
