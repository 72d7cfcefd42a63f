"""The data set that comes with the project is as described, and a training on it succeeds."""

import hashlib
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from conftest import PROJECT
from make_digits import draw_test_indices


@pytest.fixture(scope="module")
def digits(template):
    """The arrays of the shipped file, by name."""
    with np.load(template / PROJECT / "assets" / "digits.npz") as file:
        return dict(file)


def test_shapes_types_and_ranges(digits):
    assert {name: (a.dtype.name, a.shape) for name, a in digits.items()} == {
        "images": ("uint8", (1797, 8, 8)),
        "labels": ("uint8", (1797,)),
        "test_indices": ("int64", (360,)),
    }
    assert (digits["images"].min(), digits["images"].max()) == (0, 16)


def test_every_pixel_and_label_is_the_original_one(digits):
    data = digits["images"].tobytes() + digits["labels"].tobytes()
    assert hashlib.sha256(data).hexdigest() == (
        "87ff0c9e40dc7e2c0e34e7257799c2e3f3aec1a016363bb11cad869ec428a826"
    )
    counts = [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]
    assert np.bincount(digits["labels"]).tolist() == counts


def test_the_test_split_holds_36_of_every_class_and_follows_its_rule(digits):
    split = digits["test_indices"]
    assert len(set(split.tolist())) == 360
    assert np.bincount(digits["labels"][split]).tolist() == [36] * 10
    assert np.array_equal(split, draw_test_indices(digits["labels"]))


def test_the_source_and_its_licence_are_named_beside_the_data(template):
    text = (template / PROJECT / "assets" / "digits.txt").read_text()
    for fact in ("E. Alpaydin and C. Kaynak", "10.24432/C50P49", "CC BY 4.0", "What was changed"):
        assert fact in text


def test_two_ranks_reach_the_accuracy_that_the_readme_promises(project):
    """The program prints the time as well; `make bench` compares it with its floor."""
    program = Path(__file__).parent / "bench" / "digits.py"
    command = [sys.executable, str(program), "--project", str(project)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    accuracy, _ = [line.split("|") for line in done.stdout.splitlines()]
    assert float(accuracy[4]) >= 0.98
