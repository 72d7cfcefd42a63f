"""What a generated project promises: its commands, and the files that a whole run leaves."""

import json
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import environment_of_a_shell, run

MAX_ITER = 30
ALWAYS = {"total_loss", "lr", "time", "data_time", "grad_norm"}


@pytest.fixture
def copy(project, tmp_path):
    """A copy of the session's project that a test may run and litter."""
    return Path(shutil.copytree(project, tmp_path / "project"))


# make train, make test: which environment they use, and what they install.


def write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


@pytest.fixture
def stand_in(tmp_path):
    """stand_in(name=version, ...) makes an environment of empty libraries; returns its python.

    Its pip, torchrun, pytest and ruff print what they are asked to do.
    """

    def make(**versions):
        home = tmp_path / "environment"
        run([sys.executable, "-m", "venv", "--without-pip", str(home)], tmp_path)
        (packages,) = home.glob("lib/python3*/site-packages")
        say = "import sys; print(__package__, *sys.argv[1:])"
        for name in ("pip", "pytest", "ruff"):
            write(packages / name / "__main__.py", say)
        write(packages / "torch/distributed/run.py", say)
        device_count = "class cuda:\n    device_count = staticmethod(lambda: 0)\n"
        write(packages / "torch/__init__.py", device_count if "torch" in versions else "")
        if "torch" not in versions:
            shutil.rmtree(packages / "torch")
        for name, version in versions.items():
            about = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
            write(packages / f"{name}-{version}.dist-info/METADATA", about)
        return home / "bin" / "python"

    return make


ALL = {"torch": "2.13.0+cpu", "numpy": "2.4.6", "tensorboard": "2.21.0", "yacs": "0.1.8"}
TRAINS = "torch.distributed --standalone --nproc_per_node 2 train.py --config cfg.yaml"


def test_make_train_installs_nothing_where_all_is_there(copy, stand_in):
    printed = run(["make", "train", f"PYTHON={stand_in(**ALL)}"], copy)
    assert TRAINS in printed
    assert "pip install" not in printed
    assert not (copy / ".venv").exists()


def test_make_train_adds_what_is_missing_and_leaves_torch_alone(copy, stand_in):
    python = stand_in(**{**ALL, "torch": "2.14.0+cu130", "tensorboard": "2.17.1"} | {"yacs": "0.1"})
    printed = run(["make", "train", f"PYTHON={python}"], copy)
    assert "pip install tensorboard>=2.21 yacs>=0.1.8 torch==2.14.0+cu130\n" in printed
    assert TRAINS in printed
    assert not (copy / ".venv").exists()


def test_an_old_torch_is_left_alone_as_well(copy, stand_in):
    versions = {name: version for name, version in ALL.items() if name != "yacs"}
    printed = run(["make", "train", f"PYTHON={stand_in(**{**versions, 'torch': '2.4.1'})}"], copy)
    assert "pip install yacs>=0.1.8 torch==2.4.1\n" in printed


def test_a_requirement_of_any_form_is_asked_of_pip_by_its_line(copy, stand_in):
    with (copy / "requirements.txt").open("a") as file:
        file.write("# a comment\nscikit-learn\nPillow>=10\n")
    python = stand_in(**ALL, pillow="11.0")
    printed = run(["make", "train", f"PYTHON={python}"], copy)
    assert "pip install scikit-learn torch==2.13.0+cpu\n" in printed


def test_a_new_environment_gets_everything_and_the_size_is_said(copy, stand_in):
    python = stand_in()
    command = f"make train NPROC=2 VENV='{python.parents[1]}' || true"  # nothing is installed
    printed = run(["bash", "-c", command], copy)
    lines = (copy / "requirements.txt").read_text().split()
    assert f"pip install {' '.join(lines)}\n" in printed
    assert "Installing PyTorch: with CUDA it takes gigabytes" in printed


def test_make_test_adds_what_the_tests_need_checks_the_style_and_tests(copy, stand_in):
    printed = run(["make", "test", f"PYTHON={stand_in(**ALL, ruff='0.17.6')}"], copy)
    assert "pip install pytest>=8 torch==2.13.0+cpu\n" in printed
    parts = "ruff check ", "ruff format --check ", "pytest\n"
    places = [printed.rindex(part) for part in parts]
    assert places == sorted(places)


def test_make_train_starts_the_documented_command(copy):
    printed = run(["make", "-n", "train", "VENV=/venv", "NPROC=3", "ARGS=SEED 1"], copy)
    flat = " ".join(printed.replace("\\\n", " ").split())
    assert "-m venv /venv" in flat
    assert "--standalone --nproc_per_node 3 train.py --config cfg.yaml SEED 1" in flat


def test_make_without_a_target_and_make_help_list_the_commands(copy):
    printed = run(["make"], copy)
    assert printed == run(["make", "help"], copy)
    names = [line.split()[1] for line in printed.splitlines() if line.startswith("make ")]
    assert names == ["help", "train", "test", "lint", "recipe", "clean"]


def test_an_old_python_is_one_line(copy, tmp_path):
    old = tmp_path / "python3"
    old.write_text("#!/bin/sh\nexit 1\n")
    old.chmod(0o755)
    done = subprocess.run(
        ["make", "train", f"PYTHON={old}"],
        cwd=copy,
        env=environment_of_a_shell(),
        capture_output=True,
        text=True,
    )
    assert done.returncode != 0
    assert f"Python 3.10 or newer is missing ({old})" in done.stdout
    assert not (copy / ".venv").exists()


# What a run leaves.

LAUNCHERS = {
    "1 process": [sys.executable],
    "2 ranks": [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"),
    ],
}


