"""The shape of a new project: who imports whom, how long files are, what the loop asks."""

import ast
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1] / "<<cookiecutter.project_slug>>"

PROGRAMS = {"train", "plot_schedule"}
OWNED = sorted({path.stem for path in ROOT.glob("*.py")} - PROGRAMS)  # beside train.py
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


def is_below(name, module):
    return f"{name}.".startswith(f"{module}.")


def calls(name, *functions):
    """The calls in a file of functions that have these names."""
    nodes = [node for node in ast.walk(tree_of(name)) if isinstance(node, ast.Call)]
    return [node for node in nodes if isinstance(node.func, ast.Name) and node.func.id in functions]


def num_lines(name):
    return len((ROOT / name).read_text(encoding="utf-8").splitlines())


def span(node):
    return node.end_lineno - node.lineno + 1


@pytest.fixture(scope="module")
def do_train():
    """The syntax tree of train.do_train."""
    functions = [node for node in tree_of("train.py").body if isinstance(node, ast.FunctionDef)]
    return next(node for node in functions if node.name == "do_train")


@pytest.mark.parametrize("name", FILES)
def test_only_the_standard_library_and_four_others_are_imported(name):
    roots = {module.split(".")[0] for module in imported(name)}
    assert roots - set(sys.stdlib_module_names) - set(OWNED) - {"plumbing"} <= LIBRARIES


@pytest.mark.parametrize("owned", OWNED)
def test_the_files_beside_train_import_no_other_of_them(owned):
    roots = {module.split(".")[0] for module in imported(f"{owned}.py")}
    assert not roots & {*PROGRAMS, *OWNED}


@pytest.mark.parametrize("name", PLUMBING)
def test_plumbing_imports_only_comm_and_what_is_in_the_same_sub_package(name):
    roots = {module.split(".")[0] for module in imported(name)}
    assert not roots & {*PROGRAMS, *OWNED}
    own = {module for module in imported(name) if is_below(module, "plumbing")}
    allowed = [] if name == "plumbing/comm.py" else ["plumbing.comm"]
    if name.count("/") == 2:
        allowed.append(".".join(name.split("/")[:2]))
    assert [module for module in own if not any(is_below(module, a) for a in allowed)] == []


def test_train_has_at_most_220_lines():
    assert num_lines("train.py") <= 220


def test_plumbing_has_at_most_1500_lines_and_260_in_a_file():
    lines = {name: num_lines(name) for name in PLUMBING}
    assert {name: count for name, count in lines.items() if count > 260} == {}
    assert sum(lines.values()) <= 1500


def test_do_train_has_at_most_70_lines_and_its_loop_45(do_train):
    loops = [node for node in ast.walk(do_train) if isinstance(node, ast.For)]
    assert span(do_train) <= 70
    assert max(map(span, loops)) <= 45


def test_do_train_asks_at_most_three_times(do_train):
    assert sum(isinstance(node, (ast.If, ast.IfExp)) for node in ast.walk(do_train)) <= 3


@pytest.mark.parametrize("name", FILES)
def test_nothing_is_printed_but_the_line_of_an_error(name):
    assert len(calls(name, "print")) == (name == "plumbing/setup.py")


@pytest.mark.parametrize("name", FILES)
def test_no_class_is_made_from_its_name(name):
    assert not imported(name) & {"importlib", "pydoc"}
    assert not calls(name, "eval", "exec", "globals", "vars", "__import__")
    assert all(isinstance(call.args[1], ast.Constant) for call in calls(name, "getattr"))


@pytest.mark.parametrize("name", FILES)
def test_python_O_is_the_same_but_for_the_use_of_a_storage_that_is_not_open(name):
    nodes = list(ast.walk(tree_of(name)))
    asserts = [node for node in nodes if isinstance(node, ast.Assert)]
    assert all("get_event_storage() " in ast.unparse(node) for node in asserts)
    assert "__debug__" not in [node.id for node in nodes if isinstance(node, ast.Name)]


def test_the_readme_shows_the_loop_as_it_is_and_fits_on_150_lines(do_train):
    readme = (ROOT.parent / "README.md").read_text(encoding="utf-8")
    lines = (ROOT / "train.py").read_text(encoding="utf-8").splitlines()
    loop = "\n".join(lines[do_train.lineno - 1 : do_train.end_lineno])
    assert f"```python\n{loop}\n```" in readme
    assert len(readme.splitlines()) <= 150
