"""Two launchers on this machine stand for two machines: they die, come back, leave and join."""

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from conftest import environment_of_a_shell

LIMIT = 600  # seconds after which a launcher is taken to hang
CLOCK = {"time", "data_time", "samples_per_second", "eta_seconds"}
# An epoch of 1,437 samples ends within every sixth iteration.
WORDS = """
    --config cfg.yaml MODEL.DEVICE cpu MODEL.WIDTH 8 DATALOADER.NUM_WORKERS 0 SOLVER.MAX_ITER 30
    SOLVER.BATCH_SIZE 240 LOG_PERIOD 3 SOLVER.CHECKPOINT_PERIOD 5 TEST.EVAL_PERIOD 10
    TIMEOUT_SECONDS 300
"""
# Without this torch's launchers cannot take up one that comes back; recipes/README.md has it too.
REJOIN = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}

# Trains as train.py does, and appends to USED the samples that each iteration trained on.
# DIES: the machine of this rank dies in this iteration, with its launcher.
# ALONE: a single rank waits in this iteration until its launcher stops it, for a machine to join.
DRIVER = """
import json, os, signal, sys, time, uuid
sys.path.insert(0, os.getcwd())
import data
import train
from plumbing import comm, preemption
from plumbing.events import get_event_storage

dies = int(os.environ.get("DIES", -1))
alone = int(os.environ.get("ALONE", 10**9))


class Digits(data.Digits):
    def __getitem__(self, index):
        return {**super().__getitem__(index), "index": index}


def build_model(cfg):
    model = original(cfg)
    forward = model.forward
    session = comm.from_main_process(lambda: uuid.uuid4().hex)

    def recorded(batch):
        indices = batch.pop("index").tolist()
        if model.training:
            iteration = get_event_storage().iter
            if iteration == dies:
                os.kill(os.getppid(), signal.SIGKILL)
                os.kill(os.getpid(), signal.SIGKILL)
            while iteration >= alone and comm.get_world_size() == 1:
                if preemption.current_request()._signals.asked:
                    break
                time.sleep(0.1)
            row = [iteration, session, comm.get_world_size(), comm.get_rank(), indices]
            with open(os.environ["USED"], "a") as file:
                file.write(json.dumps(row) + chr(10))
        return forward(batch)

    model.forward = recorded
    return model


original = train.build_model
train.build_model = build_model
data.Digits = Digits
train.launch(train.main, train.parse_args(""))
"""


def free_port():
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return server.getsockname()[1]


def wait_until(is_true, what):
    deadline = time.monotonic() + LIMIT
    while not is_true():
        assert time.monotonic() < deadline, what
        time.sleep(0.1)


def default_signals():
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)


class Launcher:
    """A torchrun that was started; what it prints goes to a file."""

    def __init__(self, command, cwd, path, env):
        self.path = path
        with open(path, "w") as file:
            self.process = subprocess.Popen(
                command,
                cwd=cwd,
                env={**env, "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"},
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=default_signals,
            )

    def printed(self):
        return self.path.read_text(errors="replace")

    def ends(self):
        """Wait for the end, and return the exit status."""
        try:
            return self.process.wait(LIMIT)
        except subprocess.TimeoutExpired:
            pytest.fail(f"a launcher hangs:\n{self.printed()}")


