"""Every row of parity.md is true: its files, names, settings, recipes and tests are there."""

import ast
import functools
import re
from pathlib import Path

import recipes

TEMPLATE = Path(__file__).resolve().parents[1]
PROJECT = TEMPLATE / "<<cookiecutter.project_slug>>"
PAGE = TEMPLATE / "tests" / "parity.md"
TO_COME = "(still to come)"

# Where the tests are that the page names as "project/events: ...".
FOLDERS = {
    "project": TEMPLATE / "tests" / "project",
    "suite": PROJECT / "tests",
    "template": TEMPLATE / "tests",
}


def read_rows(text):
    """[(id, what, where, test)] of all tables whose first column is "id" and which have four."""
    cells = [re.split(r"(?<!\\)\|", line)[1:-1] for line in text.splitlines() if line[:2] == "| "]
    rows = [tuple(cell.strip() for cell in row) for row in cells]
    return [row for row in rows if len(row) == 4 and re.fullmatch(r"[A-Z]\d+", row[0])]


def listed(label):
    (line,) = re.findall(rf"^{label}: (.*)$", TEXT, re.MULTILINE)
    return set(line.split()) - {"none"}


TEXT = PAGE.read_text(encoding="utf-8")
ROWS = read_rows(TEXT)
LEFT_OUT = dict(re.findall(r"^\| ([A-Z]\d+) \| [^|]+ \| ([^|]+) \|$", TEXT, re.MULTILINE))
LATER = [row for row in ROWS if row[2].startswith("later:")]
WAITING = [row for row in ROWS if row[2].endswith(TO_COME)]
DONE = [row for row in ROWS if row not in LATER and row not in WAITING]


# What a row names.


def codes_in(cell):
    return re.findall(r"`(.*?)`", cell)


def settings_of(row):
    return [code for code in codes_in(row[2]) if re.fullmatch(r"[A-Z0-9_.]+", code)]


def recipes_of(row):
    codes = codes_in(row[2])
    return [code.removeprefix("recipe ") for code in codes if code.startswith("recipe ")]


def places_of(row):
    """[(path, name, or "" for all of the file)] where a row says that it lives."""
    others = {*settings_of(row), *(f"recipe {name}" for name in recipes_of(row))}
    return [tuple(code.partition(": ")[::2]) for code in codes_in(row[2]) if code not in others]


def proofs_of(row):
    """[(where, test)]: where is "project/events" or "recipe ema", the test without "test_"."""
    return [tuple(code.split(": ")) for code in codes_in(row[3])]


# The sources of what it names.


@functools.cache
def text_of(path):
    """The text of a file of the project, or with template/ of the template."""
    inner = path.removeprefix("template/")
    file = TEMPLATE / inner if inner != path else PROJECT / path
    return file.read_text(encoding="utf-8") if file.is_file() else None


@functools.cache
def patch_of(recipe):
    path = recipes.RECIPES / f"{recipe}.patch"
    return path.read_text(encoding="utf-8") if path.is_file() else ""


@functools.cache
def source_of_tests(where):
    """The text of the file with the tests that ``where`` names; "" if there is none."""
    if where.startswith("recipe "):
        name = where.removeprefix("recipe ")
        part = patch_of(name).partition(f"diff --git a/tests/test_{name}.py b/")[2]
        part = part.partition("\n@@")[2].partition("\ndiff --git ")[0]
        return "\n".join(re.findall(r"^\+(.*)$", part, re.MULTILINE))
    folder, _, name = where.partition("/")
    path = FOLDERS[folder] / f"test_{name}.py"
    return path.read_text(encoding="utf-8") if path.is_file() else ""


@functools.cache
def definitions(text):
    """{name: [nodes]} of the top level of a file, in which an import is one too."""
    found = {}
    for node in ast.parse(text).body:
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


@functools.cache
def settings_in(text):
    return set(re.findall(r"^\+?_C\.([A-Z0-9_.]+) = (?!CfgNode)", text, re.MULTILINE))


@functools.cache
def names_in(path):
    """What can be named of a file: functions, classes, methods, constants, headings."""
    text = text_of(path)
    if not path.endswith(".py"):
        return set(re.findall(r"^#+ (.*)$", text, re.MULTILINE))
    names = set(definitions(text))
    for node in ast.parse(text).body:
        if isinstance(node, ast.ClassDef):
            methods = [inner for inner in node.body if isinstance(inner, ast.FunctionDef)]
            names.update(f"{node.name}.{method.name}" for method in methods)
    return names


