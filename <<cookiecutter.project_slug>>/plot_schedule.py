"""Show the learning rate of a whole run, and the momentum where it moves, before it is trained.

    python plot_schedule.py --config cfg.yaml                       a chart in the terminal
    python plot_schedule.py --config cfg.yaml --svg schedule.svg    a picture as well

--log makes the axis of the rates logarithmic, KEY VALUE changes a setting.  The rate is that of
parameters whose rate is BASE_LR; it comes from build_lr_scheduler, as in the training.
"""

import argparse
import contextlib
import inspect
import math
import os
import sys
from xml.sax.saxutils import escape

import torch

from data import dataset_size
from defaults import check_cfg, get_cfg
from optimizer import setup_optimizer
from plumbing.comm import SettingsError
from plumbing.settings import merge_settings
from plumbing.setup import launch
from scaling import maybe_scale_to_ranks, setup_length
from schedule import LRMultiplier, build_lr_scheduler, momentum_of

COLUMNS, ROWS = 72, 16  # of a chart in the terminal, in characters
WIDTH, HEIGHT, MARGIN = 720, 240, 60  # of a chart in a picture, in pixels
SAMPLES = 20  # for each column at most


def setup_schedule(args):
    """The settings as a training on ``args.ranks`` ranks has them."""
    cfg = get_cfg()
    merge_settings(cfg, args.config, args.opts)
    changes = maybe_scale_to_ranks(cfg, args.ranks)
    check_cfg(cfg, args.ranks)
    setup_length(cfg, dataset_size, changes, is_training=False)
    cfg.freeze()
    return cfg


def build_dummy_optimizer(cfg):
    """The optimizer of the training, with one parameter."""
    kind, arguments = setup_optimizer(cfg)
    return kind([torch.nn.Parameter(torch.zeros(1, 1))], **arguments)


def refuse_what_needs_results(scheduler):
    """Raises a SettingsError for a scheduler whose ``step`` takes more than the iteration."""
    try:
        inspect.signature(scheduler.step).bind()
    except TypeError:
        rate = f"{type(scheduler).__name__}: its rate depends on results, and cannot be plotted"
        raise SettingsError(f"schedule.py: {rate}: see lr in metrics.json of a run") from None


def sample(scheduler, optimizer, iterations):
    """Rate and momentum in each of the rising ``iterations``: two lists."""
    rates, momenta = [], []
    optimizer.step()  # without gradients it does nothing, but torch's schedulers insist on it
    current = 0
    for iteration in iterations:
        if isinstance(scheduler, LRMultiplier):
            scheduler.load_state_dict({"iteration": iteration})
        else:  # one of torch's may depend on all the steps before
            for _ in range(iteration - current):
                scheduler.step()
        current = iteration
        rates.append(scheduler.get_last_lr()[0])
        momenta.append(momentum_of(optimizer.param_groups[0]))
    return rates, momenta


