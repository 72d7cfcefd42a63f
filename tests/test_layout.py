"""The three rooms of a new project: who imports whom, and what the files do not do."""

import ast
import re
import sys
from pathlib import Path

import pytest

TEMPLATE = Path(__file__).resolve().parents[1]
ROOT = TEMPLATE / "<<cookiecutter.project_slug>>"

PROGRAMS = {"train", "predict"}
OWNED = sorted({path.stem for path in ROOT.glob("*.py")} - PROGRAMS)
LIBRARIES = {"torch", "numpy", "tensorboard", "yacs"}
PLUMBING = sorted(path.relative_to(ROOT).as_posix() for path in ROOT.glob("plumbing/**/*.py"))
FILES = [*(f"{name}.py" for name in sorted(PROGRAMS | set(OWNED))), *PLUMBING]


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


def calls(name, *functions):
    """The calls in a file of functions that have these names."""
    nodes = [node for node in ast.walk(tree_of(name)) if isinstance(node, ast.Call)]
    return [node for node in nodes if isinstance(node.func, ast.Name) and node.func.id in functions]


def order_of_plumbing():
    """The order in which CONTRIBUTING.md draws the modules of plumbing, the lowest first."""
    page = (TEMPLATE / "CONTRIBUTING.md").read_text(encoding="utf-8")
    drawing = re.search(r"^errors\b.*?(?=^```)", page, re.M | re.S).group()
    return [word for word in drawing.split() if word.isidentifier()]


def module_of_plumbing(name):
    """The module or package that a file of plumbing, or a dotted name in it, belongs to."""
    return name.removesuffix(".py").replace("/", ".").split(".")[1]


@pytest.mark.parametrize("name", FILES)
def test_only_the_standard_library_and_four_others_are_imported(name):
    roots = {module.split(".")[0] for module in imported(name)}
    own = {*PROGRAMS, *OWNED, "plumbing"}
    assert roots - set(sys.stdlib_module_names) - own <= LIBRARIES


@pytest.mark.parametrize("name", FILES)
def test_no_file_imports_a_program(name):
    assert not {module.split(".")[0] for module in imported(name)} & PROGRAMS


def test_the_files_of_the_researcher_do_not_import_each_other_in_a_circle():
    below = {}
    for name in OWNED:
        below[name] = {module.split(".")[0] for module in imported(f"{name}.py")} & set(OWNED)
    while below:
        lowest = [name for name in below if not below[name] & set(below)]
        assert lowest, below
        for name in lowest:
            del below[name]


@pytest.mark.parametrize("name", PLUMBING)
def test_plumbing_knows_nothing_of_the_files_of_the_researcher(name):
    assert not {module.split(".")[0] for module in imported(name)} & {*PROGRAMS, *OWNED}


def test_the_order_of_plumbing_names_each_module_once():
    modules = {module_of_plumbing(name) for name in PLUMBING} - {"__init__"}
    assert sorted(order_of_plumbing()) == sorted(modules)


@pytest.mark.parametrize("name", [name for name in PLUMBING if name != "plumbing/__init__.py"])
def test_a_file_of_plumbing_imports_only_modules_that_are_lower_in_the_order(name):
    order = order_of_plumbing()
    own = module_of_plumbing(name)
    used = {module_of_plumbing(m) for m in imported(name) if m.startswith("plumbing.")} - {own}
    assert used <= set(order[: order.index(own)])


@pytest.mark.parametrize("name", FILES)
def test_nothing_is_printed_but_the_line_of_an_error_and_predictions(name):
    assert len(calls(name, "print")) == (name in ("plumbing/launch.py", "predict.py"))


@pytest.mark.parametrize("name", FILES)
def test_no_class_is_made_from_its_name(name):
    assert not imported(name) & {"importlib", "pydoc"}
    assert not calls(name, "eval", "exec", "globals", "vars", "__import__")
    # By its name only a dtype is looked up in a module.
    nodes = [node for node in ast.walk(tree_of(name)) if isinstance(node, ast.Import)]
    modules = {alias.name for node in nodes for alias in node.names}
    for call in calls(name, "getattr"):
        is_module = ast.unparse(call.args[0]).split(".")[0] in modules
        by_name = not isinstance(call.args[1], ast.Constant)
        assert not (is_module and by_name) or name in (
            "solver.py",
            "plumbing/checkpoint/shard_files.py",
        )


@pytest.mark.parametrize("name", FILES)
def test_python_O_is_the_same_but_for_the_use_of_a_storage_that_is_not_open(name):
    nodes = list(ast.walk(tree_of(name)))
    asserts = [node for node in nodes if isinstance(node, ast.Assert)]
    assert all("get_event_storage() " in ast.unparse(node) for node in asserts)
    assert "__debug__" not in [node.id for node in nodes if isinstance(node, ast.Name)]


def test_the_readme_shows_the_loop_as_it_is():
    readme = (TEMPLATE / "README.md").read_text(encoding="utf-8")
    lines = (ROOT / "train.py").read_text(encoding="utf-8").splitlines()
    (loop,) = [
        node
        for node in ast.walk(tree_of("train.py"))
        if isinstance(node, ast.For) and "range(start_iter, max_iter)" in ast.unparse(node.iter)
    ]
    shown = "\n".join(lines[loop.lineno - 1 : loop.end_lineno])
    code = "\n".join(re.findall(r"^```python\n(.*?)^```$", readme, re.M | re.S))
    assert shown in code


@pytest.mark.parametrize("page", [TEMPLATE / "README.md", ROOT / "README.md"])
def test_a_readme_fits_on_150_lines(page):
    assert len(page.read_text(encoding="utf-8").splitlines()) <= 150


def test_the_project_speaks_of_itself_alone():
    words = re.compile(r"\bissue #?\d|\bsession \d|/work/|/root/|/opt/", re.I)
    pages = [*ROOT.glob("*"), *ROOT.glob("plumbing/**/*.py"), *ROOT.glob("tests/*.py")]
    pages = [path for path in pages if path.is_file()]
    found = [path.name for path in pages if words.search(path.read_text(encoding="utf-8"))]
    assert len(pages) > 30
    assert found == []


def test_checkpoint_and_events_do_not_import_each_other():
    for one, other in (("checkpoint", "events"), ("events", "checkpoint")):
        for name in PLUMBING:
            if name.startswith(f"plumbing/{one}/"):
                assert not [m for m in imported(name) if m.startswith(f"plumbing.{other}")], name