# What a test uses: itself, and what it names in its file and in the files beside it.


def words_of(node):
    """The identifiers, and the words of all strings, in a piece of code."""
    words = set()
    for each in ast.walk(node):
        for key in ("id", "attr", "arg", "name", "value"):
            name = getattr(each, key, None)
            if isinstance(name, str):
                words.update(re.findall(r"\w+(?:\.\w+)*", name))
    return words | {part for word in words for part in word.split(".")}


@functools.cache
def used_by(where, test):
    """(words, modules) of a test, followed through its helpers and fixtures."""
    folder = where.partition("/")[0]
    todo = [(where, f"test_{test}")]
    words = set()
    modules = set()
    seen = set()
    while todo:
        file, name = todo.pop()
        if (file, name) in seen:
            continue
        seen.add((file, name))
        for node in definitions(source_of(file)).get(name, []):
            if not isinstance(node, (ast.Import, ast.ImportFrom)):
                inside = words_of(node)
                words |= inside
                todo += [(file, word) for word in inside]
                todo += [(f"{folder}/conftest.py", word) for word in inside]
                continue
            base = getattr(node, "module", None) or name
            if source_of(f"{folder}/{base}.py"):
                todo.append((f"{folder}/{base}.py", name))
            modules.update([base, f"{base}.{name}"])
    return words, modules


@functools.cache
def source_of(where):
    """The text of "project/events", which is a file with tests, or of "project/conftest.py"."""
    folder, _, name = where.partition("/")
    if not name.endswith(".py"):
        return source_of_tests(where)
    if folder not in FOLDERS:  # the tests of a recipe stand beside those of a project
        folder = "suite"
    path = FOLDERS[folder] / name
    return path.read_text(encoding="utf-8") if path.is_file() else ""


@functools.cache
def reached_by_train():
    """The files of the project that train.py imports, or that these do."""
    files = set()
    todo = ["train.py"]
    while todo:
        path = todo.pop()
        if path in files:
            continue
        files.add(path)
        for node in ast.walk(ast.parse(text_of(path))):
            if isinstance(node, ast.ImportFrom):
                folder = path.rpartition("/")[0] + "/" if node.level else ""
                base = folder + (node.module or "").replace(".", "/")
                names = [base, f"{base}/__init__", *(f"{base}/{each.name}" for each in node.names)]
                todo += [f"{name}.py" for name in names if text_of(f"{name}.py") is not None]
    return files


def touches(used, path, name):
    """Whether a test names a place, uses its module, or runs the whole program."""
    words, modules = used
    file = Path(path)
    if not name or not path.endswith(".py"):  # all of a file, or a page
        return bool({file.name, file.stem, file.stem.upper(), file.parent.name} & words)
    module = path.removeprefix("template/").removesuffix(".py").replace("/", ".")
    above = {module, module.rpartition(".")[0]} - {"", "plumbing"}
    runs = path in reached_by_train() and bool({"train", "train.py"} & (words | modules))
    return runs or bool(above & modules) or file.name in words or name.split(".")[-1] in words


# What a row says, and what the name of a test says.

# Words that join others, and those that stand in too many rows to say what one is about.
NO_CONTENT = """
a after again all also an and any are as at be because been before begins but by can comes does
each else even every first for from gets goes has have here how if in into is it its itself
later left like made makes many may more most must names no none nor not nothing of on once one
ones only or other others out over own part same say says see so some still such take taken
takes than that the their them then there these they this those to too two under until up when
where whether which while who with without
recipe small edit setting come test tests run runs file files value values
"""


def stem(word):
    """A word without its ending, so that "saves", "saved" and "saving" are one."""
    word = word.lower()
    for ending in ("ations", "ation", "ingly", "ing", "edly", "ied", "ies", "ed", "es", "s", "e"):
        if word.endswith(ending) and len(word) - len(ending) >= 3:
            word = word[: -len(ending)]
            break
    # "stopped" and "stop", "dropping" and "drop".
    if len(word) > 4 and word[-1] == word[-2]:
        word = word[:-1]
    return word.removesuffix("y").removesuffix("i")


def stems_of(text):
    """The words of a text that say what it is about."""
    text = re.sub(r"([a-z])([A-Z])", r"\1 \2", text)  # CommonMetricPrinter
    words = re.findall(r"[a-z]+|\d+", text.replace("_", " ").lower())
    return {stem(word) for word in words if word not in NO_CONTENT.split()}