class Job:
    """Launchers that meet at one port.  The first one holds the store of the others."""

    def __init__(self, project, folder):
        self.project = project
        self.folder = folder
        self.output = folder / "output"
        self.driver = folder / "driver.py"
        self.driver.write_text(DRIVER)
        self.port = free_port()
        self.launchers = []

    def launch(self, *words, nodes="2", ranks=1, options=(), **env):
        command = [sys.executable, "-m", "torch.distributed.run"]
        command += ["--nnodes", nodes, "--nproc_per_node", str(ranks), "--rdzv_backend", "c10d"]
        command += ["--rdzv_endpoint", f"127.0.0.1:{self.port}", *options]
        command += [str(self.driver), *WORDS.split(), "OUTPUT_DIR", str(self.output), *words]
        return self.start(command, {**os.environ, "USED": str(self.folder / "used"), **env})

    def start(self, command, env):
        path = self.folder / f"launcher {len(self.launchers)}.txt"
        launcher = Launcher(command, self.project, path, env)
        self.launchers.append(launcher)
        wait_until(self.has_store, "nobody listens at the port")
        return launcher

    def has_store(self):
        with contextlib.suppress(OSError):
            socket.create_connection(("127.0.0.1", self.port), timeout=1).close()
            return True
        # A launcher that has ended listens no more.
        return self.launchers[-1].process.poll() is not None

    def close(self):
        """End what a failed test has left."""
        for launcher in self.launchers:
            for pid in ranks_of(launcher):
                os.kill(pid, signal.SIGKILL)
            launcher.process.kill()
            launcher.process.wait()


def ranks_of(launcher):
    found = subprocess.run(
        ["pgrep", "-P", str(launcher.process.pid)], capture_output=True, text=True
    )
    return [int(pid) for pid in found.stdout.split()]


@pytest.fixture
def job(project, tmp_path):
    job = Job(project, tmp_path)
    yield job
    job.close()


@pytest.fixture(scope="module")
def undisturbed(project, tmp_path_factory):
    """A run of two ranks under one launcher."""
    job = Job(project, tmp_path_factory.mktemp("undisturbed"))
    launcher = job.launch(nodes="1", ranks=2)
    assert launcher.ends() == 0, launcher.printed()
    return job


def outcome(job):
    """What two runs must have in common to the bit."""
    checkpoint = torch.load(job.output / "model_final.pth")
    model = {name: value.tolist() for name, value in checkpoint["model"].items()}
    lines = (job.output / "metrics.json").read_text().splitlines()
    rows = [{k: v for k, v in json.loads(line).items() if k not in CLOCK} for line in lines]
    return model, rows


def rows_used(job):
    lines = (job.folder / "used").read_text().splitlines()
    return [json.loads(line) for line in lines]


def samples(job):
    """{iteration: the sorted samples of all ranks}, of the last time that it was trained.

    An iteration that came after the last checkpoint before a kill is trained again.
    """
    parts = {}
    for iteration, session, num_ranks, rank, indices in rows_used(job):
        parts.setdefault((iteration, session, num_ranks), {})[rank] = indices
    used = {}
    for (iteration, _, num_ranks), indices_of in parts.items():
        if len(indices_of) == num_ranks:
            used[iteration] = sorted(sum(indices_of.values(), []))
    return used


def sizes(job):
    """The numbers of ranks that the run had, one after the other."""
    sessions = {session: num_ranks for _, session, num_ranks, _, _ in rows_used(job)}
    return list(sessions.values())


def resumed(job):
    """The last iterations of the checkpoints that any rank 0 has resumed from, in order."""
    log = "".join(path.read_text() for path in sorted(job.output.glob("log.txt*")))
    return sorted({int(number) for number in re.findall(r"Resuming from .*model_(\d+)\.pth", log)})


def test_two_launchers_train_the_same_weights_as_one_with_as_many_ranks(project, tmp_path):
    outcomes = []
    for num_nodes, num_ranks in ((1, 4), (2, 2)):
        folder = tmp_path / str(num_nodes)
        folder.mkdir()
        job = Job(project, folder)
        for _ in range(num_nodes):
            job.launch("SOLVER.MAX_ITER", "9", nodes=str(num_nodes), ranks=num_ranks)
        for launcher in job.launchers:
            assert launcher.ends() == 0, launcher.printed()
        outcomes.append((outcome(job), samples(job)))
    assert outcomes[0] == outcomes[1]


