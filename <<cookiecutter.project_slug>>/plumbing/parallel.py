"""Data parallel training: each rank has a copy of the model, and they average the gradients."""

from typing import Any

import torch
from torch import nn

from plumbing.errors import SettingsError


class DistributedDataParallel(nn.parallel.DistributedDataParallel):
    """torch's, with an order of summation that is the same in every iteration.

    torch's own divides the parameters into buckets in the order of their registration, and after
    the first iteration once more in the order in which their gradients came.  With three or
    more ranks the sum of a gradient depends on its place in a bucket, so the first iteration
    after a resume would differ in the last bits from the same iteration of a run that
    was not stopped.  Here the buckets are final when the model is wrapped.

    The order is that of registration, reversed: the one in which the gradients come if modules are
    registered in the order of their use.  Any other order is right as well, but a bucket
    is then sent later than it could be.

    Other defaults than torch's: each rank keeps its own buffers, such as the statistics of batch
    norms; gradients are views of the buckets, which saves memory and a copy; device_ids is
    the GPU of the parameters.

    Args:
        module: the model, on its device, and the same on all ranks.
        device_ids: a list of one GPU; None finds out.
        options: all others of torch's class, such as find_unused_parameters=True for a model
            some of whose parameters are not used in every iteration.

    Raises:
        SettingsError: the model has no parameter to train.
    """

    def __init__(self, module: nn.Module, device_ids: list | None = None, **options: Any) -> None:
        if not any(parameter.requires_grad for parameter in module.parameters()):
            raise SettingsError("the model has no parameter that requires a gradient")
        if device_ids is None:
            device_ids = _device_ids(module)
        if "broadcast_buffers" not in options:
            options.setdefault("forward_sync_buffers", False)
        options.setdefault("gradient_as_bucket_view", True)
        # With find_unused_parameters, torch never divides into buckets again.
        self._is_order_final = not options.get("find_unused_parameters") or bool(
            options.get("static_graph")
        )
        super().__init__(module, device_ids, **options)
        if self._is_order_final:
            # These two private methods of torch's reducer do now what it would do in the second
            # iteration: take all parameters, in the order below, as the order of the gradients.
            self.reducer._push_all_rebuilt_params()
            self.reducer._rebuild_buckets()

    def _build_params_for_reducer(self) -> tuple[list, list]:
        """Override a private method of torch: reverse the parameters, as a backward pass does."""
        parameters, expect_sparse_gradient = super()._build_params_for_reducer()
        if self._is_order_final:
            return parameters[::-1], expect_sparse_gradient[::-1]
        return parameters, expect_sparse_gradient


def _device_ids(module: nn.Module) -> list[torch.device] | None:
    """The one GPU that holds all parameters; None for a CPU or several devices."""
    devices = {parameter.device for parameter in module.parameters()}
    if len(devices) == 1:
        (device,) = devices
        if device.type != "cpu":
            return [device]
    return None


def unwrap(model: nn.Module) -> nn.Module:
    """Return the model without what trains it in parallel or compiles it.

    Its parameters are those of ``model``, and their names are those of the model alone.
    """
    while True:
        if isinstance(model, (nn.parallel.DistributedDataParallel, nn.DataParallel)):
            model = model.module
        elif "_orig_mod" in model._modules:
            # What torch.compile(model) returns.  Its class is private, and importing it is slow.
            model = model._modules["_orig_mod"]
        else:
            return model
