"""The measuring programs run, and print their figures in the form that becomes one table."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

BENCH = Path(__file__).parent / "bench"
TEMPLATE = BENCH.parents[1]
PROJECT = TEMPLATE / "<<cookiecutter.project_slug>>"
SCALE = TEMPLATE / "docs" / "scale.md"
SMALL = {
    # First, before others have left free memory in the process, which would hide what this needs.
    "big_model.py": "--megabytes 50",
    "scale.py": "--rounds 1",
    "checkpoint.py": "--megabytes 1 --rounds 1",
    "evaluation.py": "",
    "gpu.py": "",
    "loading.py": "--batches 2 --rounds 1",
    "loop.py": "--iters 21 --rounds 1",
    "memory.py": "--iters 1100 --blocks 2",
    "messages.py": "",
    "resume.py": "--iters 2000 --rounds 1",
    "sampler.py": "--batches 200",
    "startup.py": "--rounds 1 --no-warm-up",
}
NUM_ROWS = {  # that have a floor
    "big_model.py": 6,
    "checkpoint.py": 2,
    "evaluation.py": 2,
    "loading.py": 3,
    "loop.py": 1,
    "memory.py": 2,
    "resume.py": 1,
    "sampler.py": 4,
    "scale.py": 4,
    "startup.py": 2,
}
IN_ONE_PROCESS = """
import json, os, runpy, sys

os.fsync = lambda descriptor: None  # a disk may take long, and no time is looked at
_, folder, project, programs = sys.argv
sys.path.insert(0, folder)
for program, words in json.loads(programs).items():
    print("==", program, flush=True)
    sys.argv = [program, "--project", project, *words.split()]
    runpy.run_path(f"{folder}/{program}", run_name="__main__")
