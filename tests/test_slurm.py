"""train.sbatch under a real SLURM, which these tests start and end; slurm_cluster.py makes it."""

import os
import shutil
import sys
from pathlib import Path

import pytest
import torch
from conftest import run
from slurm_cluster import CPUS, Cluster, Job, missing_programs, wait_until

SETTINGS = """
    MODEL.DEVICE cpu MODEL.WIDTH 8 SOLVER.MAX_ITER 60 LOG_PERIOD 1 SOLVER.CHECKPOINT_PERIOD 1000
    TEST.EVAL_PERIOD 0
"""

# The first start of a job that is SLOW lasts for minutes; its next one is as fast as any.
SLOW = """

def slow_forward(self, *args, forward=DigitNet.forward):
    import os
    import time

    if self.training and "SLOW" in os.environ and "SLURM_RESTART_COUNT" not in os.environ:
        time.sleep(2)
    return forward(self, *args)


DigitNet.forward = slow_forward
"""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(missing_programs()), reason=f"no {', '.join(missing_programs())}"),
    pytest.mark.skipif(os.geteuid() != 0, reason="the daemons of SLURM need root"),
]


@pytest.fixture(scope="module")
def cluster(project, tmp_path_factory):
    """The cluster, with a project whose train.sbatch a user has edited as it says."""
    home = tmp_path_factory.mktemp("slurm")
    copy = Path(shutil.copytree(project, home / "my project"))
    script = copy / "train.sbatch"
    text = script.read_text()
    for line, edited in {
        "--nodes=1": "--nodes=2",
        "--gpus-per-node=8": "--gpus-per-node=2",
        "--time=24:00:00": "--time=30",
    }.items():
        assert text.count(f"#SBATCH {line}\n") == 1
        text = text.replace(f"#SBATCH {line}\n", f"#SBATCH {edited}\n")
    script.write_text(text)
    with (copy / "model.py").open("a") as file:
        file.write(SLOW)
    cluster = Cluster(home, copy)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.end()


@pytest.fixture(scope="module")
def weights(cluster):
    """The weights after a training by one launcher, with as many ranks as a job has."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    words = ["train.py", "--config", "cfg.yaml", "OUTPUT_DIR", "output", *SETTINGS.split()]
    run([*torchrun, "--nproc_per_node", "4", *words], cluster.project, OMP_NUM_THREADS="1")
    return torch.load(cluster.project / "output" / "model_final.pth")["model"]


def submit(cluster, output, *words, options=(), **env):
    """A job with the settings of these tests; the other words follow OUTPUT_DIR."""
    return cluster.submit(output, *SETTINGS.split(), *words, options=options, **env)


def is_the_same(weights, others):
    assert weights.keys() == others.keys()
    return all(torch.equal(weights[name], others[name]) for name in weights)


def test_a_job_on_two_nodes_trains_as_one_launcher_does(cluster, weights):
    job = submit(cluster, "output two nodes")
    assert job.wait_for_end() == "COMPLETED", job.log()
    assert "4 ranks, 2 of them on " in job.log()
    assert job.about()["NumCPUs"] == str(2 * CPUS)  # all that its nodes have
    assert is_the_same(job.weights(), weights)


def test_a_job_whose_time_is_over_saves_and_requeues_and_resumes_to_the_same_bits(cluster, weights):
    job = submit(cluster, "output_time", SLOW="1")
    job.wait_for_training()
    hours, minutes, _ = job.about()["RunTime"].split(":")
    # One to two minutes are left, which is less than the script asks for.
    limit = 60 * int(hours) + int(minutes) + 2
    cluster.call("scontrol", "update", f"JobId={job.number}", f"TimeLimit={limit}")
    job.wait_for_restart()
    cluster.call("scontrol", "update", f"JobId={job.number}", "TimeLimit=30")
    assert job.wait_for_end() == "COMPLETED", job.log()
    assert is_the_same(job.weights(), weights)
    # All of it stands in one log, in this order.
    lines = ["SIGUSR1", "Stopped by a signal", "goes back to the queue", "Resuming", "Finished"]
    places = [job.log().index(line) for line in lines]
    assert places == sorted(places)


def test_a_job_that_is_preempted_saves_and_requeues_and_resumes_to_the_same_bits(cluster, weights):
    job = submit(cluster, "output_preempted", options=["--partition=low"], SLOW="1")
    job.wait_for_training()
    cluster.call("sbatch", "--nodes=2", "--exclusive", "--output=/dev/null", "--wrap=true")
    assert job.wait_for_end() == "COMPLETED", job.log()
    assert job.about()["Restarts"] == "1"
    assert is_the_same(job.weights(), weights)
    assert "Resuming from" in job.log()


def test_a_job_resumes_after_the_failure_of_a_node_to_the_same_bits(cluster, weights):
    job = submit(cluster, "output_node", "SOLVER.CHECKPOINT_PERIOD", "2", SLOW="1")
    job.wait_for_training()
    wait_until(lambda: list(job.output.glob("*.pth")), cluster.logs)
    cluster.call("scontrol", "update", "NodeName=127.0.0.2", "State=DOWN", "Reason=test")
    job.wait_for_restart()
    assert job.wait_for_end() == "COMPLETED", job.log()
    assert is_the_same(job.weights(), weights)
    assert "Resuming from" in job.log()


def test_a_job_that_is_cancelled_saves_and_does_not_come_back_by_itself(cluster):
    options = ["--partition=cpu", "--nodes=1", "--gpus-per-node=0"]  # a rehearsal without GPUs
    job = submit(cluster, "output_cancelled", options=options, SLOW="1")
    job.wait_for_training()
    cluster.call("scancel", job.number)
    assert job.wait_for_end() == "CANCELLED", job.log()
    assert job.about()["Restarts"] == "0"
    assert "Stopped by a signal" in job.log()
    assert list(job.output.glob("model_*.pth"))
    again = submit(cluster, "output_cancelled", "--resume", options=options)
    assert again.wait_for_end() == "COMPLETED", again.log()
    assert "Resuming from" in again.log()


def test_a_job_that_fails_is_not_requeued(cluster):
    job = submit(cluster, "output_failed", "SOLVER.NO_SUCH_KEY", "1")
    assert job.wait_for_end() == "FAILED", job.log()
    assert job.about()["Restarts"] == "0"
    assert "error: command line: SOLVER.NO_SUCH_KEY: there is no such setting" in job.log()


def test_a_job_that_is_submitted_in_another_folder_is_refused_in_one_line(cluster, tmp_path):
    script = cluster.project / "train.sbatch"
    number = cluster.call("sbatch", "--parsable", script, cwd=tmp_path).strip()
    assert Job(cluster, number, tmp_path).wait_for_end() == "FAILED"
    message = f"error: no train.py in {tmp_path}: run sbatch in the folder of the project\n"
    assert (tmp_path / f"slurm-{number}.txt").read_text() == message
