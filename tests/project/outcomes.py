"""What a run leaves in its folder, read so that two runs can be compared to the bit."""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch

# Names of what depends on the clock.
CLOCKS = ("time", "data_time", "samples_per_second", "eta_seconds")


def strict(text):
    """JSON without NaN and Infinity, which Python would take."""
    return json.loads(text, parse_constant=lambda constant: pytest.fail(f"{constant} is not JSON"))


def rows_of(output, left_out=()):
    """The rows of metrics.json, without the names that are left out."""
    rows = []
    for line in (output / "metrics.json").read_text().splitlines():
        row = strict(line)
        rows.append({name: value for name, value in row.items() if name not in left_out})
    return rows


def column(output, name):
    """{iteration: value} of what metrics.json holds under a name, medians of what is smoothed."""
    return {row["iteration"]: row[name] for row in rows_of(output) if name in row}


def history_of(output, name):
    """{iteration: value} of every iteration, from the last checkpoint."""
    storage = torch.load(output / "model_final.pth")["storage"]
    pairs = storage["histories"][name]["pairs"].tolist()
    return {int(iteration): value for value, iteration in pairs}


def checkpoint_of(output, name="model_final"):
    """What a file holds, without clocks and settings."""
    checkpoint = torch.load(output / f"{name}.pth")
    del checkpoint["config"]
    for part in ("histories", "smoothing_hints"):
        for clock in CLOCKS:
            checkpoint["storage"][part].pop(clock, None)
    return checkpoint


def model_of(output, name="model_final"):
    return torch.load(output / f"{name}.pth")["model"]


def outcome_of(output):
    """Everything that a run leaves, without clocks and settings."""
    return {
        "file": checkpoint_of(output),
        "rows": rows_of(output, CLOCKS),
        "results": strict((output / "results.json").read_text()),
        "best": strict((output / "model_best.json").read_text()),
    }


def differences(one, other, path=""):
    """The places where two trees differ, to the bit."""
    if type(one) is not type(other):
        return [path]
    if isinstance(one, dict):
        found = [f"{path}/{key}" for key in one.keys() ^ other.keys()]
        for key in one.keys() & other.keys():
            found += differences(one[key], other[key], f"{path}/{key}")
        return found
    if isinstance(one, (list, tuple)):
        found = [] if len(one) == len(other) else [f"{path}/length"]
        for number, pair in enumerate(zip(one, other)):
            found += differences(*pair, f"{path}/{number}")
        return found
    same = torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other
    return [] if same else [path]


def assert_same_outcome(one, other):
    assert differences(outcome_of(one), outcome_of(other)) == []


def contents(folder, *left_out):
    """{path: (content, when written)} of the files below a folder, without those left out."""
    files = {}
    for path in Path(folder).rglob("*"):
        if path.is_file() and path.name not in left_out:
            files[str(path)] = (path.read_bytes(), path.stat().st_mtime_ns)
    return files


def rewound(output, copy, iteration=7):
    """Copy a run, and put it back to the moment right after the save of an iteration."""
    shutil.copytree(output, copy)
    newest = f"model_{iteration:07d}.pth"
    for path in copy.glob("model_0*.pth"):
        if path.name > newest:
            path.unlink()
    for name in ("model_final.pth", "results.json"):
        (copy / name).unlink(missing_ok=True)
    (copy / "last_checkpoint").write_text(newest)
    return copy


def starts_of(output):
    """The first iterations of the resumed sessions of a run, from its log."""
    log = (output / "log.txt").read_text()
    return [int(number) + 1 for number in re.findall(r"Resuming from .*model_(\d+)\.pth", log)]
