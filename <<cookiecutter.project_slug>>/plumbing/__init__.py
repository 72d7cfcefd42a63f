"""What nobody edits: exact, fast and tested parts of a training, which take plain arguments."""

import importlib.util
import sys

# The first thing that any program of this project imports.  A package that is missing or too old
# would show up later, as an error that does not say what to do.
_REMEDY = "python -m pip install -r requirements.txt"

for _name in ("torch", "numpy", "tensorboard", "yacs"):
    if importlib.util.find_spec(_name) is None:
        sys.exit(f"error: the package {_name} is missing: {_REMEDY}")

import torch  # noqa: E402

_version = tuple(int(part) for part in torch.__version__.split(".")[:2])
if _version < (2, 13):
    sys.exit(f"error: torch {torch.__version__} is too old, 2.13 is needed: {_REMEDY}")
