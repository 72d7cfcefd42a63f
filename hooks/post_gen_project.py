"""Tidy the new project, apply its recipes, make it a git repository, say what to do next."""

import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

LICENSE, RECIPES = json.loads(r"""<< [cookiecutter.license, cookiecutter.recipes] | jsonify >>""")
ELSEWHERE = ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE")
CACHES = ("__pycache__", ".pytest_cache", ".ruff_cache", ".mypy_cache")


def git(*arguments, **variables):
    """Run git here, whatever repository the environment points at; return whether it worked."""
    env = {k: v for k, v in os.environ.items() if k not in ELSEWHERE}
    env.update(variables)
    try:
        return subprocess.run(["git", *arguments], env=env, capture_output=True).returncode == 0
    except OSError:
        return False


def apply_recipes(names):
    """Apply patches in a scratch repository, where git can merge those that touch each other."""
    with tempfile.TemporaryDirectory() as scratch:
        repository = {"GIT_DIR": scratch, "GIT_WORK_TREE": str(Path.cwd())}
        git("init", **repository)
        git("add", ".", **repository)
        for name in names:
            if not git("apply", "--3way", f"recipes/{name}.patch", **repository):
                sys.exit(f"ERROR: recipe {name} does not fit those before it, or git is missing")


here = Path.cwd()
if LICENSE == "none":
    Path("LICENSE").unlink(missing_ok=True)
for root, folders, _ in os.walk("."):
    for name in CACHES:
        shutil.rmtree(Path(root, name), ignore_errors=True)
    folders[:] = [name for name in folders if name not in (*CACHES, ".git", ".venv")]

if RECIPES.split() not in ([], ["none"]):
    apply_recipes(RECIPES.split())
inside = any(Path(folder, ".git").exists() for folder in (here, *here.parents))
# Not "init -b main", which git has only since 2.28.
if not inside and git("init") and git("symbolic-ref", "HEAD", "refs/heads/main"):
    git("add", ".")

print(f"cd {shlex.quote(here.name if os.environ.get('PWD') == str(here.parent) else str(here))}")
print("make train    # the first time this makes .venv and installs PyTorch into it")
print("make test")
print("make help     # the other commands; the README has them without make, too")
