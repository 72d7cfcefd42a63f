"""Trains as train.py does, but the loss of rank 1 is not a number in iteration 5."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "<<cookiecutter.project_slug>>"))

import train  # noqa: E402
from models import Faulty  # noqa: E402
from plumbing.launch import launch  # noqa: E402

if __name__ == "__main__":
    train.build_model = lambda cfg: Faulty(iteration=5, rank=1)
    launch(train.main, train.parse_args(""))
