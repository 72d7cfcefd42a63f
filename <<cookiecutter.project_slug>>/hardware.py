"""How the hardware is used: precision, kernels, several processes."""

import contextlib
import os

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from plumbing import comm


def setup_backends(cfg):
    """How torch computes in this process."""
    torch.set_float32_matmul_precision(cfg.FLOAT32_PRECISION)
    torch.backends.cudnn.benchmark = cfg.CUDNN_BENCHMARK and not cfg.DETERMINISTIC
    torch.backends.cudnn.deterministic = cfg.DETERMINISTIC
    if cfg.DETERMINISTIC:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when CUDA starts
    torch.use_deterministic_algorithms(cfg.DETERMINISTIC)


def build_autocast(cfg):
    """Context of the forward pass, to be entered again and again; without AMP it does nothing."""
    dtype = torch.float16 if cfg.SOLVER.AMP.DTYPE == "float16" else torch.bfloat16
    autocast = torch.autocast(cfg.MODEL.DEVICE, dtype)
    return autocast if cfg.SOLVER.AMP.ENABLED else contextlib.nullcontext()


def build_parallel(cfg, model):
    """The model as it is trained: on several ranks the gradients are averaged.

    Its parameters and their names stay those of ``model``.
    """
    if cfg.MODEL.CHANNELS_LAST:
        model.to(memory_format=torch.channels_last)  # inputs follow at the first convolution
    if comm.get_world_size() > 1:
        if cfg.MODEL.SYNC_BN:
            model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
        model = DistributedDataParallel(
            model,
            [comm.get_local_rank()] if cfg.MODEL.DEVICE == "cuda" else None,
            forward_sync_buffers=False,  # each rank has its own; see comm.averaged_buffers
            find_unused_parameters=cfg.MODEL.FIND_UNUSED_PARAMETERS,
            gradient_as_bucket_view=True,
            static_graph=cfg.MODEL.STATIC_GRAPH,
        )
    if cfg.MODEL.COMPILE:
        model.compile(backend=cfg.MODEL.COMPILE)
    return model
