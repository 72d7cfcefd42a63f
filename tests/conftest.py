"""What the tests share: a clean copy of the template, and bakes of it that touch nothing else."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from cookiecutter.main import cookiecutter

ROOT = Path(__file__).parents[1]
PROJECT = "<<cookiecutter.project_slug>>"


def git(*arguments, cwd):
    """Return what a git command prints; a failure raises."""
    done = subprocess.run(["git", *arguments], cwd=cwd, check=True, capture_output=True, text=True)
    return done.stdout


def environment_of_a_shell():
    """The environment of a new shell, in which nothing of the tests' own environment is active."""
    env = dict(os.environ)
    for key in ("PYTHONPATH", "VIRTUAL_ENV", "PYTEST_ADDOPTS", "MAKEFLAGS", "MAKELEVEL", "MFLAGS"):
        env.pop(key, None)
    own = str(Path(sys.prefix, "bin"))
    env["PATH"] = os.pathsep.join(p for p in env["PATH"].split(os.pathsep) if p != own)
    return env


def run(command, cwd, timeout=900, **variables):
    """Run a command, and return what it printed; a failure shows all of it."""
    env = {**environment_of_a_shell(), **variables}
    try:
        done = subprocess.run(
            command,
            cwd=cwd,
            env=env,
            timeout=timeout,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
    except subprocess.TimeoutExpired as error:
        printed = (error.stdout or b"").decode()
        pytest.fail(f"{command}: not done in {timeout} s\n{printed}")
    assert done.returncode == 0, f"{command}\n{done.stdout}"
    return done.stdout


def descendants(pid):
    """The processes that a process has started, and those that these have started."""
    listed = subprocess.run(["pgrep", "-P", str(pid)], capture_output=True, text=True)
    pids = []
    for child in map(int, listed.stdout.split()):
        pids += [child, *descendants(child)]
    return pids


def files_under(folder):
    """Return the sorted relative names of all files below a folder, git's own left out."""
    names = [path.relative_to(folder) for path in Path(folder).rglob("*") if path.is_file()]
    return sorted(name.as_posix() for name in names if name.parts[0] != ".git")


class Baker:
    """Bakes into fresh folders below ``home``, by cookiecutter's function or its command line."""

    def __init__(self, template, home):
        self.template = template
        self.home = home
        self.count = 0
        self.config = home / "cookiecutter.yaml"
        self.config.write_text(
            f'cookiecutters_dir: "{home / "clones"}"\nreplay_dir: "{home / "replay"}"\n'
        )

    def folder(self):
        """Return a new, empty folder for one bake."""
        self.count += 1
        folder = self.home / f"bake{self.count}"
        folder.mkdir()
        return folder

    def __call__(self, template=None, output_dir=None, accept_hooks=True, force=False, **answers):
        """Bake and return the folder of the project."""
        project = cookiecutter(
            str(template or self.template),
            no_input=True,
            extra_context=answers,
            config_file=str(self.config),
            output_dir=str(output_dir or self.folder()),
            accept_hooks=accept_hooks,
            overwrite_if_exists=force,
        )
        return Path(project)

    def command(self, *arguments, output_dir, answers="", **env):
        """Run cookiecutter's command line; ``answers`` is typed, or all defaults are taken."""
        command = [sys.executable, "-m", "cookiecutter", str(self.template), *arguments]
        command += ["--config-file", str(self.config), "-o", str(output_dir)]
        command += [] if answers else ["--no-input"]
        return subprocess.run(
            command, capture_output=True, text=True, input=answers, env={**os.environ, **env}
        )


@pytest.fixture(scope="session", autouse=True)
def strange_machine(tmp_path_factory):
    """Run everything as on a machine where git knows no one and Python leaves no caches."""
    with pytest.MonkeyPatch.context() as patch:
        for key in [key for key in os.environ if key.startswith("GIT_")]:
            patch.delenv(key)
        cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        patch.setenv("PIP_CACHE_DIR", os.environ.get("PIP_CACHE_DIR") or str(Path(cache, "pip")))
        patch.setenv("HOME", str(tmp_path_factory.mktemp("home")))
        patch.setenv("GIT_CONFIG_NOSYSTEM", "1")
        patch.setenv("GIT_CONFIG_COUNT", "1")
        patch.setenv("GIT_CONFIG_KEY_0", "user.useConfigOnly")  # never guess an identity
        patch.setenv("GIT_CONFIG_VALUE_0", "true")
        patch.setenv("PYTHONDONTWRITEBYTECODE", "1")
        yield


@pytest.fixture(scope="session")
def template(tmp_path_factory):
    """A copy of every file that git tracks or would track, so that no cache comes along."""
    copy = tmp_path_factory.mktemp("template") / "train-template"
    listed = git("ls-files", "-co", "--exclude-standard", "-z", cwd=ROOT).split("\0")
    for name in filter(None, listed):
        if (ROOT / name).is_file():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, copy / name)
    return copy


@pytest.fixture
def bake(template, tmp_path):
    """A ``Baker`` whose bakes end with the test."""
    return Baker(template, tmp_path)


@pytest.fixture(scope="session")
def project(template, tmp_path_factory):
    """One default bake for all tests that only read it."""
    return Baker(template, tmp_path_factory.mktemp("project"))()
