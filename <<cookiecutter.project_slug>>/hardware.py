"""How the hardware is used: precision, and several processes."""

import contextlib

import torch
from torch.nn.parallel import DistributedDataParallel

from plumbing import comm


def build_autocast(cfg):
    """Context of the forward pass, to be entered again and again; without AMP it does nothing."""
    dtype = torch.float16 if cfg.SOLVER.AMP.DTYPE == "float16" else torch.bfloat16
    autocast = torch.autocast(cfg.MODEL.DEVICE, dtype)
    return autocast if cfg.SOLVER.AMP.ENABLED else contextlib.nullcontext()


def build_parallel(cfg, model):
    """The model as it is trained: on several ranks the gradients are averaged."""
    if comm.get_world_size() == 1:
        return model
    return DistributedDataParallel(
        model,
        [comm.get_local_rank()] if cfg.MODEL.DEVICE == "cuda" else None,
        forward_sync_buffers=False,  # each rank has its own; see comm.averaged_buffers
        find_unused_parameters=cfg.MODEL.FIND_UNUSED_PARAMETERS,
        gradient_as_bucket_view=True,
    )
