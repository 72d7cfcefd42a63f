"""What an optimizer loads on a resume."""

import logging

import torch

from plumbing.comm import SettingsError


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
