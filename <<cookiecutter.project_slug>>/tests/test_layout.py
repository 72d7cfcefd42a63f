"""plumbing/ knows nothing of the files beside it, so it can be replaced or taken elsewhere."""

import ast

import pytest
from conftest import ROOT

PROGRAMS = {"train", "plot_schedule"}
OWNED = sorted({path.stem for path in ROOT.glob("*.py")} - PROGRAMS)  # beside train.py
PLUMBING = sorted(path.relative_to(ROOT).as_posix() for path in ROOT.glob("plumbing/**/*.py"))


def tree_of(name):
    return ast.parse((ROOT / name).read_text(encoding="utf-8"))


def imported(name):
    """Dotted names of what a file imports anywhere; ``from plumbing import comm`` in full."""
    package = name.split("/")[:-1]
    names = set()
    for node in ast.walk(tree_of(name)):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) + 1 - node.level] if node.level else []
            base = ".".join([*base, *filter(None, [node.module])])
            own = base.split(".")[0] == "plumbing"
            names.update(f"{base}.{alias.name}" if own else base for alias in node.names)
    return names


def is_below(name, module):
    return f"{name}.".startswith(f"{module}.")


@pytest.mark.parametrize("name", PLUMBING)
def test_plumbing_imports_only_comm_and_what_is_in_the_same_sub_package(name):
    roots = {module.split(".")[0] for module in imported(name)}
    assert not roots & {*PROGRAMS, *OWNED}
    own = {module for module in imported(name) if is_below(module, "plumbing")}
    allowed = [] if name == "plumbing/comm.py" else ["plumbing.comm"]
    if name.count("/") == 2:
        allowed.append(".".join(name.split("/")[:2]))
    assert [module for module in own if not any(is_below(module, a) for a in allowed)] == []
