"""Where a run computes and how: what the log says of it at the start, and torch's switches."""

import logging
import os
import platform
import resource
import subprocess
import sys

import numpy as np
import torch

from plumbing import comm
from plumbing.errors import SettingsError

logger = logging.getLogger(__name__)

# gloo connects each rank with each other one, in two groups: that of the training, and that in
# which the ranks agree where to stop.
_CONNECTIONS_PER_RANK = 2
_OTHER_OPEN_FILES = 512  # logs, data, pipes of workers, libraries


def setup_backends(float32_precision: str, cudnn_benchmark: bool, deterministic: bool) -> None:
    """Set torch's switches of this process.

    Args:
        float32_precision: "highest", or "high" or "medium" for faster, less exact products of
            float32 matrices on GPUs, with TF32 or bfloat16 inside.
        cudnn_benchmark: whether cuDNN tries its algorithms for each new shape; it is off if
            ``deterministic`` is on.
        deterministic: whether torch uses only operations that give the same bits each time.
    """
    torch.set_float32_matmul_precision(float32_precision)
    torch.backends.cudnn.allow_tf32 = float32_precision != "highest"
    torch.backends.cudnn.benchmark = cudnn_benchmark and not deterministic
    torch.backends.cudnn.deterministic = deterministic
    if deterministic:
        # cuBLAS reads it when it is first used, and is not deterministic without it.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(deterministic)


def allow_open_files(num_ranks: int) -> None:
    """Raise this process's limit of open files if so many ranks need more; often it is 1,024.

    Raises:
        SettingsError: the machine does not allow as many.
    """
    needed = _CONNECTIONS_PER_RANK * num_ranks + _OTHER_OPEN_FILES
    limit, highest = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY or limit >= needed:
        return
    if highest != resource.RLIM_INFINITY and highest < needed:
        raise SettingsError(
            f"{num_ranks} ranks need {needed} open files each, and this machine allows {highest}:"
            " raise the hard limit (ulimit -Hn)"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed, highest))


def log_environment(device: torch.device) -> None:
    """Log the command, the versions, the machine and the commit of the code.

    Raises:
        SettingsError: tensorboard is not installed; the run would notice it only later.
    """
    try:
        import tensorboard
    except ImportError:
        raise SettingsError(
            "tensorboard is not installed: pip install -r requirements.txt"
        ) from None
    hardware = f"{os.cpu_count()} CPUs"
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        hardware = f"{torch.cuda.device_count()} GPUs ({name}), {hardware}"
    else:
        hardware = f"{hardware}, no GPU in use"
    versions = (
        f"Python {platform.python_version()}, torch {torch.__version__}, numpy {np.__version__},"
        f" tensorboard {tensorboard.__version__}"
    )
    if device.type == "cuda":
        cudnn = torch.backends.cudnn.version()
        versions = f"{versions}, CUDA {torch.version.cuda}, cuDNN {cudnn}"
    ranks = f"{comm.get_world_size()} ranks, {comm.get_local_size()} of them on {platform.node()}"
    logger.info(
        "Environment:\n"
        f"  command: {' '.join(sys.argv)}\n"
        f"  code: {_commit()}\n"
        f"  {versions}\n"
        f"  {platform.platform()}, {hardware}\n"
        f"  {ranks}"
    )


def _commit() -> str:
    commit = _git("rev-parse", "--verify", "HEAD")
    if not commit:
        return "no commit"
    if _git("status", "--porcelain"):
        return f"commit {commit}, with changes"
    return f"commit {commit}"


def _git(*arguments: str) -> str:
    """What git prints in the folder of the program, or "" if it fails or is not installed."""
    folder = os.path.dirname(os.path.abspath(sys.argv[0]))
    # git refuses a folder that belongs to another user, as in a container, unless it is told that
    # the folder is safe.
    command = ["git", "-c", "safe.directory=*", "-C", folder, *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace")
    except OSError:
        return ""
    return done.stdout.strip()