def spread(max_iter):
    """Iterations from the first to the last: all of a short run, evenly spread ones of a long."""
    number = min(max_iter, COLUMNS * SAMPLES)
    return [i * (max_iter - 1) // max(number - 1, 1) for i in range(number)]


def scale_of(values, log):
    """The function that puts values onto 0 to 1, and (position, value) of the marks of the axis."""
    top, bottom = max(values), min(min(values), 0.0)
    if log:
        positive = [value for value in values if value > 0] or [1.0]
        bottom = max(min(positive), max(positive) * 1e-8)
    elif min(values) > 0.5 * max(values):
        bottom = min(values)  # such as a momentum
    if not top > bottom:
        top, bottom = (top * 2 or 1.0), bottom / 2
    if not log:
        marks = [(i / 4, bottom + (top - bottom) * i / 4) for i in range(5)]
        return lambda value: (value - bottom) / (top - bottom), marks
    span = math.log(top / bottom)
    marks = [(i / 4, bottom * math.exp(span * i / 4)) for i in range(5)]
    return lambda value: math.log(max(value, bottom) / bottom) / span, marks


def draw_text(title, iterations, values, log):
    """A chart of characters: iterations to the right, values upwards."""
    scale, marks = scale_of(values, log)
    grid = [[" "] * COLUMNS for _ in range(ROWS)]
    columns, last_column, last_row = [[] for _ in range(COLUMNS)], iterations[-1] + 1, None
    for iteration, value in zip(iterations, values):
        columns[iteration * COLUMNS // last_column].append(round(scale(value) * (ROWS - 1)))
    for x, rows in enumerate(columns):
        rows = rows or [last_row]  # a run shorter than the chart is wide
        low, high = min(rows), max(rows)
        if last_row is not None:  # no gap to the column before
            low, high = min(low, last_row + 1), max(high, last_row - 1)
        for row in range(low, high + 1):
            grid[row][x] = "*"
        last_row = rows[-1]
    labels = {round(position * (ROWS - 1)): f"{value:.3g}" for position, value in marks}
    lines = [title]
    for row in reversed(range(ROWS)):
        lines.append(f"{labels.get(row, ''):>10} |{''.join(grid[row]).rstrip()}")
    lines.append(f"{'':>10} +{'-' * COLUMNS}")
    middle, last = str(iterations[-1] // 2), str(iterations[-1])
    axis = f"0{middle:^{COLUMNS - 1 - len(last)}}{last}"
    return "\n".join([*lines, f"{'':>12}{axis}", f"{'iteration':>{12 + COLUMNS}}", ""])


def draw_svg(title, iterations, values, log, top):
    """The same as parts of an SVG picture, ``top`` pixels from its upper edge."""
    scale, marks = scale_of(values, log)
    last = max(iterations[-1], 1)

    def text(x, y, content, anchor):
        return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(content)}</text>'

    parts = [text(MARGIN, top - 12, title, "start")]
    for position, value in marks:
        y = top + HEIGHT * (1 - position)
        parts.append(f'<path d="M{MARGIN} {y:.1f}h{WIDTH}" stroke="#ddd"/>')
        parts.append(text(MARGIN - 6, y + 4, f"{value:.3g}", "end"))
    for i in range(5):
        iteration = last * i // 4
        x = MARGIN + WIDTH * iteration / last
        parts.append(f'<path d="M{x:.1f} {top + HEIGHT}v5" stroke="#333"/>')
        parts.append(text(x, top + HEIGHT + 18, str(iteration), "middle"))
    parts.append(text(MARGIN + WIDTH, top + HEIGHT + 34, "iteration", "end"))
    parts.append(f'<path d="M{MARGIN} {top}v{HEIGHT}h{WIDTH}" fill="none" stroke="#333"/>')
    points = " ".join(
        f"{MARGIN + WIDTH * iteration / last:.2f},{top + HEIGHT * (1 - scale(value)):.2f}"
        for iteration, value in zip(iterations, values)
    )
    parts.append(f'<polyline points="{points}" fill="none" stroke="#06c" stroke-width="1.5"/>')
    return parts


def main(args):
    cfg = setup_schedule(args)
    optimizer = build_dummy_optimizer(cfg)
    scheduler = build_lr_scheduler(cfg, optimizer)
    refuse_what_needs_results(getattr(scheduler, "scheduler", scheduler))
    iterations = spread(cfg.SOLVER.MAX_ITER)
    rates, momenta = sample(scheduler, optimizer, iterations)
    name = cfg.SOLVER.LR_SCHEDULER_NAME
    charts = [(f"learning rate, {name}, {cfg.SOLVER.MAX_ITER} iterations", rates, args.log)]
    if min(momenta) < max(momenta):
        charts.append(("momentum", momenta, False))
    for title, values, log in charts:
        sys.stdout.write(draw_text(title, iterations, values, log) + "\n")
    if args.svg:
        step = HEIGHT + 90
        size = f'width="{WIDTH + 2 * MARGIN}" height="{step * len(charts)}"'
        parts = [f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif"']
        parts[0] += ' font-size="12">\n<rect width="100%" height="100%" fill="white"/>'
        for number, (title, values, log) in enumerate(charts):
            parts += draw_svg(title, iterations, values, log, step * number + 40)
        write_picture(args.svg, "\n".join([*parts, "</svg>", ""]))


def write_picture(path, text):
    try:
        with open(path, "w", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise SettingsError(f"--svg: cannot write to {path}: {error.strerror}") from None


def parse_args(words=None):
    parser = argparse.ArgumentParser(
        usage="%(prog)s --config FILE [--svg FILE] [--log] [--ranks N] [KEY VALUE ...]",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--config", required=True, metavar="FILE", help="settings, YAML")
    parser.add_argument("--svg", metavar="FILE", help="draw a picture into this file, too")
    parser.add_argument("--log", action="store_true", help="a logarithmic axis of the rates")
    ranks = int(os.environ.get("WORLD_SIZE", 1))
    text = "processes that will train; it matters for REFERENCE_WORLD_SIZE"
    parser.add_argument("--ranks", type=int, default=ranks, metavar="N", help=text)
    args, args.opts = parser.parse_known_args(words)
    if unknown := [word for word in args.opts[::2] if word.startswith("-")]:
        parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    if args.ranks < 1:
        parser.error("--ranks: must be at least 1")
    return args


if __name__ == "__main__":
    with contextlib.suppress(BrokenPipeError):  # such as "| head"
        launch(main, parse_args())