def is_about(test, what):
    """Whether the name of a test speaks of what a row says: of two words at least."""
    found = stems_of(test)
    shared = found & stems_of(what)
    return len(shared) >= min(2, len(found))


# The tests.


def test_no_row_is_there_twice_and_none_is_missing():
    ids = [row[0] for row in ROWS]
    assert [each for each in ids if ids.count(each) > 1] == []
    expected = set()
    for family in listed("families"):
        letter, first, last = re.fullmatch(r"([A-Z])(\d+)-\1(\d+)", family).groups()
        expected |= {f"{letter}{number}" for number in range(int(first), int(last) + 1)}
    assert set(ids) & set(LEFT_OUT) == set()
    assert expected == {*ids, *LEFT_OUT}
    assert len(expected) == 276


def test_what_is_left_out_or_for_later_has_a_reason_and_the_rest_a_place_and_a_test():
    for identifier, reason in LEFT_OUT.items():
        assert len(reason.split()) >= 3, identifier
    for row in LATER:
        assert len(row[2].split()) > 5, row[0]
    for row in [*LATER, *WAITING]:
        assert row[3] == "-", row[0]
    for row in WAITING:
        assert recipes_of(row), row[0]
    for row in DONE:
        assert places_of(row) or recipes_of(row) or settings_of(row), row[0]
        assert proofs_of(row), row[0]


def test_a_recipe_is_there_or_still_to_come_and_the_page_knows_which():
    present = set(recipes.names())
    to_come = listed("recipes still to come")
    assert present & to_come == set(), "these are there: name their tests in their rows"
    wrong = []
    for row in ROWS:
        missing = set(recipes_of(row)) - present
        if missing - to_come or bool(missing) != (row in WAITING):
            wrong.append(f"{row[0]}: {', '.join(recipes_of(row))}")
    assert not wrong, "\n".join(wrong)


def test_the_places_of_all_rows_exist():
    missing = []
    for row in [*DONE, *WAITING]:
        for path, name in places_of(row):
            if text_of(path) is None or (name and name not in names_in(path)):
                missing.append(f"{row[0]}: {path}: {name}")
    assert not missing, "\n".join(missing)


def test_the_settings_of_all_rows_exist():
    missing = []
    for row in ROWS:
        known = set(settings_in(text_of("defaults.py")))
        for recipe in recipes_of(row):
            known |= settings_in(patch_of(recipe))
        unknown = set(settings_of(row)) - known
        missing += [f"{row[0]}: {name}" for name in sorted(unknown)]
    assert not missing, "\n".join(missing)


def test_the_tests_of_all_rows_exist_and_use_what_they_are_about():
    wrong = []
    for row in DONE:
        for where, test in proofs_of(row):
            if f"test_{test}" not in definitions(source_of_tests(where)):
                wrong.append(f"{row[0]}: there is no test_{test} in {where}")
            elif where.startswith("recipe "):
                if where.removeprefix("recipe ") not in recipes_of(row):
                    wrong.append(f"{row[0]}: {test} is of another recipe")
            elif places_of(row):
                used = used_by(where, test)
                if not any(touches(used, *place) for place in places_of(row)):
                    wrong.append(f"{row[0]}: {test} uses none of {row[2]}")
    assert not wrong, "\n".join(wrong)


def test_the_names_of_the_tests_say_what_their_row_says():
    wrong = []
    for row in DONE:
        for _, test in proofs_of(row):
            if not is_about(test, row[1]):
                wrong.append(f"{row[0]}: {row[1]!r} is not what test_{test} is about")
    assert not wrong, "\n".join(wrong)


def test_a_test_of_another_row_would_be_noticed():
    noticed = 0
    total = 0
    for distance in (1, 7, 50):
        for row, other in zip(DONE, DONE[distance:]):
            for proof in set(proofs_of(other)) - set(proofs_of(row)):
                total += 1
                noticed += not is_about(proof[1], row[1])
    assert noticed > 0.9 * total


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
    assert not [
        f.name
        for f in functions
        if re.search("registry|register_hook|before_step|after_step", f.name)
    ]
    loops = [node for node in ast.walk(do_train) if isinstance(node, ast.For)]
    trains = [loop for loop in loops if "range(start_iter, max_iter)" in ast.unparse(loop.iter)]
    (call,) = [loop.iter for loop in trains]
    assert ast.unparse(call.func) == "zip"
    # The range comes first: no batch too many is drawn.
    assert "range" in ast.unparse(call.args[0])
    assert "loader" in ast.unparse(call.args[1])
