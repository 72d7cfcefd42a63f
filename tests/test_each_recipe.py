"""Every recipe fits fresh and edited projects, works, resumes exactly, and can be undone.

What takes long is marked slow: ``make recipes`` runs it.
"""

import contextlib
import itertools
import os
import re
import shutil
import signal
import subprocess
import sys
import time

import pytest
import recipes
from conftest import descendants
from edited_loops import EDITS, edited
from recipes import git

NAMES = recipes.names()
TIMEOUT_SECONDS = 600
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2")
SHORT = """
    MODEL.DEVICE cpu SOLVER.MAX_ITER 12 SOLVER.WARMUP_ITERS 2 LOG_PERIOD 3
    SOLVER.CHECKPOINT_PERIOD 2 SOLVER.CHECKPOINTS_TO_KEEP 0 TEST.EVAL_PERIOD 4
"""
LEAST_SHARE = 0.85  # of the pairs, and of the recipes on an edited loop, that apply


def run(*words, cwd, **options):
    """Run Python in a folder.  Returns the finished process."""
    return subprocess.run(
        [sys.executable, *map(str, words)],
        cwd=cwd,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_SECONDS,
        **options,
    )


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A fresh project in a repository, with one commit; nobody may change it."""
    return recipes.make_project(tmp_path_factory.mktemp("base"))


@pytest.fixture
def project(base, tmp_path):
    """A copy of the fresh project."""
    return shutil.copytree(base, tmp_path / "project")


@pytest.fixture
def with_recipe(project, request):
    """The project with the recipe that the test is about."""
    name = request.node.callspec.params["name"]
    done = recipes.apply(name, project)
    assert done.returncode == 0, done.stderr
    return project


def changed_lines(name, path):
    """How many lines a recipe adds to, or takes from, a file."""
    text = (recipes.RECIPES / f"{name}.patch").read_text(encoding="utf-8")
    _, found, part = text.partition(f"diff --git a/{path} b/{path}\n")
    if not found:
        return 0
    hunks = part.partition("\ndiff --git ")[0].partition("\n@@")[2]
    return len(re.findall(r"^[+-]", hunks, re.MULTILINE))


@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_says_what_it_does_when_to_use_it_what_it_costs_and_where_it_is_from(name):
    header = recipes.header_of(name)
    assert header.startswith(f"{name}: ")
    for word in ("What:", "When:", "Cost:", "Source:"):
        assert re.search(f"^{word} .", header, re.MULTILINE), word


@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_changes_at_most_30_lines_of_the_loop_s_file_and_brings_a_test(name):
    assert changed_lines(name, "train.py") <= 30
    assert changed_lines(name, f"tests/test_{name}.py") > 0


@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_applies_and_its_undoing_leaves_the_files_as_they_were(project, name):
    done = recipes.apply(name, project)
    assert done.returncode == 0, done.stderr
    assert git("status", "--porcelain", cwd=project).stdout
    done = git("apply", "-R", recipes.RECIPES / f"{name}.patch", cwd=project, check=False)
    assert done.returncode == 0, done.stderr
    git("add", "--all", ".", cwd=project)
    assert git("status", "--porcelain", cwd=project).stdout == ""


@pytest.mark.parametrize("name", NAMES)
def test_a_project_with_a_recipe_is_clean_and_the_recipe_s_own_test_passes(with_recipe, name):
    for command in (("check",), ("format", "--check")):
        done = run("-m", "ruff", *command, "--no-cache", ".", cwd=with_recipe)
        assert done.returncode == 0, done.stdout
    own_test = f"tests/test_{name}.py"
    done = run("-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", own_test, cwd=with_recipe)
    assert done.returncode == 0, done.stdout + done.stderr


def test_most_pairs_of_recipes_apply_one_after_the_other_and_the_table_names_the_others(base):
    pairs = list(itertools.combinations(NAMES, 2))
    conflicts = recipes.conflicting_pairs(base)
    assert len(conflicts) <= (1 - LEAST_SHARE) * len(pairs), conflicts
    assert recipes.conflicts_in_table() == set(conflicts)


@pytest.mark.parametrize("edit", EDITS)
def test_most_recipes_apply_to_a_loop_that_was_edited_by_hand(project, edit):
    path = project / "train.py"
    path.write_text(edited(path.read_text(encoding="utf-8"), edit), encoding="utf-8")
    git("commit", "--quiet", "--all", "-m", "an edit", cwd=project)
    failed = []
    for name in NAMES:
        if recipes.apply(name, project).returncode != 0:
            failed.append(name)
        git("reset", "--quiet", "--hard", cwd=project)
        git("clean", "--quiet", "-d", "--force", cwd=project)
    assert len(failed) <= (1 - LEAST_SHARE) * len(NAMES), failed


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_project_with_a_recipe_passes_its_whole_suite(with_recipe, name):
    done = run("-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", cwd=with_recipe)
    assert done.returncode == 0, done.stdout + done.stderr


COMPARE = """
import json, sys
from pathlib import Path
sys.path.insert(0, "tests")
from conftest import assert_same_state, metrics_of
killed, whole = map(Path, sys.argv[1:])
assert_same_state(killed, whole)
assert metrics_of(killed) == metrics_of(whole)
"""


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_training_on_two_ranks_with_a_recipe_is_killed_and_resumes_to_the_bit(
    with_recipe, tmp_path, name
):
    whole = tmp_path / "whole"
    killed = tmp_path / "killed"
    command = (*TORCHRUN, "train.py", "--config", "cfg.yaml", *SHORT.split(), "OUTPUT_DIR")
    done = run(*command, whole, cwd=with_recipe)
    assert done.returncode == 0, done.stdout + done.stderr

    kill_after_a_save(command, killed, with_recipe)
    done = run(*command, killed, "--resume", cwd=with_recipe)
    assert done.returncode == 0, done.stdout + done.stderr
    done = run("-c", COMPARE, killed, whole, cwd=with_recipe)
    assert done.returncode == 0, done.stderr


def kill_after_a_save(command, output, cwd):
    """Start a training, and kill it with all its processes soon after a checkpoint is there."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [sys.executable, *command, str(output)],
        cwd=cwd,
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    deadline = time.monotonic() + TIMEOUT_SECONDS
    while process.poll() is None and not list(output.glob("model_000000[3-9].pth")):
        assert time.monotonic() < deadline, "no checkpoint was saved"
        time.sleep(0.01)
    # torchrun comes first, and so it has no time to end its ranks in good order.
    pids = [process.pid, *descendants(process.pid)]
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):  # it was faster
            os.kill(pid, signal.SIGKILL)
    process.wait()
