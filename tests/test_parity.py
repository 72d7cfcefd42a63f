"""Every row of parity.md is there: files, names, settings, headings and tests, which use them."""

import ast
import functools
import re
from pathlib import Path

TEMPLATE = Path(__file__).resolve().parents[1]
PROJECT = TEMPLATE / "<<cookiecutter.project_slug>>"
PAGE = TEMPLATE / "tests" / "parity.md"


def path_of(name):
    inner = name.removeprefix("template/")
    return TEMPLATE / inner if inner != name else PROJECT / name


@functools.cache
def text_of(name):
    return path_of(name).read_text(encoding="utf-8")


@functools.cache
def tree_of(name):
    return ast.parse(text_of(name))


def read_rows(text):
    """[(id, what, where, test)] of all tables whose first column is "id"."""
    cells = [re.split(r"(?<!\\)\|", line)[1:-1] for line in text.splitlines() if line[:2] == "| "]
    rows = [tuple(cell.strip() for cell in row) for row in cells]
    return [row for row in rows if len(row) == 4 and re.fullmatch(r"[A-Z]\d+", row[0])]


def listed(text, label):
    (line,) = re.findall(rf"^{label}: (.*)$", text, re.M)
    return line.split()


ROWS = read_rows(PAGE.read_text(encoding="utf-8"))
DONE = [row for row in ROWS if not row[2].startswith("later:")]


def places_of(row):
    """[(file, name, or "" for all of the file)] where a row says that it lives."""
    return [tuple(code.partition(": ")[::2]) for code in re.findall(r"`(.*?)`", row[2])]


def proofs_of(row):
    """[(file, function)]"""
    return [tuple(code.split("::")) for code in re.findall(r"`(.*?)`", row[3])]


def assigned_settings(tree):
    """SOLVER.MAX_ITER and so on: what is assigned to an attribute of _C."""
    nodes = [n for n in ast.walk(tree) if isinstance(n, ast.Assign)]
    targets = [ast.unparse(target) for node in nodes for target in node.targets]
    return {name.removeprefix("_C.") for name in targets if name.startswith("_C.")}


def names_in(file):
    """What can be named of a file: functions, classes, methods, constants, settings, headings."""
    if not file.endswith(".py"):
        return set(re.findall(r"^#+ (.*)$", text_of(file), re.M))
    names = assigned_settings(tree_of(file))
    for node in tree_of(file).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            names.add(node.name)
        if isinstance(node, ast.ClassDef):
            methods = [inner for inner in node.body if isinstance(inner, ast.FunctionDef)]
            names.update(f"{node.name}.{method.name}" for method in methods)
        if isinstance(node, ast.Assign):
            names.update(target.id for target in node.targets if isinstance(target, ast.Name))
    return names


# What a test uses: itself, and what it names in its file and in conftest.py, and so on.


@functools.cache
def definitions(file):
    """{name: [nodes]} of the top level of a test file, in which an import is one too."""
    found = {}
    for node in tree_of(file).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            found.setdefault(node.name, []).append(node)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            for alias in node.names:
                found.setdefault((alias.asname or alias.name).split(".")[0], []).append(node)
        elif isinstance(node, ast.Assign):
            for target in ast.walk(node):
                if isinstance(target, ast.Name) and isinstance(target.ctx, ast.Store):
                    found.setdefault(target.id, []).append(node)
    return found


def words_of(node):
    """The identifiers and the words of all texts in a piece of code."""
    words = set()
    for each in ast.walk(node):
        names = [getattr(each, key, None) for key in ("id", "attr", "arg", "name", "value")]
        for name in names:
            if isinstance(name, str):
                words.update(re.findall(r"\w+(?:\.\w+)*", name))
    return words | {part for word in words for part in word.split(".")}


@functools.cache
def used_by(file, test):
    """(words, modules) of a test, followed through its helpers and fixtures."""
    folder = file.rpartition("/")[0]
    conftest = f"{folder}/conftest.py"
    words, modules, seen, todo = set(), set(), set(), [(file, test)]
    while todo:
        where, name = todo.pop()
        if (where, name) in seen:
            continue
        seen.add((where, name))
        nodes = definitions(where).get(name)
        if nodes is None:
            if where != conftest and name in definitions(conftest):
                todo.append((conftest, name))  # a fixture
            continue
        for node in nodes:
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                base = getattr(node, "module", None) or ""
                helper = f"{folder}/{base or name}.py"
                if path_of(helper).is_file():
                    todo.append((helper, name))
                else:
                    found = [base] if base else [alias.name for alias in node.names]
                    modules.update([*found, f"{base}.{name}"])
            else:
                inside = words_of(node)
                words |= inside
                todo += [(where, word) for word in inside]
    return words, modules


