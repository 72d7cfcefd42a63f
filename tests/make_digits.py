"""Make assets/digits.npz of the project folder from the copy that scikit-learn distributes.

Run by hand, in any environment that has scikit-learn:

    python tests/make_digits.py

The bytes of the file depend on nothing but the data and the zlib library in use.
"""

from pathlib import Path

import numpy as np

TARGET = Path(__file__).parents[1] / "<<cookiecutter.project_slug>>" / "assets" / "digits.npz"
TEST_PER_CLASS = 36
SEED = 0


def draw_test_indices(labels):
    """Return the sorted positions of the test samples: 36 of every class.

    ``RandomState`` is frozen by numpy's own promise, so every version draws the same samples.
    """
    random = np.random.RandomState(SEED)
    drawn = [
        random.permutation(np.flatnonzero(labels == label))[:TEST_PER_CLASS] for label in range(10)
    ]
    return np.sort(np.concatenate(drawn)).astype(np.int64)


def main():
    """Write the file and say what is in it."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    arrays = {
        "images": digits.images.astype(np.uint8),
        "labels": digits.target.astype(np.uint8),
        "test_indices": draw_test_indices(digits.target),
    }
    assert (arrays["images"] == digits.images).all(), "the pixels are not whole numbers"
    TARGET.parent.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(TARGET, **arrays)
    for name, array in arrays.items():
        print(name, array.dtype, array.shape, array.min(), array.max())


if __name__ == "__main__":
    main()
