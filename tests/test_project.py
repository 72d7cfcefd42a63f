"""What a generated project promises: its floors, its size, its own suite, and whole runs."""

import ast
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import files_under

RUNTIME = {"torch", "numpy", "tensorboard", "yacs"}
MAX_ITER = 30
ALWAYS = {"total_loss", "lr", "time", "data_time", "grad_norm"}


def sources(project):
    """Return {name: syntax tree} of every Python file of the project."""
    names = [name for name in files_under(project) if name.endswith(".py")]
    return {name: ast.parse((project / name).read_text(encoding="utf-8")) for name in names}


def module_name(name):
    """Return the dotted name under which a file is imported: plumbing/a.py is plumbing.a."""
    return name.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def imports(name, tree, known=()):
    """Return the dotted names a file imports anywhere; of ``known`` modules the exact ones."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            parts = name.split("/")[: -node.level] if node.level else []
            base = ".".join([*parts, *([node.module] if node.module else [])])
            inner = {f"{base}.{alias.name}" for alias in node.names}
            whole = {base} if base not in known or inner - set(known) else set()
            found |= whole | (inner & set(known))
    return found


@pytest.fixture(scope="module")
def trees(project):
    """The syntax trees of the session's project, which must have a train.py."""
    found = sources(project)
    assert "train.py" in found
    return found


def test_nothing_is_imported_beyond_the_named_libraries(trees):
    own = {module_name(name).split(".")[0] for name in trees} | {"conftest"}
    own |= {Path(name).stem for name in trees if name.startswith("tests/")}
    for name, tree in trees.items():
        allowed = RUNTIME | own | ({"pytest"} if name.startswith("tests/") else set())
        roots = {imported.split(".")[0] for imported in imports(name, tree)}
        assert roots - set(sys.stdlib_module_names) <= allowed, name


def test_every_file_imports_only_from_the_floors_below(trees):
    known = {module_name(name) for name in trees}
    roots = {module.split(".")[0] for module in known}
    for name, tree in trees.items():
        own = {i for i in imports(name, tree, known) if i.split(".")[0] in roots}
        if "/" not in name and name not in ("train.py", "plot_schedule.py"):
            assert {i.split(".")[0] for i in own} <= {"plumbing"}, name
        elif name == "plumbing/comm.py":
            assert own == set(), name
        elif name.startswith("plumbing/"):
            package = ".".join(name.split("/")[:2]) if name.count("/") > 1 else None
            inside = {i for i in own if package and f"{i}.".startswith(f"{package}.")}
            assert own - inside <= {"plumbing.comm"}, name


def function(tree, name):
    """Return the definition of one function of a module."""
    (found,) = [n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name == name]
    return found


def length(node):
    """Return how many lines a piece of source takes."""
    return node.end_lineno - node.lineno + 1


def test_the_files_stay_within_their_line_budgets(project):
    lines = {n: len((project / n).read_text().splitlines()) for n in files_under(project)
             if n.endswith(".py")}  # fmt: skip
    plumbing = {name: count for name, count in lines.items() if name.startswith("plumbing/")}
    assert lines["train.py"] <= 220
    assert sum(plumbing.values()) <= 1500
    assert {name: count for name, count in plumbing.items() if count > 260} == {}


def test_do_train_stays_short_and_asks_little(trees):
    do_train = function(trees["train.py"], "do_train")
    loop = next(node for node in ast.walk(do_train) if isinstance(node, ast.For))
    assert length(do_train) <= 70
    assert length(loop) <= 45
    assert sum(isinstance(node, ast.If) for node in ast.walk(do_train)) <= 3


def run(command, cwd, timeout=900):
    """Run a command in a project and return what it printed; a failure shows all of it."""
    env = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    try:
        done = subprocess.run(
            command, cwd=cwd, env=env, timeout=timeout, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
    except subprocess.TimeoutExpired as error:
        pytest.fail(f"{' '.join(command)}: not done in {timeout} s\n{error.stdout.decode()}")
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}"
    return done.stdout


@pytest.fixture
def copy(project, tmp_path):
    """A copy of the session's project that a test may run and litter."""
    return Path(shutil.copytree(project, tmp_path / "project"))


def test_make_test_lints_and_passes_in_the_environment_it_is_given(copy):
    printed = run(["make", "test", f"VENV={sys.prefix}"], copy)
    assert "All checks passed!" in printed
    assert " passed" in printed
    assert "pip install" not in printed


def test_make_train_starts_the_documented_command(copy):
    printed = run(["make", "-n", "train", "VENV=/venv", "NPROC=3", "ARGS=SEED 1"], copy)
    flat = " ".join(printed.replace("\\\n", " ").split())
    assert "-m venv /venv" in flat
    assert "--standalone --nproc_per_node 3 train.py --config cfg.yaml SEED 1" in flat


LAUNCHERS = {
    "1 process": [sys.executable],
    "2 ranks": [sys.executable, "-m", "torch.distributed.run", "--standalone",
                "--nproc_per_node", "2"],
}  # fmt: skip


def strict_json(line):
    """Parse one line; NaN and Infinity, which are not JSON, raise."""
    return json.loads(line, parse_constant=lambda constant: pytest.fail(f"{constant} in {line}"))


@pytest.fixture(params=LAUNCHERS, scope="module")
def output(request, project, tmp_path_factory):
    """The output directory of one short run from the command line."""
    home = tmp_path_factory.mktemp("run")
    copy = shutil.copytree(project, home / "project")
    arguments = ["train.py", "--config", "cfg.yaml", "SOLVER.MAX_ITER", str(MAX_ITER)]
    run([*LAUNCHERS[request.param], *arguments, "OUTPUT_DIR", str(home / "output")], copy)
    return home / "output"


def test_a_run_writes_strict_json_with_each_iteration_once(output):
    rows = [strict_json(line) for line in (output / "metrics.json").read_text().splitlines()]
    iterations = [row["iteration"] for row in rows]
    assert iterations == sorted(set(iterations))
    assert iterations[-1] == MAX_ITER - 1
    assert ALWAYS | {"digits_test/accuracy"} <= set(rows[-1])


def test_a_run_logs_when_it_will_end(output):
    assert "eta:" in (output / "log.txt").read_text()


def test_tensorboard_shows_what_the_json_file_holds(output):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    lines = (output / "metrics.json").read_text().splitlines()
    tags = set().union(*map(strict_json, lines)) - {"iteration"}
    events = EventAccumulator(str(output)).Reload()
    assert set(events.Tags()["scalars"]) == tags
    row = strict_json(lines[-1])
    last = {tag: events.Scalars(tag)[-1] for tag in ("total_loss", "digits_test/accuracy")}
    for tag, event in last.items():
        assert event.step == MAX_ITER - 1, tag
        assert event.value == pytest.approx(row[tag], rel=1e-5), tag


def test_a_run_leaves_a_final_model_and_its_settings(output):
    assert (output / "model_final.pth").is_file()
    assert f"MAX_ITER: {MAX_ITER}" in (output / "config.yaml").read_text()