"""


@pytest.fixture
def bench(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCH))


def run(*words, **env):
    command, env = [sys.executable, *map(str, words)], {**os.environ, **env}
    return subprocess.run(
        command, cwd=TEMPLATE, env=env, capture_output=True, text=True, timeout=600
    )


@pytest.fixture(scope="module")
def printed():
    """{program: what it prints}; they share a process, for each import of torch takes a second."""
    done = run("-c", IN_ONE_PROCESS, BENCH, PROJECT, json.dumps(SMALL), CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 0, done.stderr
    parts = [part.partition("\n") for part in done.stdout.split("== ")[1:]]
    return {name: text for name, _, text in parts}


@pytest.mark.parametrize("program", NUM_ROWS)
def test_a_program_prints_its_rows_with_a_figure_for_the_floor(bench, printed, program):
    from table import rows_in, verdict

    rows = [row for row in rows_in(printed[program]) if row[-1]]
    assert len(rows) == NUM_ROWS[program]
    for row in rows:
        assert all(row)
        assert verdict(row[-2], row[-1]) in ("held", "MISSED")


@pytest.mark.parametrize("program", ["big_model.py", "evaluation.py", "sampler.py", "scale.py"])
def test_figures_that_no_other_program_disturbs_are_held(bench, printed, program):
    from table import rows_in, verdict

    for row in rows_in(printed[program]):
        if row[-1]:
            assert verdict(row[-2], row[-1]) == "held", row


def test_the_page_on_scale_has_every_row_that_is_measured_for_it(bench, printed):
    from table import rows_in

    page = SCALE.read_text(encoding="utf-8")
    for program in ("messages.py", "scale.py"):
        rows = rows_in(printed[program])
        assert rows
        for name, *_ in rows:
            assert f"\n| {name} | " in page, name


def test_the_commands_of_the_page_on_scale_run(printed):
    page = SCALE.read_text(encoding="utf-8")
    (block,) = re.findall(r"^```sh\n(.*?)^```", page, re.M | re.S)
    for command in block.splitlines():
        _, *words = shlex.split(command)
        if words[0] == "-m":
            done = run(*words, "--collect-only", "-q")
            assert done.returncode == 0, done.stdout
        else:
            path = Path(words[0])
            assert path.parent == Path("tests/bench")
            assert path.name in printed
            done = run(TEMPLATE / path, "--help")
            for word in words[1:]:
                assert not word.startswith("--") or word in done.stdout


def test_the_numbers_of_collectives_are_those_of_the_page_on_scale(bench, printed):
    from table import rows_in

    counts = {
        row[0].removeprefix("collectives of "): row[3] for row in rows_in(printed["messages.py"])
    }
    assert counts == {
        "the start and the end": "14",
        "a log, its values": "1",
        "a log, its times": "1",
        "a save": "2",
        "an evaluation": "2",
    }


def test_every_program_is_tried(printed):
    programs = {path.name for path in BENCH.glob("*.py")} - {"__main__.py", "table.py"}
    # test_digits.py runs that one: it has no shorter form.
    assert printed.keys() == programs - {"digits.py"}


@pytest.mark.parametrize(
    ("figure", "floor", "expected"),
    [
        ("1.15", "<= 1.15", "held"),
        ("1.16", "<= 1.15", "MISSED"),
        ("+0.8 MiB", "<= 1 MiB", "held"),
        ("-3.0 MiB", "<= 1 MiB", "held"),
        ("1,024 s", "<= 1 s", "MISSED"),
        ("2e-3 s", "<= 0.1 s", "held"),
        ("4.9", ">= 5", "MISSED"),
        ("nan", "<= 1", "MISSED"),
        ("1.2", "", ""),
    ],
)
def test_a_figure_is_held_against_its_floor(bench, figure, floor, expected):
    from table import verdict

    assert verdict(figure, floor) == expected


def test_all_figures_are_in_one_table_at_the_end_and_a_failure_is_shown(tmp_path):
    programs = {
        "good.py": "print('| speed | 2 us | 1 us | 2.00 | <= 1.5 |')",
        "silent.py": "print('nothing to measure here')",
        "broken.py": "print('| size | 1 | 1 | 1.00 | <= 2 |', flush=True); raise SystemExit(3)",
    }
    for name, code in programs.items():
        (tmp_path / name).write_text(code)
    paths = [tmp_path / name for name in programs]
    done = run(BENCH, *paths[:2])
    assert done.returncode == 0
    done = run(BENCH, *paths)
    assert done.returncode == 1
    lines = [line.split() for line in done.stdout.splitlines()[-4:]]
    assert [line[0] for line in lines] == ["speed", "silent.py", "size", "broken.py"]
    assert [line[-1] for line in lines] == ["MISSED", "here", "held", "3"]


def test_the_gpu_program_says_when_there_is_no_gpu(printed):
    assert printed["gpu.py"] == "no GPU here: nothing was measured\n"


def test_waiting_for_a_gpu_is_forbidden_in_all_iterations_in_which_nothing_is_due(bench):
    import gpu

    forbidden = []
    cfg = SimpleNamespace(
        LOG_PERIOD=4,
        SOLVER=SimpleNamespace(MAX_ITER=10, CHECKPOINT_PERIOD=-1),
        TEST=SimpleNamespace(EVAL_PERIOD=-1),
    )
    train = SimpleNamespace(
        __file__=__file__,
        build_train_loader=lambda cfg, start_iter: iter(range(start_iter, 10)),
        build_optimizer=lambda cfg: "optimizer",
        is_due=lambda i, max_iter, *periods: (i + 1) % periods[0] == 0 or i == max_iter - 1,
        parse_args=lambda description, words: words,
    )
    watch = gpu.Watch(train, "cpu")

    def main(words):
        train.build_optimizer(cfg)
        for iteration in train.build_train_loader(cfg, 0):
            forbidden.append(watch._is_on)
            if iteration == int(words[0]):
                raise RuntimeError("called a synchronizing CUDA operation")

    train.main = main
    watch.run(["99"])
    assert forbidden == [False] * 4 + [True] * 3 + [False, True, False]
    assert (watch.place, watch.num_watched, watch._is_on) == (None, 4, False)
    watch.run(["5"])
    assert "raise RuntimeError" in watch.place
    assert watch.optimizer == "optimizer"
