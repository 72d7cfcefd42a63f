"""What the tests of the project share: a small run of train.py, here, on ranks, or from the shell.

A rank is a process that is forked off a server which holds torch already, and takes half a second
where one of torchrun takes six.
"""

import collections
import contextlib
import json
import logging
import multiprocessing
import os
import subprocess
import sys
import time
import warnings
from multiprocessing import forkserver
from pathlib import Path
from typing import Any, NamedTuple

import pytest

os.environ["CUDA_VISIBLE_DEVICES"] = ""  # the tests are for the CPU, wherever they run

import torch  # noqa: E402
from torch.distributed import TCPStore
from torch.utils._python_dispatch import TorchDispatchMode

ROOT = Path(__file__).parents[2] / "<<cookiecutter.project_slug>>"  # the project that is tested
sys.path.insert(0, str(ROOT))

from plumbing import comm  # noqa: E402

HERE = Path(__file__).parent
TIMEOUT = 300  # seconds after which a process is taken to hang
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2")
LAUNCHERS = {1: (), 2: TORCHRUN}  # number of ranks: what stands before train.py
# An epoch ends within iteration 5, the next one within iteration 11.
SMALL = """
    MODEL.DEVICE cpu MODEL.WIDTH 8 DATALOADER.NUM_WORKERS 0 SOLVER.BATCH_SIZE 240 SOLVER.MAX_ITER 12
    SOLVER.BASE_LR 0.3 SOLVER.WARMUP_ITERS 2 LOG_PERIOD 3 SOLVER.CHECKPOINT_PERIOD 2
    SOLVER.CHECKPOINTS_TO_KEEP 9 TEST.EVAL_PERIOD 4
"""

# torch wants to write to the real stderr, which pytest has replaced.  Tests read what is printed.
warnings.filterwarnings("ignore", "Unable to enable fault handler")

torch.set_num_threads(1)  # as everywhere below: then sums are the same to the bit
os.fsync = lambda descriptor: None  # these files need not outlive a power cut; a disk may take long


def arguments(output, words=""):
    """What follows train.py on a command line; settings in ``words`` prevail over the small ones.

    A "{output}" in ``words`` stands for the folder.
    """
    words = f"{SMALL} {words}".replace("{output}", str(output)).split()
    return ["--config", str(ROOT / "cfg.yaml"), "OUTPUT_DIR", str(output), *words]


def parse(words):
    from plumbing.arguments import parse_args

    return parse_args("", words)


@contextlib.contextmanager
def own_log():
    """Inside, a run may replace the handlers of the log; afterwards pytest has its own again."""
    root = logging.getLogger()
    handlers = root.handlers
    level = root.level
    root.handlers = []
    try:
        yield
    finally:
        for handler in root.handlers:
            handler.close()
        root.handlers = handlers
        root.setLevel(level)


def train_here(output, words=""):
    """Call train.main in this process; returns the results."""
    import train

    with own_log():
        return train.main(parse(arguments(output, words)))


class Rank(NamedTuple):
    code: int  # of the exit
    printed: str
    result: Any  # what the function returned; None when it did not


@pytest.fixture(scope="session", autouse=True)
def server():
    """Starts the process that ranks are forked off; it is ready a few seconds later."""
    preload = ["torch._dynamo", "torch.utils.tensorboard", "yacs.config", "pytest"]
    forkserver.set_forkserver_preload(preload)
    forkserver.ensure_running()


@pytest.fixture
def on_ranks(tmp_path):
    """on_ranks(number, function, *args) calls a function of a module on ranks: a list of Rank."""

    def call(number, function, *args):
        folder = tmp_path / f"ranks {time.monotonic_ns()}"
        folder.mkdir()
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        context = multiprocessing.get_context("forkserver")
        common = number, store.port, folder, function, args
        ranks = [context.Process(target=_rank, args=(rank, *common)) for rank in range(number)]
        for rank in ranks:
            rank.start()
        deadline = time.monotonic() + TIMEOUT
        for rank in ranks:
            rank.join(max(0, deadline - time.monotonic()))
        hanging = [rank for rank in ranks if rank.exitcode is None]
        for rank in hanging:
            rank.kill()
        assert not hanging, f"{len(hanging)} ranks hang in {function.__name__}"
        return [_read(folder, number, rank.exitcode) for number, rank in enumerate(ranks)]

    return call


def _rank(rank, number, port, folder, function, args):
    # As torchrun does.
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(number),
        LOCAL_WORLD_SIZE=str(number),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        TORCHELASTIC_USE_AGENT_STORE="True",
    )
    multiprocessing.set_start_method("fork", force=True)  # of loader workers
    with open(folder / f"{rank}.txt", "w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    from plumbing.launch import launch

    launch(lambda: (folder / f"{rank}.json").write_text(json.dumps(function(*args))))


def _read(folder, rank, code):
    result = folder / f"{rank}.json"
    result = json.loads(result.read_text()) if result.exists() else None
    return Rank(code, (folder / f"{rank}.txt").read_text(), result)


def shell(*words, **env):
    """Run ``python *words`` in the folder of train.py: the finished process."""
    return subprocess.run(
        [sys.executable, *map(str, words)],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", **env},
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
    )


@pytest.fixture(scope="session")
def runs(tmp_path_factory):
    """{1: output of a process of its own, 2: of two ranks under torchrun}, 12 iterations."""
    outputs = {}
    for num_ranks, launcher in LAUNCHERS.items():
        outputs[num_ranks] = tmp_path_factory.mktemp("runs") / "output"
        done = shell(*launcher, "train.py", *arguments(outputs[num_ranks]))
        assert done.returncode == 0, done.stdout + done.stderr
    return outputs


def read_events(folder):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    everything = {"scalars": 0, "images": 0, "histograms": 0}
    accumulator = EventAccumulator(str(folder), size_guidance=everything)
    accumulator.Reload()
    return accumulator


@contextlib.contextmanager
def counted_waits():
    """Inside, counts how often tensors are read, and the collectives: {"reads": 0, ...}."""
    counts = collections.Counter()

    class Watch(TorchDispatchMode):  # sees item(), float(), bool() and the like, and collectives
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            counts["reads"] += function is torch.ops.aten._local_scalar_dense.default
            counts["collectives"] += function.namespace == "c10d"
            return function(*args, **(kwargs or {}))

    def reading(function):
        def read(*args, **kwargs):
            counts["reads"] += 1
            return function(*args, **kwargs)

        return read

    with pytest.MonkeyPatch.context() as patch, Watch():
        for name in ("tolist", "numpy", "cpu"):
            patch.setattr(torch.Tensor, name, reading(getattr(torch.Tensor, name)))
        yield counts


@pytest.fixture
def as_rank(monkeypatch):
    """as_rank(rank, world_size): be one of several ranks."""

    def be(rank, world_size):
        monkeypatch.setattr(comm, "get_rank", lambda: rank)
        monkeypatch.setattr(comm, "get_world_size", lambda: world_size)

    return be


def settings(**solver):
    """The defaults, on the CPU, with other settings of SOLVER."""
    from defaults import get_cfg

    cfg = get_cfg()
    cfg.MODEL.DEVICE = "cpu"
    for key, value in solver.items():
        cfg.SOLVER[key] = value
    return cfg
