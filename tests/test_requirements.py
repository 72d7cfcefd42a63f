"""The versions of the libraries: the pins of the template, and the floors of a project."""

import os
import re
import subprocess
import sys

import pytest
from conftest import PROJECT, ROOT, files_under
from packaging.requirements import Requirement
from packaging.version import Version

FLOORS = ROOT / "build" / "floors"
PYTHONS = ("3.10", "3.11", "3.12", "3.13")
PROBE = "import {0}, sys; print({0}.__file__)"


def requirements(path):
    """The requirements in a file; comments and references to other files are left out."""
    lines = [line.partition("#")[0].strip() for line in path.read_text().splitlines()]
    return [Requirement(line) for line in lines if line and not line.startswith("-")]


def pin_of(requirement):
    (specifier,) = requirement.specifier
    return Version(specifier.version)


@pytest.mark.parametrize("python", PYTHONS)
def test_each_library_has_one_pin_for_each_python(python):
    pins = {}
    for requirement in requirements(ROOT / "requirements-dev.txt"):
        environment = {"python_version": python, "python_full_version": f"{python}.0"}
        if requirement.marker is None or requirement.marker.evaluate(environment):
            assert requirement.name not in pins
            pins[requirement.name] = pin_of(requirement)
    assert {"torch", "numpy", "tensorboard", "yacs", "cookiecutter", "pytest", "ruff"} <= set(pins)
    # numpy 2.3 and newer want Python 3.11.
    assert (pins["numpy"] < Version("2.3")) == (python == "3.10")


def test_the_workflows_name_the_pythons_that_are_promised(template):
    ours = (template / ".github/workflows/ci.yml").read_text()
    assert set(re.findall(r'"(3\.\d+)"', ours)) == set(PYTHONS)
    projects = (template / PROJECT / ".github/workflows/test.yml").read_text()
    assert re.findall(r'"(3\.\d+)"', projects) == [PYTHONS[0], PYTHONS[-1]]


def test_the_torch_of_the_template_is_the_oldest_that_a_project_allows(template):
    pins = {r.name: pin_of(r) for r in requirements(ROOT / "requirements-dev.txt")}
    floors = {r.name: pin_of(r) for r in requirements(template / PROJECT / "requirements.txt")}
    assert (pins["torch"].major, pins["torch"].minor) == (
        floors["torch"].major,
        floors["torch"].minor,
    )


@pytest.mark.parametrize("library", ["numpy", "tensorboard", "yacs"])
def test_the_oldest_allowed_release_works_with_the_newest_of_the_others(project, library, tmp_path):
    if not FLOORS.is_dir():
        pytest.skip("build/floors is not there: run make test once")
    if library == "numpy" and sys.version_info >= (3, 13):
        pytest.skip("numpy 1.26 has no wheel for this Python")
    floors = {r.name: pin_of(r) for r in requirements(project / "requirements.txt")}
    env = {**os.environ, "PYTHONPATH": str(FLOORS / library), "OMP_NUM_THREADS": "1"}

    def python(*words):
        words = [sys.executable, *words]
        return subprocess.run(words, cwd=project, env=env, capture_output=True, text=True)

    installed = FLOORS / library / f"{library}-{floors[library]}"
    assert list(FLOORS.glob(f"{library}/{installed.name}*.dist-info"))
    assert python("-c", PROBE.format(library)).stdout.startswith(str(FLOORS))
    words = "--config cfg.yaml SOLVER.MAX_ITER 20 TEST.EVAL_PERIOD 10 MODEL.DEVICE cpu OUTPUT_DIR"
    done = python("train.py", *words.split(), str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert [name for name in files_under(tmp_path) if name.startswith("events.out")]
    done = python("-m", "tensorboard.main", "--inspect", "--logdir", str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert "scalars" in done.stdout