def test_if_the_machine_that_all_meet_at_dies_all_end_and_a_resume_ends_the_same(job, undisturbed):
    host = job.launch(DIES="13")
    other = job.launch()
    assert host.ends() == -signal.SIGKILL
    assert other.ends() == 1
    assert re.search("error: rank . has lost another rank .* --resume", other.printed())
    again = [job.launch("--resume") for _ in range(2)]
    for launcher in again:
        assert launcher.ends() == 0, launcher.printed()
    assert resumed(job) == [9]
    assert outcome(job) == outcome(undisturbed)
    assert samples(job) == samples(undisturbed)


def test_a_machine_that_dies_and_is_started_again_joins_and_the_run_ends_the_same(job, undisturbed):
    host = job.launch(options=("--max-restarts", "1"), **REJOIN)
    other = job.launch(options=("--max-restarts", "1"), DIES="13", **REJOIN)
    assert other.ends() == -signal.SIGKILL
    again = job.launch(options=("--max-restarts", "1"), **REJOIN)
    for launcher in (host, again):
        assert launcher.ends() == 0, launcher.printed()
    assert resumed(job) == [9]
    assert outcome(job) == outcome(undisturbed)
    assert samples(job) == samples(undisturbed)


def test_no_sample_is_lost_or_repeated_when_a_machine_leaves_and_another_joins(job, undisturbed):
    options = ("--max-restarts", "1", "--rdzv_conf", "last_call_timeout=10")
    elastic = {"nodes": "1:2", "options": options, "ALONE": "12", **REJOIN}
    host = job.launch(**elastic)
    other = job.launch(DIES="13", **elastic)
    assert other.ends() == -signal.SIGKILL
    wait_until(lambda: sizes(job)[-1] == 1, "the first launcher does not go on alone")
    again = job.launch(**elastic)
    for launcher in (host, again):
        assert launcher.ends() == 0, launcher.printed()
    assert sizes(job)[-3:] == [2, 1, 2]
    assert samples(job) == samples(undisturbed)


def section_of_the_page(project):
    page = (project / "recipes" / "README.md").read_text(encoding="utf-8")
    return page.partition("\n# Several machines\n")[2].partition("\n# ")[0]


def test_the_page_names_what_a_machine_needs_to_come_back(project):
    section = section_of_the_page(project)
    for name, value in REJOIN.items():
        assert f"export {name}={value}\n" in section


def commands_of_the_rehearsal(project):
    blocks = re.findall(r"^```sh\n(.*?)^```$", section_of_the_page(project), re.M | re.S)
    return [re.sub(r"\s+#\s.*", "", block).replace("\\\n", " ") for block in blocks]


def test_the_rehearsal_on_one_machine_works_as_it_is_printed(job):
    first, second = commands_of_the_rehearsal(job.project)
    output = job.project / "output_nodes"
    env = environment_of_a_shell()
    env["PATH"] = f"{Path(sys.prefix, 'bin')}{os.pathsep}{env['PATH']}"

    def type_in_two_terminals(command):
        port = free_port()  # tests that run beside this one may use the printed one
        job.port = port
        command = command.replace(":29500", f":{port}")
        return [job.start(["bash", "-c", command], env) for _ in range(2)]

    terminals = type_in_two_terminals(first)
    wait_until((output / "metrics.json").exists, terminals[0].printed())
    os.killpg(terminals[1].process.pid, signal.SIGINT)  # Ctrl-C
    # The launcher without the signal would succeed, after 5 minutes in torch's exit barrier.
    assert [terminal.ends() for terminal in terminals] == [1, 1]
    for name in ("log.txt", "log.txt.rank1"):
        assert "Stopped by a signal" in (output / name).read_text()
    assert not (output / "results.json").exists()
    terminals = type_in_two_terminals(second)
    assert [terminal.ends() for terminal in terminals] == [0, 0], terminals[0].printed()
    assert (output / "results.json").exists()
