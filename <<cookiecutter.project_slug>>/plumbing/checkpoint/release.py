"""Memory while a model is loaded: at any moment, few pages of the file beside the model itself."""

import contextlib
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn


@contextlib.contextmanager
def released_module_by_module(
    model: nn.Module, state: dict[str, Any], release: Callable[[Any], None]
) -> Iterator[None]:
    """Context of a load_state_dict, in which each module gives back what it has copied.

    Without it, a model that was loaded would stand in memory beside all pages of its file.

    Args:
        state: what is loaded.  Names that the model does not know are left to the caller.
        release: is called with tensors that are no longer needed.
    """
    values_of_module = defaultdict(list)
    for name, value in state.items():
        if isinstance(value, torch.Tensor):
            values_of_module[str(name).rpartition(".")[0]].append(value)
    handles = []
    for name, module in model.named_modules():
        if name in values_of_module:
            # torch calls it for every module, right after the module was loaded.
            hook = _Release(values_of_module[name], release)
            handles.append(module.register_load_state_dict_post_hook(hook))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


class _Release:
    """A hook that gives back the tensors of one module."""

    def __init__(self, values: list[torch.Tensor], release: Callable[[Any], None]) -> None:
        self._values = values
        self._release = release

    def __call__(self, module: nn.Module, incompatible_keys: Any) -> None:
        self._release(self._values)
