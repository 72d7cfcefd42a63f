"""What the tests share: short runs of train.py with the settings of cfg.yaml.

They look at what must stay true however the files beside plumbing/ are edited, so nothing here
knows the model or the data.
"""

import json
import logging
import multiprocessing
import os
import subprocess
import sys
from pathlib import Path

import pytest

# The tests are for the CPU, on any machine, and two processes must not fight for its cores.
os.environ["CUDA_VISIBLE_DEVICES"] = ""
os.environ["OMP_NUM_THREADS"] = "1"

import torch  # noqa: E402

import train  # noqa: E402
from plumbing import comm  # noqa: E402
from plumbing.arguments import parse_args  # noqa: E402

ROOT = Path(train.__file__).parent
TIMEOUT_SECONDS = 120
SHORT = """
    MODEL.DEVICE cpu SOLVER.MAX_ITER 12 SOLVER.WARMUP_ITERS 2 LOG_PERIOD 3
    SOLVER.CHECKPOINT_PERIOD 2 SOLVER.CHECKPOINTS_TO_KEEP 0 TEST.EVAL_PERIOD 4
"""

torch.set_num_threads(1)


def command_line(output, words=""):
    """What follows train.py on the command line of a short run; ``words`` prevail."""
    settings = f"OUTPUT_DIR {output} {SHORT} {words}".split()
    return ["--config", str(ROOT / "cfg.yaml"), *settings]


@pytest.fixture
def run():
    """run(output, words) trains in this process, and returns the results."""
    root = logging.getLogger()
    handlers = root.handlers
    level = root.level

    def call(output, words=""):
        return train.main(parse_args("", command_line(output, words)))

    yield call
    for handler in set(root.handlers) - set(handlers):
        handler.close()
    root.handlers = handlers
    root.setLevel(level)


def shell(*words):
    """Run ``python *words`` in the project's folder.  Returns the finished process."""
    return subprocess.run(
        [sys.executable, *map(str, words)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_SECONDS,
    )


def on_two_ranks(function, *args):
    """Call a function in two processes that are ranks.  Returns their exit codes.

    They are ranks as under torchrun: the function has to join them itself, as train.main does.
    """
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    context = multiprocessing.get_context("spawn")
    ranks = []
    for rank in range(2):
        process = context.Process(target=_be_rank, args=(rank, store.port, function, args))
        process.start()
        ranks.append(process)
    for process in ranks:
        process.join(TIMEOUT_SECONDS)
        if process.exitcode is None:
            process.kill()
    return [process.exitcode for process in ranks]


def _be_rank(rank, port, function, args):
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE="2",
        LOCAL_WORLD_SIZE="2",
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        TORCHELASTIC_USE_AGENT_STORE="True",
    )
    function(*args)
    # Threads of the process group that are still at work would abort the exit.
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


@pytest.fixture
def as_rank(monkeypatch):
    """as_rank(rank, world_size) makes the loaders believe that this process is one of several."""

    def be(rank, world_size):
        monkeypatch.setattr(comm, "get_rank", lambda: rank)
        monkeypatch.setattr(comm, "get_world_size", lambda: world_size)

    return be


def metrics_of(output):
    """The rows of metrics.json, without what depends on the clock."""
    rows = []
    for line in (output / "metrics.json").read_text().splitlines():
        row = json.loads(line)
        for name in ("time", "data_time", "samples_per_second", "eta_seconds"):
            row.pop(name, None)
        rows.append(row)
    return rows


def flat(tree, prefix=""):
    """{"model.layer.weight": tensor, ...} of nested dicts and lists."""
    if isinstance(tree, dict):
        items = tree.items()
    elif isinstance(tree, (list, tuple)):
        items = enumerate(tree)
    else:
        return {prefix: tree}
    leaves = {}
    for key, value in items:
        leaves.update(flat(value, f"{prefix}.{key}"))
    return leaves


def assert_same_state(output, other, name="model_final.pth"):
    """Compare two checkpoints bit for bit: model, optimizer and scheduler."""
    states = []
    for folder in (output, other):
        checkpoint = torch.load(folder / name, weights_only=True)
        parts = ("model", "optimizer", "scheduler", "scaler", "iteration")
        states.append(flat({part: checkpoint[part] for part in parts}))
    assert states[0].keys() == states[1].keys()
    for key, value in states[0].items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(value, states[1][key]), key
        else:
            assert value == states[1][key], key
