"""results.json: the numbers of a finished run.  A run that was stopped has none."""

import contextlib
import json
import math
import os

from plumbing import comm
from plumbing.files import write_atomically


def save_results(output_dir: str, iteration: int, results: dict[str, float]) -> None:
    """Write {"iteration": 99, name: number, ...}; a number that is not finite becomes null.

    Args:
        iteration: the last one of the run, after which the results were found.
    """
    if not comm.is_main_process():
        return
    contents = {"iteration": iteration}
    for name, value in results.items():
        contents[name] = float(value) if math.isfinite(value) else None
    text = json.dumps(contents, indent=2, allow_nan=False)
    write_atomically(_path(output_dir), lambda file: file.write(text.encode()))


def load_results(output_dir: str, iteration: int) -> dict[str, float] | None:
    """Return the saved results, or None if the run has not come to ``iteration``.  Collective."""
    return comm.from_main_process(lambda: _read(_path(output_dir), iteration))


def remove_results(output_dir: str) -> None:
    """Remove the results of a shorter run, which now continues; there may be none."""
    if comm.is_main_process():
        with contextlib.suppress(FileNotFoundError):
            os.remove(_path(output_dir))


def _read(path: str, iteration: int) -> dict[str, float] | None:
    # A file that was damaged or edited by hand is as good as none.
    try:
        with open(path, encoding="utf-8") as file:
            contents = json.load(file)
        last_iter = contents.pop("iteration")
        results = {name: math.nan if v is None else float(v) for name, v in contents.items()}
        return results if last_iter >= iteration else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _path(output_dir: str) -> str:
    return os.path.join(output_dir, "results.json")