def touches(used, file, name):
    """Whether a test names what the row is about, or uses its module."""
    words, modules = used
    path = Path(file)
    if not name or not file.endswith(".py"):  # all of a file, or a page
        return bool(({path.name, path.stem, path.parent.name} - {"template"}) & words)
    module = file.removeprefix("template/").removesuffix(".py").replace("/", ".")
    above = {module, module.rpartition(".")[0]} - {"", "plumbing"}
    return bool(above & modules) or path.name in words or name.split(".")[-1] in words


@functools.cache
def reached_by_train():
    """The files of the project that train.py imports, or that these do."""
    files, todo = set(), ["train.py"]
    while todo:
        file = todo.pop()
        if file in files:
            continue
        files.add(file)
        for node in ast.walk(tree_of(file)):
            if isinstance(node, ast.ImportFrom):
                folder = file.rpartition("/")[0] + "/" if node.level else ""
                base = folder + (node.module or "").replace(".", "/")
                names = [base, f"{base}/__init__", *(f"{base}/{each.name}" for each in node.names)]
                names = [f"{name}.py" for name in names]
                todo += [name for name in names if path_of(name).is_file()]
    return files


def test_no_row_is_there_twice_and_none_is_missing():
    text = PAGE.read_text(encoding="utf-8")
    left_out, ids = listed(text, "left out on purpose"), [row[0] for row in ROWS]
    assert [each for each in ids if ids.count(each) > 1] == []
    expected = set()
    for family in listed(text, "families"):
        letter, first, last = re.fullmatch(r"([A-Z])(\d+)-\1(\d+)", family).groups()
        expected |= {f"{letter}{number}" for number in range(int(first), int(last) + 1)}
    assert set(ids) & set(left_out) == set()
    assert expected == {*ids, *left_out}
    assert len(expected) == 276


def test_what_is_for_later_has_a_reason_and_the_rest_a_place_and_a_test():
    for row in ROWS:
        if row[2].startswith("later:"):
            assert len(row[2].split()) > 5, row[0]
            assert row[3] == "-", row[0]
        else:
            assert places_of(row), row[0]
            assert proofs_of(row), row[0]


def test_the_places_of_all_rows_exist():
    missing = []
    for row in DONE:
        for file, name in places_of(row):
            if not path_of(file).is_file() or (name and name not in names_in(file)):
                missing.append(f"{row[0]}: {file}: {name}")
    assert not missing, "\n".join(missing)


def test_the_tests_of_all_rows_exist_and_name_what_they_are_about():
    wrong = []
    for row in DONE:
        for file, test in proofs_of(row):
            if not path_of(file).is_file() or test not in names_in(file) or test[:5] != "test_":
                wrong.append(f"{row[0]}: there is no {file}::{test}")
            elif not any(touches(used_by(file, test), *place) for place in places_of(row)):
                wrong.append(f"{row[0]}: {test} uses none of {row[2]}")
    assert not wrong, "\n".join(wrong)


def test_each_place_is_used_by_a_test_of_its_row_or_by_a_run_of_the_training_in_one():
    unused = []
    for row in DONE:
        used = [used_by(*proof) for proof in proofs_of(row)]
        trains = any("train" in modules or "train.py" in words for words, modules in used)
        for file, name in places_of(row):
            reached = trains and (file in reached_by_train() or file.endswith(".md"))
            if not reached and not any(touches(each, file, name) for each in used):
                unused.append(f"{row[0]}: {file}: {name}")
    assert not unused, "\n".join(unused)


# What the page claims of the whole.


def test_the_template_has_the_five_parts_of_its_kind():
    parts = "cookiecutter.json", "README.md", "<<cookiecutter.project_slug>>", "hooks", "tests"
    assert [name for name in parts if not (TEMPLATE / name).exists()] == []


def test_one_function_trains_and_there_is_no_trainer_hook_or_registry():
    files = [*PROJECT.glob("*.py"), *PROJECT.glob("plumbing/**/*.py")]
    nodes = [node for path in files for node in ast.walk(ast.parse(path.read_text()))]
    functions = [node for node in nodes if isinstance(node, ast.FunctionDef)]
    (do_train,) = [node for node in functions if node.name == "do_train"]
    names = [node.name for node in [*functions, *nodes] if isinstance(node, ast.ClassDef)]
    assert not [n for n in names if re.search("Trainer|Runner|Hook|Callback|Registry", n)]
    assert not [f.name for f in functions if re.search("register|before_step|after_step", f.name)]
    loops = [node for node in ast.walk(do_train) if isinstance(node, ast.For)]
    trains = [loop for loop in loops if "range(start_iter, max_iter)" in ast.unparse(loop.iter)]
    assert [ast.unparse(loop.iter).partition("(")[0] for loop in trains] == ["zip"]
    assert trains[0].iter.args[0] is not trains[0].iter.args[-1]
    assert "range" in ast.unparse(trains[0].iter.args[0])  # first: no batch too many is drawn
