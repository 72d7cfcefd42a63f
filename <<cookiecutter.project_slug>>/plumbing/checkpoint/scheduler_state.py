"""The state of the learning rate schedulers of torch, such that a resume is exact.

The state dict of torch.optim.lr_scheduler lacks the learning rates, from which many schedulers
compute the next ones; torch expects the optimizer to bring them.  Here an optimizer keeps the
settings of the present run, so the rates are saved with the scheduler.
"""

from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from plumbing.errors import SettingsError

# What schedulers keep in the groups of the optimizer.
_KEPT = (
    "lr",
    "initial_lr",
    "max_lr",
    "min_lr",
    "momentum",
    "betas",
    "base_momentum",
    "max_momentum",
)


def save_scheduler(scheduler: LRScheduler) -> dict:
    """Return the state dict of a scheduler, its class, and the rates that it has set."""
    groups = []
    for group in scheduler.optimizer.param_groups:
        # Only what is there: SGD has a momentum, and Adam has betas.
        groups.append({key: group[key] for key in _KEPT if key in group})
    return {
        "kind": type(scheduler).__name__,
        "scheduler": scheduler.state_dict(),
        "groups": groups,
    }


def is_scheduler_state(state: Any) -> bool:
    """Whether ``save_scheduler`` made it."""
    return isinstance(state, dict) and state.keys() == {"kind", "scheduler", "groups"}


def load_scheduler(scheduler: LRScheduler, saved: Any, path: str) -> None:
    """Continue where a scheduler stopped; its settings are those of the file.

    Raises:
        SettingsError: the state is that of a different scheduler, or of other groups.
    """
    kind = type(scheduler).__name__
    if not is_scheduler_state(saved) or saved["kind"] != kind:
        saved_kind = saved["kind"] if is_scheduler_state(saved) else "a different kind"
        raise SettingsError(
            f"--resume: the learning rate scheduler is {kind}, and {path} holds the state of"
            f" {saved_kind}: build the same kind again"
        )
    groups = scheduler.optimizer.param_groups
    if len(saved["groups"]) != len(groups):
        raise SettingsError(
            f"--resume: the optimizer has {len(groups)} groups of parameters, and the scheduler in"
            f" {path} has {len(saved['groups'])}: restore the settings of the run"
        )
    scheduler.load_state_dict(saved["scheduler"])
    for group, saved_group in zip(groups, saved["groups"]):
        for key, value in saved_group.items():
            if isinstance(group.get(key), torch.Tensor):
                # A compiled step keeps hold of the tensor.
                group[key].fill_(value)
            else:
                group[key] = value
