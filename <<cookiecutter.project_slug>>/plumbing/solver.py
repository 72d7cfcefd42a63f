"""What an optimizer needs around it: the learning rate of an iteration, its state on resume."""

import logging
from collections.abc import Callable

import torch

from plumbing.comm import SettingsError


class LRMultiplier:
    """Sets each group's learning rate to its first one times ``factor(iteration)``."""

    def __init__(self, optimizer: torch.optim.Optimizer, factor: Callable[[int], float]) -> None:
        self.optimizer, self.factor = optimizer, factor
        self.base_lrs = [group["lr"] for group in optimizer.param_groups]
        self.load_state_dict({"iteration": 0})

    def step(self) -> None:
        """Go to the next iteration."""
        self.load_state_dict({"iteration": self.iteration + 1})

    def get_last_lr(self) -> list[float]:
        """Of each group, in this iteration."""
        return [group["lr"] for group in self.optimizer.param_groups]

    def state_dict(self) -> dict:
        return {"iteration": self.iteration}

    def load_state_dict(self, state: dict) -> None:
        self.iteration = state["iteration"]
        factor = self.factor(self.iteration)
        for group, base_lr in zip(self.optimizer.param_groups, self.base_lrs):
            group["lr"] = base_lr * factor


def keep_settings_on_load(optimizer: torch.optim.Optimizer, saved: dict) -> dict:
    """A load_state_dict_pre_hook: the state is loaded by parameter names, the settings stay."""
    named = [zip(group["param_names"], group["params"]) for group in saved["param_groups"]]
    state_of = {name: saved["state"].get(i) for group in named for name, i in group}
    groups = optimizer.state_dict()["param_groups"]
    if groups[0].keys() != saved["param_groups"][0].keys():
        kind = type(optimizer).__name__
        raise SettingsError(f"--resume: another optimizer than {kind} was saved: go back to it")
    state, new = {}, []
    for group, own in zip(groups, optimizer.param_groups):
        for i, name, parameter in zip(group["params"], own["param_names"], own["params"]):
            state[i] = state_of.get(name)
            if state[i] is None and saved["state"]:
                new.append(name)
                # The fused SGD wants a momentum for all parameters or for none.
                sgd = isinstance(optimizer, torch.optim.SGD)
                state[i] = {"momentum_buffer": torch.zeros_like(parameter)} if sgd else None
    if new:
        logging.getLogger(__name__).warning("The optimizer starts anew for %s", ", ".join(new))
    return {"state": {i: s for i, s in state.items() if s is not None}, "param_groups": groups}
