"""Trains as train.py does, but rank 1 has a fault in iteration 5: FAULT is "nan" or "bug"."""

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "<<cookiecutter.project_slug>>"))

import train  # noqa: E402
from models import Faulty, Tiny  # noqa: E402
from plumbing import comm  # noqa: E402
from plumbing.events import get_event_storage  # noqa: E402
from plumbing.launch import launch  # noqa: E402


class Raises(Tiny):
    def forward(self, data):
        if self.training and comm.get_rank() == 1 and get_event_storage().iter == 5:
            raise KeyError("a bug on rank 1")
        return super().forward(data)


def build_model(cfg):
    return Faulty(5, rank=1) if os.environ["FAULT"] == "nan" else Raises()


if __name__ == "__main__":
    train.build_model = build_model
    launch(train.main, train.parse_args(""))
