"""docs/comparison.md: its figures of this project are those that its program prints."""

import importlib.util
import re
import sys

import pytest
import recipes

PAGE = (recipes.ROOT / "docs" / "comparison.md").read_text(encoding="utf-8")


@pytest.fixture
def printed(capsys, monkeypatch):
    """What docs/compare.py prints of the project, without a training."""
    path = recipes.ROOT / "docs" / "compare.py"
    spec = importlib.util.spec_from_file_location("compare", path)
    program = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(program)
    monkeypatch.setattr(sys, "path", [str(recipes.PROJECT), *sys.path])
    program.print_counts(program.PROJECT)
    program.print_settings()
    return capsys.readouterr().out


def numbers_of(label):
    """The numbers in the last column of the row that begins with a label."""
    (row,) = [line for line in PAGE.splitlines() if line.startswith(f"| {label}")]
    return [float(number) for number in re.findall(r"\d+\.?\d*", row.split("|")[-2])]


def test_the_figures_of_the_project_are_those_of_the_program(printed):
    found = [float(number) for number in re.findall(r"\d+\.?\d*", printed.replace("1,000", ""))]
    files, lines, loop, packed, comments, settings = found
    assert numbers_of("Python files")[0] == files
    assert numbers_of("Python files")[1] == pytest.approx(lines, rel=0.05)
    assert numbers_of("lines of the training loop") == [pytest.approx(loop, abs=2)]
    assert numbers_of("packed assignments") == [pytest.approx(packed, abs=0.5)]
    assert numbers_of("lines that are a comment") == [pytest.approx(comments, abs=1)]
    assert numbers_of("settings | 186") == [settings]


def test_the_page_counts_the_lines_of_plumbing():
    lines = 0
    for path in recipes.PROJECT.glob("plumbing/**/*.py"):
        lines += len(path.read_text(encoding="utf-8").splitlines())
    (thousands,) = re.findall(r"about (\d+),000 in `plumbing/`", PAGE)
    assert 1000 * float(thousands) == pytest.approx(lines, rel=0.1)
