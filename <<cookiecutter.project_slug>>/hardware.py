"""How the hardware is used: precision, kernels, several processes."""

import contextlib
import logging
import math
import os
import platform
import subprocess
import sys

import numpy as np
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from plumbing import comm
from plumbing.comm import NonFiniteError, SettingsError

logger = logging.getLogger(__name__)


def choose_device(name):
    """The device of this rank; "auto" is its GPU if the machine has GPUs, else the CPU."""
    num_gpus = torch.cuda.device_count()
    if name == "cpu" or (name == "auto" and num_gpus == 0):
        return torch.device("cpu")
    if comm.get_local_size() > num_gpus:
        ranks = f"{comm.get_local_size()} ranks on a machine with {num_gpus} GPUs"
        raise SettingsError(f"{ranks}: lower --nproc_per_node, or set MODEL.DEVICE to cpu")
    torch.cuda.set_device(comm.get_local_rank())
    return torch.device("cuda", comm.get_local_rank())


def setup_backends(cfg):
    """How torch computes in this process; the log begins with where that is."""
    _log_environment(cfg.MODEL.DEVICE)
    torch.set_float32_matmul_precision(cfg.FLOAT32_PRECISION)
    torch.backends.cudnn.allow_tf32 = cfg.FLOAT32_PRECISION != "highest"
    torch.backends.cudnn.benchmark = cfg.CUDNN_BENCHMARK and not cfg.DETERMINISTIC
    torch.backends.cudnn.deterministic = cfg.DETERMINISTIC
    if cfg.DETERMINISTIC:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS reads it later
    torch.use_deterministic_algorithms(cfg.DETERMINISTIC)


def build_autocast(cfg):
    """Context of the forward pass, to be entered again and again; without AMP it does nothing."""
    dtype = torch.float16 if cfg.SOLVER.AMP.DTYPE == "float16" else torch.bfloat16
    enabled = cfg.SOLVER.AMP.ENABLED
    return torch.autocast(cfg.MODEL.DEVICE, dtype) if enabled else contextlib.nullcontext()


def build_parallel(cfg, model):
    """The model as it is trained: on several ranks the gradients are averaged.

    Its parameters and their names stay those of ``model``.
    """
    refuse_what_is_not_finite(model)
    if cfg.MODEL.CHANNELS_LAST:
        model.to(memory_format=torch.channels_last)  # inputs follow at the first convolution
    if comm.get_world_size() > 1:
        if cfg.MODEL.SYNC_BN:
            model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
        model = OrderedDDP(
            model,
            [comm.get_local_rank()] if cfg.MODEL.DEVICE == "cuda" else None,
            forward_sync_buffers=False,  # each rank has its own; see comm.averaged_buffers
            find_unused_parameters=cfg.MODEL.FIND_UNUSED_PARAMETERS,
            gradient_as_bucket_view=True,
            static_graph=cfg.MODEL.STATIC_GRAPH,
        )
        model.reducer._push_all_rebuilt_params()
        model.reducer._rebuild_buckets()  # now, not after the first iteration
    if cfg.MODEL.COMPILE:
        model.compile(backend=cfg.MODEL.COMPILE)
    return model


def gradient_sync(model, enabled):
    """Around forward and backward: whether the ranks average the gradients then."""
    alone = enabled or not isinstance(model, DistributedDataParallel)
    return contextlib.nullcontext() if alone else model.no_sync()


def refuse_what_is_not_finite(model):
    """From now on a model with weights or statistics that are not finite gives no state to save.

    What is not finite now, such as a mask of -inf, may stay so.

    Raises:
        NonFiniteError: names what is not finite; on all ranks, for all have the same to save.
    """
    masks = _not_finite(model.state_dict())

    def check(module, state, prefix, metadata):
        if bad := [name for name in _not_finite(state) if name not in masks]:
            raise NonFiniteError(
                f"not finite, and so not saved: {', '.join(bad)}; last good checkpoint:"
                f" {comm.last_checkpoint}; lower SOLVER.BASE_LR, or look at the data"
            )

    model.register_state_dict_post_hook(check)


def _not_finite(state):
    """Names of the tensors that are not; one pass over each, without a copy of it."""
    names = []
    for name, value in state.items():
        if not isinstance(value, torch.Tensor) or nn.parameter.is_lazy(value):
            continue
        if value.layout != torch.strided:
            value = value.detach().to_sparse().coalesce().values()
        if value.is_complex():
            value = torch.view_as_real(value.detach().resolve_conj())
        if value.is_floating_point() and value.numel() > 0:
            wide = value.dtype in (torch.float32, torch.float64)
            low, high = torch.aminmax(value.detach() if wide else value.detach().float())
            if not (math.isfinite(low) and math.isfinite(high)):
                names.append(name)
    return names


class OrderedDDP(DistributedDataParallel):
    """Sends gradients in one order from the first iteration on: that of the backward pass.

    torch's own begins with the order of the forward pass and changes it after an iteration.  Three
    or more ranks then add up in another order, and a resumed run would differ in the last bits.
    The order is that of registration, reversed: best register modules in the order of their use.
    """

    def _build_params_for_reducer(self):
        return tuple(parts[::-1] for parts in super()._build_params_for_reducer())


def _log_environment(device):
    try:
        import tensorboard  # the writers load its parts later
    except ImportError:
        raise SettingsError("no tensorboard here: pip install -r requirements.txt") from None
    num_gpus = torch.cuda.device_count() if device == "cuda" else 0  # their names start CUDA
    gpus = [torch.cuda.get_device_name(i) for i in range(num_gpus)]
    cuda = f"CUDA {torch.version.cuda}, cuDNN {torch.backends.cudnn.version()}"
    changes = ", with changes" if _git("status", "--porcelain") else ""
    logger.info(
        f"""Environment:
Command line: {" ".join(sys.argv)}
Python {platform.python_version()}, torch {torch.__version__}, numpy {np.__version__}
tensorboard {tensorboard.__version__}, {cuda}
{platform.platform()}, {os.cpu_count()} CPUs, GPUs: {", ".join(gpus) or "none in use"}
{comm.get_world_size()} ranks, {comm.get_local_size()} of them on {platform.node()}
Code: {_git("rev-parse", "--verify", "HEAD").strip() or "no commit"}{changes}"""
    )


def _git(*args):
    folder = os.path.dirname(os.path.abspath(sys.argv[0]))
    with contextlib.suppress(OSError):
        return subprocess.run(["git", "-C", folder, *args], capture_output=True).stdout.decode()
    return ""
