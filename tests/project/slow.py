"""Trains as train.py does, but something takes for ever: SLOW says what.

The file STARTED is made when it begins.  With "disk", nothing is slow, and ranks wait for a second
only to see a file that rank 0 has written.
"""

import os
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "<<cookiecutter.project_slug>>"))

import data  # noqa: E402
import evaluation  # noqa: E402
import train  # noqa: E402
from plumbing import run_folder  # noqa: E402
from plumbing.launch import launch  # noqa: E402


def started():
    Path(os.environ["STARTED"]).touch()


class SlowEvaluator(evaluation.AccuracyEvaluator):
    def process(self, inputs, outputs):
        super().process(inputs, outputs)
        started()
        time.sleep(0.5)


class EndlessDigits(data.Digits):
    def __getitem__(self, index):
        if self.transform is not None and index % 7 == 0:
            started()
            while True:
                pass
        return super().__getitem__(index)


set_random_state = train.set_random_state


def wait_in_iteration_3(seed, iteration=0, rank=0):
    if iteration == 3:
        started()
        time.sleep(1000)
    set_random_state(seed, iteration, rank)


def wait_a_little(seed, iteration=0, rank=0):
    if iteration == 3:
        started()
    time.sleep(0.05)
    set_random_state(seed, iteration, rank)


def main(args):
    slow = os.environ["SLOW"]
    if slow == "evaluation":
        evaluation.AccuracyEvaluator = SlowEvaluator
    elif slow == "sample":
        data.Digits = EndlessDigits
    elif slow == "iteration":
        train.set_random_state = wait_in_iteration_3
    elif slow == "all iterations":
        train.set_random_state = wait_a_little
    elif slow == "disk":
        run_folder._SECONDS_TO_SEE_A_FILE = 1.0
    return train.main(args)


if __name__ == "__main__":
    launch(main, train.parse_args(""))
