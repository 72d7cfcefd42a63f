"""The chart of a schedule shows what is trained."""

import re
from xml.etree import ElementTree

import plot_schedule
import pytest
import schedule
from conftest import ROOT
from plot_schedule import COLUMNS, ROWS, SAMPLES
from plumbing.comm import SettingsError
from torch.optim import lr_scheduler


@pytest.fixture
def chart(capsys, tmp_path):
    """chart(*words): the lines that are written for the example and these words."""

    def written(*words):
        path = tmp_path / "schedule.svg"
        args = ["--config", str(ROOT / "cfg.yaml"), "--svg", str(path), *words]
        plot_schedule.main(plot_schedule.parse_args(args))
        return capsys.readouterr().out.splitlines(), ElementTree.parse(path).getroot()

    return written


def stars(lines):
    """Of each row of a chart, from the top: its label and the columns that are marked."""
    rows = [line for line in lines if re.match(r"^ *[0-9.e+-]* \|", line)]
    parts = [line.split("|") for line in rows]
    return [(label.strip(), [x for x, c in enumerate(text) if c == "*"]) for label, text in parts]


STEPS = ("SOLVER.WARMUP_ITERS", "0", "SOLVER.LR_SCHEDULER_NAME", "multistep", "SOLVER.GAMMA", "0.5")


def test_a_step_is_drawn_at_its_iteration_and_height(chart):
    lines, picture = chart(*STEPS, "SOLVER.MAX_ITER", "720", "SOLVER.STEPS", "(360,)")
    rows = stars(lines)
    assert lines[0] == "learning rate, multistep, 720 iterations"
    assert len(rows) == ROWS
    assert (rows[0], rows[-1]) == (("0.1", list(range(36))), ("0", []))
    (low,) = [columns for _, columns in rows if columns == list(range(36, COLUMNS))]
    assert low
    assert re.fullmatch(r" +0 +359 +719", lines[ROWS + 2])
    (line,) = picture.iter("{http://www.w3.org/2000/svg}polyline")
    points = [tuple(map(float, point.split(","))) for point in line.get("points").split()]
    assert len(points) == 720
    top, half = points[0][1], points[-1][1]
    assert [y for _, y in points] == [top] * 360 + [half] * 360
    assert half - top == pytest.approx(plot_schedule.HEIGHT / 2)


def test_the_momentum_is_drawn_where_it_moves(chart):
    lines, picture = chart("SOLVER.LR_SCHEDULER_NAME", "one_cycle")
    assert [line for line in lines if line and line[0].isalpha()] == [
        "learning rate, one_cycle, 800 iterations",
        "momentum",
    ]
    assert len(list(picture.iter("{http://www.w3.org/2000/svg}polyline"))) == 2
    rates, momenta = stars(lines)[:ROWS], stars(lines)[ROWS:]
    assert [label for label, _ in momenta if label][:: len(momenta)] == ["0.9"]
    assert rates[0][1] == momenta[-1][1]  # the highest rate has the lowest momentum


def test_a_long_run_is_sampled_and_a_short_one_drawn_without_gaps(chart):
    iterations = plot_schedule.spread(10**7)
    assert (iterations[0], iterations[-1]) == (0, 10**7 - 1)
    assert len(iterations) == COLUMNS * SAMPLES
    assert plot_schedule.spread(3) == [0, 1, 2]
    for max_iter in ("1", "2", "7", "10000000"):
        lines, _ = chart("SOLVER.MAX_ITER", max_iter)
        marked = {column for _, columns in stars(lines) for column in columns}
        assert marked == set(range(COLUMNS))


def test_rates_are_those_of_the_training_in_epochs_on_the_given_ranks(chart):
    words = ["SOLVER.REFERENCE_WORLD_SIZE", "1", "SOLVER.MAX_EPOCH", "4", *STEPS]
    lines, _ = chart(*words, "--ranks", "2", "SOLVER.STEPS", "(2,)")
    assert lines[0] == "learning rate, multistep, 48 iterations"  # 1437 / 128: 12 an epoch
    assert stars(lines)[0] == ("0.2", list(range(36)))


def test_a_logarithmic_axis_makes_a_line_of_a_decay(chart):
    words = ["SOLVER.WARMUP_ITERS", "0", "SOLVER.LR_SCHEDULER_NAME", "exponential"]
    lines, _ = chart("--log", *words)
    sizes = [len(columns) for _, columns in stars(lines)]
    assert max(sizes) - min(sizes[1:-1]) <= 2


def test_a_scheduler_of_torch_is_stepped_through(chart, monkeypatch):
    def build(cfg, optimizer):
        return lr_scheduler.StepLR(optimizer, 400, 0.5)

    expected, _ = chart(*STEPS, "SOLVER.STEPS", "(400,)")
    monkeypatch.setattr(schedule, "build_schedule", build)
    assert chart(*STEPS, "SOLVER.STEPS", "()")[0] == expected


def test_a_scheduler_that_depends_on_results_is_refused_in_one_line(chart, monkeypatch):
    monkeypatch.setattr(
        schedule, "build_schedule", lambda _, optimizer: lr_scheduler.ReduceLROnPlateau(optimizer)
    )
    with pytest.raises(SettingsError, match=r"^schedule.py: ReduceLROnPlateau: .*lr in metrics"):
        chart()


def test_mistakes_end_in_one_line(chart, tmp_path, capsys):
    with pytest.raises(SettingsError, match="^SOLVER.GAMMA"):
        chart("SOLVER.GAMMA", "0")
    with pytest.raises(SettingsError, match="^--svg: cannot write to .*none"):
        chart("--svg", str(tmp_path / "none" / "a.svg"))
    for words in (["--ranks", "0"], ["--sgv", "a.svg"]):
        with pytest.raises(SystemExit):
            plot_schedule.parse_args(["--config", "cfg.yaml", *words])
        assert words[0] in capsys.readouterr().err
