"""The learning rate as a function of the iteration."""

from collections.abc import Callable

import torch

from plumbing.errors import SettingsError


class LRMultiplier:
    """Set the learning rate of each parameter group to its first one times a multiplier.

    Its state is the iteration alone, so a resumed run follows the settings as they are now: a
    base learning rate or a schedule that was edited takes effect.  (The schedulers of torch
    continue from the learning rate that was saved.)

    Args:
        optimizer: its groups have their base learning rates; all groups are there.
        multiplier: the factor, as a function of the iteration, which counts from 0.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, multiplier: Callable[[int], float]
    ) -> None:
        self.optimizer = optimizer
        self.multiplier = multiplier
        self.base_lrs = [float(group["lr"]) for group in optimizer.param_groups]
        self.iteration = 0
        self._set_learning_rates()

    def step(self) -> None:
        """Go to the next iteration."""
        self.iteration += 1
        self._set_learning_rates()

    def get_last_lr(self) -> list[float]:
        """Return the learning rate of each group in this iteration."""
        return [group["lr"] for group in self.optimizer.param_groups]

    def state_dict(self) -> dict[str, int]:
        return {"iteration": self.iteration}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        """Go to the iteration that was saved.

        Raises:
            SettingsError: the state is that of a different kind of scheduler.
        """
        if state_dict.keys() != {"iteration"}:
            raise SettingsError(
                "--resume: the run was saved with a different kind of learning rate scheduler:"
                " build the same kind again"
            )
        self.iteration = state_dict["iteration"]
        self._set_learning_rates()

    def _set_learning_rates(self) -> None:
        # Computed from the base learning rates each time: rounding errors do not add up, and any
        # iteration can be the next one.
        factor = self.multiplier(self.iteration)
        for group, base_lr in zip(self.optimizer.param_groups, self.base_lrs):
            if isinstance(group["lr"], torch.Tensor):
                # A compiled or captured step keeps hold of the tensor.
                group["lr"].fill_(base_lr * factor)
            else:
                group["lr"] = base_lr * factor