def strict_json(line):
    """Parse one line; NaN and Infinity, which are not JSON, raise."""
    return json.loads(line, parse_constant=lambda constant: pytest.fail(f"{constant} in {line}"))


@pytest.fixture(params=LAUNCHERS, scope="module")
def output(request, project, tmp_path_factory):
    """The output directory of one short run from the command line."""
    home = tmp_path_factory.mktemp("run")
    copy = shutil.copytree(project, home / "project")
    arguments = ["train.py", "--config", "cfg.yaml", "SOLVER.MAX_ITER", str(MAX_ITER)]
    run([*LAUNCHERS[request.param], *arguments, "OUTPUT_DIR", str(home / "output")], copy)
    return home / "output"


def test_a_run_writes_strict_json_with_each_iteration_once(output):
    rows = [strict_json(line) for line in (output / "metrics.json").read_text().splitlines()]
    iterations = [row["iteration"] for row in rows]
    assert iterations == sorted(set(iterations))
    assert iterations[-1] == MAX_ITER - 1
    assert ALWAYS | {"digits_test/accuracy"} <= set(rows[-1])


def test_a_run_logs_when_it_will_end(output):
    assert "eta:" in (output / "log.txt").read_text()


def test_tensorboard_shows_what_the_json_file_holds(output):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    lines = (output / "metrics.json").read_text().splitlines()
    tags = set().union(*map(strict_json, lines)) - {"iteration"}
    events = EventAccumulator(str(output)).Reload()
    assert set(events.Tags()["scalars"]) == tags
    row = strict_json(lines[-1])
    last = {tag: events.Scalars(tag)[-1] for tag in ("total_loss", "digits_test/accuracy")}
    for tag, event in last.items():
        assert event.step == MAX_ITER - 1, tag
        assert event.value == pytest.approx(row[tag], rel=1e-5), tag


def test_a_run_leaves_a_final_model_and_its_settings(output):
    assert (output / "model_final.pth").is_file()
    assert f"MAX_ITER: {MAX_ITER}" in (output / "config.yaml").read_text()


# train.sbatch, with SLURM's two programs played by scripts; test_slurm.py has a real SLURM.

SRUN = """#!/bin/sh
while [ "${1#--}" != "$1" ]; do shift; done
exec "$@"
"""
SCONTROL = """#!/bin/sh
echo "$@" >>"$CALLS"
[ "$1" = requeue ] || echo 127.0.0.1
"""


@pytest.fixture
def sbatch(copy, tmp_path):
    """sbatch(*words, **variables) starts train.sbatch as SLURM does: the process, which runs."""
    programs = tmp_path / "slurm"
    write(programs / "srun", SRUN)
    write(programs / "scontrol", SCONTROL)
    for path in programs.iterdir():
        path.chmod(0o755)
    env = environment_of_a_shell()
    env["PATH"] = f"{programs}:{Path(sys.executable).parent}:{env['PATH']}"
    env.update(SLURM_JOB_ID="4242", SLURM_JOB_NUM_NODES="1", SLURM_JOB_NODELIST="node[1]")
    env.update(CALLS=str(tmp_path / "calls"), CUDA_VISIBLE_DEVICES="")

    def start(*words, **variables):
        return subprocess.Popen(
            ["bash", "train.sbatch", *words],
            cwd=copy,
            env={**env, **variables},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    return start


def wait_until(is_true):
    deadline = time.monotonic() + 600
    while not is_true():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_a_slurm_job_saves_and_requeues_when_its_time_is_over_and_then_resumes(
    copy, sbatch, tmp_path
):
    # Far too long to end before the signal; the resumed job is given a length that it reaches.
    words = ("SOLVER.MAX_ITER", "1000000", "TEST.EVAL_PERIOD", "-1", "LOG_PERIOD", "1")
    metrics = copy / "output/metrics.json"
    first = sbatch(*words)
    wait_until(metrics.exists)
    first.send_signal(signal.SIGUSR1)
    printed = first.communicate(timeout=600)[0]
    assert first.returncode == 0, printed
    assert "requeue 4242" in (tmp_path / "calls").read_text()
    saved = [path.name for path in (copy / "output").glob("model_*.pth")]
    assert saved

    num_bytes = metrics.stat().st_size
    again = sbatch(*words, SLURM_RESTART_COUNT="1")
    # Before the first iteration a signal ends a process as it ends any other one.
    wait_until(lambda: metrics.stat().st_size > num_bytes)
    again.send_signal(signal.SIGUSR1)
    printed = again.communicate(timeout=600)[0]
    assert again.returncode == 0, printed
    assert "holds a run" not in printed
    assert len({path.name for path in (copy / "output").glob("model_*.pth")} - set(saved)) > 0


def test_a_slurm_job_that_fails_is_not_requeued(copy, sbatch, tmp_path):
    job = sbatch("SOLVER.NO_SUCH_KEY", "1")
    printed = job.communicate(timeout=600)[0]
    assert job.returncode != 0
    assert "SOLVER.NO_SUCH_KEY" in printed
    assert "requeue" not in (tmp_path / "calls").read_text()


def test_nobody_looks_beyond_the_files_of_the_project(copy):
    """An environment inside the folder, under any name, is neither linted nor collected."""
    strange = copy / "strange_env"
    run([sys.executable, "-m", "venv", "--without-pip", str(strange)], copy)
    (packages,) = strange.glob("lib/python3*/site-packages")
    write(packages / "test_broken.py", "def f(:\n")
    write(copy / ".venv/lib/test_broken.py", "def f(:\n")
    linted = run(["bash", "-c", f"make lint PYTHON='{sys.executable}' VENV= || true"], copy)
    assert "ruff check" in linted
    printed = run([sys.executable, "-m", "pytest", "--collect-only", "-q"], copy)
    assert "test_broken" not in linted + printed
