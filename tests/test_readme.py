"""Both READMEs as a newcomer follows them: every command, in order, in one project.

The project is baked as the README of the template says.  Its environment is the one that its own
commands make: nothing is passed in, and nothing of the tests' environment is active.
"""

import fnmatch
import os
import re
import shutil
import socket
import sys

import pytest
from conftest import PROJECT, ROOT, environment_of_a_shell, files_under, git, run

MINUTES = 25  # for all commands of a README; most of it is a download on a new machine


def commands_in(page):
    """The commands in the blocks of shell code, without their comments."""
    blocks = re.findall(r"^```sh\n(.*?)^```$", page.read_text(encoding="utf-8"), re.M | re.S)
    lines = "".join(blocks).replace("\\\n", " ").splitlines()
    lines = [re.sub(r"\s#\s.*", "", line) for line in lines]
    return [" ".join(line.split()) for line in lines if line.strip()]


class StandIn:
    """A command that is typed in place of one that cannot be run here, and why."""

    def __init__(self, why, command):
        self.why = why
        self.command = command


def free_port():
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return server.getsockname()[1]


TWO_NODES = """
node() {{ torchrun --nnodes 2 --nproc_per_node 1 --rdzv_backend c10d \
    --rdzv_endpoint 127.0.0.1:{port} train.py --config cfg.yaml OUTPUT_DIR output_16; }}
node >/dev/null & other=$!; node && wait $other
"""
TENSORBOARD = """
tensorboard --logdir output --port {port} >tensorboard.txt 2>&1 & server=$!
for second in $(seq 60); do grep -q http://localhost tensorboard.txt && break; sleep 1; done
kill $server; grep http://localhost tensorboard.txt; rm tensorboard.txt
"""

INSTEAD = {
    "pipx run cookiecutter gh:org/train-template": StandIn(
        "the template is here and not at an address, and it must not ask",
        "'{python}' -m cookiecutter --no-input --config-file build/cookiecutter.yaml -o '{out}' .",
    ),
    "make test": StandIn("this test is a part of it", "make -n test"),
    "python3 -m venv .venv && .venv/bin/pip install torch"
    " --index-url https://download.pytorch.org/whl/cpu": StandIn(
        "another server, for a smaller build of the same library",
        "python3 -m venv .venv && .venv/bin/pip install torch",
    ),
    "python -m pytest": StandIn("make test has just done it", "python -m pytest --collect-only -q"),
    "torchrun --standalone --nproc_per_node 8 train.py --config cfg.yaml OUTPUT_DIR"
    " output_8": StandIn(
        "8 processes take minutes on 2 cores",
        "torchrun --standalone --nproc_per_node 4 train.py --config cfg.yaml OUTPUT_DIR output_8"
        " SOLVER.MAX_ITER 20",
    ),
    "torchrun --nnodes 2 --nproc_per_node 8 --rdzv_backend c10d --rdzv_endpoint HOST:29500"
    " train.py --config cfg.yaml OUTPUT_DIR output_16": StandIn(
        "there is one machine: it plays both", TWO_NODES
    ),
    "sbatch train.sbatch OUTPUT_DIR output_slurm": StandIn(
        "it needs a SLURM: test_slurm.py starts one", "bash -n train.sbatch"
    ),
    "tensorboard --logdir output": StandIn("it serves until it is stopped", TENSORBOARD),
}


def script_of(commands, allowed, **values):
    """A shell script that runs commands one after the other, and ends with the first failure."""
    lines = []
    for command in commands:
        typed = command
        if command in allowed:
            typed = allowed[command].command.format(port=free_port(), **values).strip()
        lines.append(f"echo '== {command}'\n{{ {typed}\n}} || exit 1\n")
    return "".join(lines)


def type_in(commands, allowed, folder, **values):
    """Run commands in one shell, as a user does who has git's identity set."""
    identity = {"GIT_CONFIG_COUNT": "2", "GIT_CONFIG_KEY_0": "user.name"}
    identity.update(GIT_CONFIG_VALUE_0="t", GIT_CONFIG_KEY_1="user.email")
    identity.update(GIT_CONFIG_VALUE_1="t@example.com")
    script = script_of(commands, allowed, **values)
    return run(["bash", "-c", script], folder, timeout=60 * MINUTES, **identity)


