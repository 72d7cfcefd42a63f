"""plumbing/ knows nothing of the files beside it, and its own files import in one direction."""

import ast

import pytest
from conftest import ROOT

# A file, or a package such as checkpoint/, imports only from those that stand before it.
ORDER = [
    "errors",
    "comm",
    "buffers",
    "values",
    "settings",
    "random_state",
    "files",
    "precision",
    "gradients",
    "parallel",
    "schedule",
    "checkpoint",
    "events",
    "signals",
    "preemption",
    "samplers",
    "seeding",
    "shared_memory",
    "workers",
    "prefetch",
    "loading",
    "inference",
    "timing",
    "run_folder",
    "environment",
    "launch",
    "run_settings",
    "arguments",
]

PLUMBING = sorted(path.relative_to(ROOT).as_posix() for path in ROOT.glob("plumbing/**/*.py"))
OWNED = {path.stem for path in ROOT.glob("*.py")}  # the files of the researcher


def imported_names(source, name):
    """Dotted names of everything that a file imports anywhere; relative imports in full.

    Args:
        source: the text of the file.
        name: its path, such as "plumbing/events/storage.py".
    """
    package = name.split("/")[:-1]
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) + 1 - node.level] if node.level else []
            if node.module:
                base = [*base, *node.module.split(".")]
            names.update(".".join([*base, alias.name]) for alias in node.names)
    return names


def place_of(dotted):
    """The entry of ORDER of plumbing.NAME.anything; None for a name that is not of plumbing."""
    words = dotted.split(".")
    return words[1] if words[0] == "plumbing" and len(words) > 1 else None


def wrong_imports(source, name):
    """The names that a file of plumbing must not import."""
    own = name.split("/")[1].removesuffix(".py")
    allowed = ORDER[: ORDER.index(own)]
    if name.count("/") == 2:
        allowed = [*allowed, own]
    wrong = []
    for imported in sorted(imported_names(source, name)):
        place = place_of(imported)
        if imported.split(".")[0] in OWNED or (place is not None and place not in allowed):
            wrong.append(imported)
    return wrong


@pytest.mark.parametrize("name", [name for name in PLUMBING if name != "plumbing/__init__.py"])
def test_a_file_of_plumbing_imports_only_those_before_it(name):
    assert wrong_imports((ROOT / name).read_text(encoding="utf-8"), name) == []


def test_the_order_names_every_file_of_plumbing_and_no_other():
    names = {name.split("/")[1].removesuffix(".py") for name in PLUMBING}
    assert names - {"__init__"} == set(ORDER)
    assert len(ORDER) == len(set(ORDER))


def test_checkpoints_and_events_do_not_know_each_other():
    for package, other in (("checkpoint", "events"), ("events", "checkpoint")):
        for path in (ROOT / "plumbing" / package).glob("*.py"):
            name = path.relative_to(ROOT).as_posix()
            names = imported_names(path.read_text(encoding="utf-8"), name)
            assert other not in {place_of(imported) for imported in names}


@pytest.mark.parametrize(
    ("name", "source", "wrong"),
    [
        ("plumbing/comm.py", "from plumbing.errors import SettingsError", []),
        ("plumbing/comm.py", "from plumbing import settings", ["plumbing.settings"]),
        ("plumbing/comm.py", "import plumbing.launch", ["plumbing.launch"]),
        ("plumbing/comm.py", "from . import launch", ["plumbing.launch"]),
        ("plumbing/comm.py", "def f():\n    import train", ["train"]),
        ("plumbing/comm.py", "from defaults import get_cfg", ["defaults.get_cfg"]),
        ("plumbing/comm.py", "import torch, os.path", []),
        ("plumbing/events/a.py", "from .b import c\nfrom plumbing.events.d import e", []),
        ("plumbing/events/a.py", "from ..launch import f", ["plumbing.launch.f"]),
    ],
)
def test_an_import_in_the_wrong_direction_is_noticed(name, source, wrong):
    assert wrong_imports(source, name) == wrong
