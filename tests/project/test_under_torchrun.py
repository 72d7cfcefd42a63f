"""Runs under torchrun that end with an error: what it reports, and what the logs say."""

import re
import socket

import pytest
from conftest import HERE, TIMEOUT, TORCHRUN, arguments, shell
from shells import started

SLOW = HERE / "slow.py"
FAULTY = HERE / "faulty.py"

# An error is found in torchrun's report, and in the log of the rank.


def test_an_exception_on_one_rank_is_in_its_log_and_is_the_root_cause(tmp_path):
    done = shell(*TORCHRUN, FAULTY, *arguments(tmp_path / "run"), FAULT="bug")
    assert done.returncode == 1
    cause = done.stderr.partition("Root Cause")[2]
    assert re.search(r"rank\s*: 1 ", cause)
    assert "KeyError: 'a bug on rank 1'" in cause
    log = (tmp_path / "run/log.txt.rank1").read_text()
    assert "Traceback (most recent call last)" in log
    assert "KeyError: 'a bug on rank 1'" in log.splitlines()[-1]


def test_torchrun_shows_the_line_of_a_loss_that_is_not_finite_once(tmp_path):
    words = "LOG_PERIOD 20 SOLVER.CHECKPOINT_PERIOD 3 TEST.EVAL_PERIOD 7"
    done = shell(*TORCHRUN, FAULTY, *arguments(tmp_path / "run", words), FAULT="nan")
    assert done.returncode != 0
    message = "the loss is not finite at iteration 5 on rank 1: "
    assert done.stderr.count(f"\nerror: {message}") + done.stderr.startswith("error: ") == 1
    assert message in done.stderr.partition("Root Cause")[2]
    for name in ("log.txt", "log.txt.rank1"):
        assert message in (tmp_path / "run" / name).read_text()
    assert [path.name for path in (tmp_path / "run").glob("*.pth")] == ["model_0000002.pth"]


def test_an_exception_of_a_single_process_is_in_its_log(tmp_path):
    done = shell("-c", BUG, *arguments(tmp_path / "run"))
    assert done.returncode == 1
    assert "KeyError: 'a bug'" in done.stderr
    log = (tmp_path / "run/log.txt").read_text()
    assert "KeyError: 'a bug'" in log.splitlines()[-1]


BUG = """
import train
train.clip_grad_norm_ = lambda *_: {}["a bug"]
train.launch(train.main, train.parse_args(""))
"""


# Two launchers, as on two machines.


def free_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def on_two_nodes(tmp_path, words_of_node):
    """What the two launchers print together, each in a folder of its own; both have to fail."""
    rendezvous = ("--rdzv_backend", "c10d", "--rdzv_endpoint", f"127.0.0.1:{free_port()}")
    launcher = ("-m", "torch.distributed.run", "--nnodes", "2", "--nproc_per_node", "1")
    nodes = []
    for number, words in enumerate(words_of_node):
        folder = tmp_path / f"node {number}"
        folder.mkdir()
        command = (*launcher, *rendezvous, SLOW, *words)
        env = {"SLOW": "disk", "STARTED": str(tmp_path / "started")}
        nodes.append(started(*command, cwd=folder, **env))
    printed = [node.communicate(timeout=TIMEOUT)[0] for node in nodes]
    assert [node.returncode for node in nodes] == [1, 1], printed
    # The line stands on the node of rank 0.  The other one may only say that its peer is gone.
    return "\n".join(printed)


def test_other_settings_on_another_node_are_refused_before_anything_is_trained(tmp_path):
    output = tmp_path / "run"
    words = (arguments(output), arguments(output, "SOLVER.BASE_LR 0.05"))
    printed = on_two_nodes(tmp_path, words)
    # Either node may have rank 0.
    for values in (("0.3", "0.05"), ("0.05", "0.3")):
        line = "error: SOLVER.BASE_LR: {} on rank 0, but {} on rank 1: start all".format(*values)
        if line in printed:
            break
    else:
        pytest.fail(printed)
    assert not output.exists()


def test_a_disk_of_its_own_on_another_node_is_refused_before_anything_is_trained(tmp_path):
    words = arguments("output", "--resume")
    printed = on_two_nodes(tmp_path, (words, words))
    assert "error: OUTPUT_DIR must be a folder that all nodes share: rank 1 on " in printed
    assert list(tmp_path.rglob("*.pth")) == []
    assert list(tmp_path.rglob("metrics.json")) == []