@pytest.fixture(scope="module")
def typed(template, tmp_path_factory):
    """What the commands of the template's README print, and the project that they make."""
    home = tmp_path_factory.mktemp("readme")
    clone = shutil.copytree(template, home / "train-template")
    installed = ROOT / ".venv" / "installed"
    wanted = clone / "requirements-dev.txt"
    if installed.exists() and installed.stat().st_mtime > wanted.stat().st_mtime:
        # make finds the environment that it made for these tests, and need not make it again.
        (clone / ".venv").symlink_to(ROOT / ".venv")
    (clone / "build").mkdir()
    folders = f"cookiecutters_dir: {home / 'clones'}\nreplay_dir: {home / 'replay'}\n"
    (clone / "build" / "cookiecutter.yaml").write_text(folders)
    commands = commands_in(clone / "README.md")
    printed = type_in(commands, INSTEAD, clone, python=sys.executable, out=home)
    return printed, home / "my-training-project"


@pytest.fixture(scope="module")
def used(typed):
    """What the commands of the project's README print, the project, and the files it began with."""
    project = typed[1]
    began_with = files_under(project)
    allowed = {command: each for command, each in INSTEAD.items() if command != "make test"}
    try:
        printed = type_in(commands_in(project / "README.md"), allowed, project)
        assert (project / ".venv/bin/python").exists()
    finally:
        shutil.rmtree(project / ".venv", ignore_errors=True)  # some gigabytes
    return printed, project, began_with


def test_each_stand_in_is_for_a_command_of_a_readme(template):
    commands = commands_in(template / "README.md") + commands_in(template / PROJECT / "README.md")
    assert set(INSTEAD) <= set(commands)
    assert len(commands) > 15
    assert all(len(stand_in.why.split()) > 3 for stand_in in INSTEAD.values())


def test_every_command_of_the_readme_of_the_template_works(typed):
    printed, project = typed
    accuracy = float(re.search(r"^test accuracy: (.*)$", printed, re.M).group(1))
    assert accuracy >= 0.95
    assert (project / "train.py").is_file()


def test_every_command_of_the_readme_of_a_project_works(used):
    printed, project, _ = used
    for command in commands_in(project / "README.md"):
        assert f"== {command}\n" in printed
    assert re.search(r"\d+ passed", printed)
    assert "failed" not in printed.partition("== make help")[0]


def test_make_train_installs_into_the_project_and_make_test_finds_it(used):
    printed = used[0]
    first, _, second = printed.partition("== make test\n")
    second = second.partition("== make help\n")[0]
    assert "pip install torch>=" in first
    assert "pip install pytest>=" in second
    assert "All checks passed!" in second


def test_what_the_commands_leave_behind_is_not_added_to_git(used):
    _, project, began_with = used
    assert len(files_under(project)) > len(began_with) + 20
    git("add", ".", cwd=project)
    assert sorted(git("ls-files", cwd=project).splitlines()) == began_with


def test_what_a_run_leaves_in_a_folder_of_any_name_is_not_added_to_git(used):
    _, project, began_with = used
    shutil.copytree(project / "output", project / "my run")
    (project / "wandb").mkdir()
    (project / "wandb" / "debug.log").write_text("x")
    (project / "schedule.svg").write_text("<svg/>")
    git("add", ".", cwd=project)
    added = set(git("ls-files", cwd=project).splitlines()) - set(began_with)
    assert added <= {"my run/config.yaml"}


def test_the_files_of_a_run_are_those_that_the_readme_lists(used):
    _, project, _ = used
    readme = (project / "README.md").read_text(encoding="utf-8")
    listed = re.findall(r"`([\w.*]+)`", "\n".join(re.findall(r"^\| (`.*?) \|", readme, re.M)))
    patterns = [re.sub(r"\d{7}", "*", name) for name in listed]
    assert len(patterns) >= 10
    left = {path.name for path in (project / "output").iterdir()}
    for pattern in set(patterns) - {"log.txt.rank1"}:  # a GPU may have but one process
        assert [name for name in left if fnmatch.fnmatch(name, pattern)], pattern
    unknown = {n for n in left if not any(fnmatch.fnmatch(n, p) for p in patterns)}
    assert unknown <= {"model_best.json"}


def test_the_environment_of_the_tests_is_not_active_in_a_shell():
    env = environment_of_a_shell()
    assert os.path.join(sys.prefix, "bin") not in env["PATH"].split(os.pathsep)
    assert "VIRTUAL_ENV" not in env
