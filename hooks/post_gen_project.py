"""Tidy the new project, make it a git repository with its files added, say what to do next."""

import json
import os
import shlex
import shutil
import subprocess
from pathlib import Path

(LICENSE,) = json.loads(r"""<< [cookiecutter.license] | jsonify >>""")
ELSEWHERE = ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE")
CACHES = ("__pycache__", ".pytest_cache", ".ruff_cache", ".mypy_cache")


def git(*arguments):
    """Run git here, whatever repository the environment points at; return whether it worked."""
    env = {k: v for k, v in os.environ.items() if k not in ELSEWHERE}
    try:
        return subprocess.run(["git", *arguments], env=env, capture_output=True).returncode == 0
    except OSError:
        return False


here = Path.cwd()
if LICENSE == "none":
    Path("LICENSE").unlink(missing_ok=True)
for root, folders, _ in os.walk("."):
    for name in CACHES:
        shutil.rmtree(Path(root, name), ignore_errors=True)
    folders[:] = [name for name in folders if name not in (*CACHES, ".git", ".venv")]

inside = any(Path(folder, ".git").exists() for folder in (here, *here.parents))
# Not "init -b main", which git has only since 2.28.
if not inside and git("init") and git("symbolic-ref", "HEAD", "refs/heads/main"):
    git("add", ".")

print(f"cd {shlex.quote(here.name if os.environ.get('PWD') == str(here.parent) else str(here))}")
print("python3 -m venv .venv && . .venv/bin/activate && pip install -r requirements-dev.txt")
print("torchrun --standalone --nproc_per_node 2 train.py --config cfg.yaml    # train")
print("python -m pytest                                                     # test")
