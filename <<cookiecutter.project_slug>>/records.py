"""What a run leaves behind: its metrics while it goes on, its results at the end."""

import contextlib
import csv
import datetime
import io
import json
import logging
import math
import os
import time

from plumbing import comm
from plumbing.checkpoint.files import write_atomically
from plumbing.comm import SettingsError
from plumbing.events import (
    EventWriter,
    JSONWriter,
    TensorboardXWriter,
    get_event_storage,
)
from plumbing.settings import leaves

logger = logging.getLogger(__name__)

_COMPARED = "SEED", "MODEL", "DATASETS", "DATALOADER", "SOLVER"  # for the tab HPARAMS
_LINES = 20  # in the log, over whose times it shows the median
_TABLE_COLUMNS = 3  # metrics side by side


@contextlib.contextmanager
def open_writers(cfg, start_iter):
    """Writers to the log, metrics.json, TensorBoard and results.csv; [] but on the main rank.

    A resume replaces what was written from ``start_iter - 1`` on.  What is left at the end is
    written, also after an exception.

    Raises:
        SettingsError: more than MAX_ITER iterations have been trained; nothing was written.
    """
    first, max_iter = max(start_iter - 1, 0), cfg.SOLVER.MAX_ITER
    if start_iter > max_iter:
        raise SettingsError(f"SOLVER.MAX_ITER: {max_iter}, but {start_iter} have been trained")
    if comm.is_main_process():
        with contextlib.suppress(FileNotFoundError):  # of a shorter run, which now goes on
            os.remove(os.path.join(cfg.OUTPUT_DIR, "results.json"))
    compared = {k: value for k, value in leaves(cfg) if k.partition(".")[0] in _COMPARED}
    writers = [
        CommonMetricPrinter(max_iter, cfg.LOG_WINDOW),
        JSONWriter(os.path.join(cfg.OUTPUT_DIR, "metrics.json"), cfg.LOG_WINDOW, first),
        RunWriter(
            cfg.OUTPUT_DIR, cfg.LOG_WINDOW, first, cfg.dump(), compared, cfg.DATASETS.TEST, max_iter
        ),
        CSVWriter(os.path.join(cfg.OUTPUT_DIR, "results.csv"), cfg.DATASETS.TEST, first),
    ] * comm.is_main_process()
    with contextlib.ExitStack() as stack:
        for writer in reversed(writers):
            stack.callback(writer.close)
            stack.callback(writer.write)
        yield writers


class CommonMetricPrinter(EventWriter):
    """Logs a line: ETA, iteration, losses, grad_norm, seconds, learning rate, GPU memory.

    The losses are medians over ``window_size`` iterations.
    """

    def __init__(self, max_iter=None, window_size=20):
        self.logger = logging.getLogger(__name__)
        self._max_iter, self._window_size = max_iter, window_size
        self._first_write, self._last_write = None, None  # iteration and moment, iteration

    def write(self):
        storage = get_event_storage()
        histories, iteration = storage.histories(), storage.iter
        ended = self._max_iter is not None and iteration >= self._max_iter
        if ended or not histories or iteration == self._last_write:
            return
        fields = [*self._eta(storage), f"iter: {iteration}"]
        for name, (value, _) in storage.latest_with_smoothing_hint(self._window_size).items():
            if "loss" in name or "[metric]" in name or name == "grad_norm":
                fields.append(f"{name}: {value:.4g}")
        for name in ("time", "data_time"):  # each value is a mean since the line before
            if history := histories.get(name):
                fields.append(f"{name}: {history.median(_LINES):.4f}")
                fields.append(f"last_{name}: {history.latest():.4f}")
        if history := histories.get("samples_per_second"):
            fields.append(f"sample/s: {history.latest():.0f}")
        fields.append(f"lr: {histories['lr'].latest():.5g}" if "lr" in histories else "lr: N/A")
        if history := histories.get("max_mem"):
            fields.append(f"max_mem: {history.latest():.0f}M")
        self.logger.info(" %s", "  ".join(fields))
        self._last_write = iteration

    def _eta(self, storage):
        """[] while it is not known; what evaluations and saves took counts as well."""
        self._first_write = self._first_write or (storage.iter, time.perf_counter())
        iteration, moment = self._first_write
        seconds = None
        if storage.iter > iteration:
            seconds = (time.perf_counter() - moment) / (storage.iter - iteration)
        elif "time" in storage.histories():
            seconds = storage.history("time").latest()
        if seconds is None or self._max_iter is None:
            return []
        seconds *= self._max_iter - storage.iter - 1
        storage.put_scalar("eta_seconds", seconds, smoothing_hint=False)
        return [f"eta: {datetime.timedelta(seconds=int(seconds))}"]


class RunWriter(TensorboardXWriter):
    """Writes for TensorBoard, and tells there what run this is.

    The tab TEXT shows the settings, as of each start.  HPARAMS compares runs by settings and
    results, from the first evaluation on; a run whose last one is in is a success there.  Of a run
    that was resumed with other settings HPARAMS shows the first ones: TensorBoard keeps those.

    Args:
        start_iter: hides what an earlier run wrote from there on.
        text: the settings.
        compared: {name: setting} for HPARAMS.
        datasets: names of the test sets, with which the names of results begin.
    """

    def __init__(self, log_dir, window_size, start_iter, text, compared, datasets, max_iter):
        super().__init__(log_dir, window_size, purge_step=start_iter)
        self._text, self._compared = text, compared
        self._datasets, self._max_iter = datasets, max_iter
        self._start_iter, self._told = start_iter, set()

    def write(self):
        super().write()
        if self._records is None or "end" in self._told:
            return
        from torch.utils.tensorboard import summary  # slow: only when used

        results = _latest_results(self._datasets)
        newest = max((iteration for _, iteration in results.values()), default=-1)
        if "text" not in self._told:
            lines = "".join(f"    {line}\n" for line in self._text.splitlines())
            self._tell("text", self._start_iter, summary.text("settings", lines))
        ended = newest >= self._max_iter - 1
        if results and ("session" not in self._told or ended and "end" not in self._told):
            # SummaryWriter.add_hparams would put these into a folder, and so a run, of their own.
            compared = {name: _plain(value) for name, value in self._compared.items()}
            metrics = {name: 0.0 for name in results if not _is_detail(name)}
            experiment, start, end = summary.hparams(compared, metrics)
            self._tell("session", self._start_iter, experiment, start)
            if ended:
                self._tell("end", newest, end)
        self._records.flush()

    def _tell(self, what, step, *summaries):
        """Write them, once."""
        if what not in self._told:
            self._told.add(what)
            for each in summaries:
                self._add(step=step, summary=each)


class CSVWriter(EventWriter):
    """Keeps a file of results: iteration and metrics in columns, a line for each evaluation.

    The metrics are sorted; an empty cell is one that an evaluation did not give.  When one comes
    for the first time the file is written anew.

    Args:
        datasets: names of the test sets, with which the names of results begin.
        start_iter: drops what an earlier run wrote from there on, and a torn last line.
    """

    def __init__(self, csv_file, datasets, start_iter=0):
        self._path, self._datasets = csv_file, datasets
        self._start_iter, self._newest = start_iter, start_iter - 1
        self._names = None  # of the columns after the first

    def write(self):
        if self._names is None:
            self._names, old = [], self._read(self._start_iter)
            if old is not None:
                self._write_anew(old)
        new = {}
        for name, (value, iteration) in _latest_results(self._datasets).items():
            if iteration > self._newest:
                new.setdefault(iteration, {"iteration": iteration})[name] = value
        if not new:
            return
        rows, self._newest = [row for _, row in sorted(new.items())], max(new)
        if any(row.keys() - {"iteration", *self._names} for row in rows):
            self._write_anew([*(self._read(math.inf) or []), *rows])
        else:
            with open(self._path, "a", newline="", encoding="utf-8") as file:
                self._writer(file).writerows(rows)

    def _read(self, limit):
        """The rows in the file of iterations before ``limit``; None without a file."""
        if not os.path.isfile(self._path):
            return None
        with open(self._path, newline="", encoding="utf-8", errors="replace") as file:
            lines = [line for line in file if line.endswith("\n")]
        header, *lines = [_cells(line) for line in lines] or [[]]
        rows, num_lost = [], 0
        for cells in lines:
            row = dict(zip(header, cells))
            if len(cells) == len(header) and row.get("iteration", "").isdigit():
                if int(row["iteration"]) < limit:
                    rows.append({name: cell for name, cell in row.items() if cell})
            else:
                num_lost += 1
        if num_lost:
            logger.warning("%s: %d lines are no results, and are dropped", self._path, num_lost)
        return rows

    def _write_anew(self, rows):
        self._names = sorted({name for row in rows for name in row} - {"iteration"})
        text = io.StringIO()
        self._writer(text).writeheader()
        self._writer(text).writerows(rows)
        write_atomically(self._path, lambda file: file.write(text.getvalue().encode()))

    def _writer(self, file):
        return csv.DictWriter(file, ["iteration", *self._names], lineterminator="\n")


def _cells(line):
    """Those of one line; a stray quote reaches no further."""
    try:
        return next(csv.reader([line], strict=True), [])
    except csv.Error:
        return []


def _latest_results(datasets):
    """{"digits_test/accuracy": (newest value, its iteration)}, from the current storage."""
    histories = get_event_storage().histories()
    names = [name for name in histories if name.partition("/")[0] in datasets]
    return {name: (histories[name].latest(), histories[name].latest_iteration()) for name in names}


def _is_detail(name):
    """Whether it is a metric of a single class, such as accuracy-7; the rule is detectron2's."""
    return "-" in name.partition("/")[2]


def _plain(value):
    """What TensorBoard can show: a finite number or a text."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return value if is_number and math.isfinite(value) else str(value)


def log_results(name, results):
    """Log the numbers of one test set: a table, and lines of comma-separated values to copy.

    The latter are detectron2's print_csv_format: without names that have a "-", which are of
    single classes.
    """
    main = {key: value for key, value in results.items() if "-" not in key}
    logger.info("Results on %s:\n%s", name, _table(results) or "none")
    logger.info("copypaste: Task: %s", name)
    logger.info("copypaste: %s", ",".join(main))
    logger.info("copypaste: %s", ",".join(f"{value:.4f}" for value in main.values()))


def _table(results):
    """"| accuracy | 0.9900 | ..." in aligned columns, read from left to right."""
    ordered = sorted(results, key=lambda key: "-" in key)  # those of single classes last
    cells = [(key, _shown(results[key])) for key in ordered]
    num_columns = min(len(cells), _TABLE_COLUMNS)
    cells += [("", "")] * (-len(cells) % max(num_columns, 1))
    columns = [cells[start::num_columns] for start in range(num_columns)]
    widths = [[max(map(len, part)) for part in zip(*column)] for column in columns]
    lines = []
    for row in zip(*columns):
        texts = [f"{k:<{a}} | {v:>{b}}" for (k, v), (a, b) in zip(row, widths)]
        lines.append(f"| {' | '.join(texts)} |")
    return "\n".join(lines)


def _shown(value):
    plain = value == 0 or 1e-3 <= abs(value) < 1e6 or not math.isfinite(value)
    return f"{value:.4f}" if plain else f"{value:.3e}"


def verify_results(results, expected):
    """Compare with what was expected; return the results if all is well.  Collective.

    A metric that is missing, not finite or further off than its tolerance is logged, and ends the
    program on all ranks with exit status 1.

    Args:
        expected: [("digits_test/accuracy", value, tolerance), ...]
    """
    if comm.from_main_process(lambda: _log_misses(results, expected)):
        raise SystemExit(1)
    return results


def _log_misses(results, expected):
    """How many there are."""
    num_misses = 0
    for name, value, tolerance in expected:
        actual = results.get(name)
        slack = 4 * math.ulp(max(abs(value), tolerance))  # 0.8 is within 0.7 +- 0.1
        if actual is None or not abs(actual - value) <= tolerance + slack:
            num_misses += 1
            found = "there is none" if actual is None else f"got {actual:.6g}"
            logger.error("%s: expected %g +- %g, %s", name, value, tolerance, found)
    if expected and not num_misses:
        logger.info("Expected results met: %d of %d", len(expected), len(expected))
    return num_misses


def save_results(output_dir, iteration, results):
    """Keep the numbers of a finished training as results.json; what is not finite becomes null."""
    if comm.is_main_process():
        finite = {key: value if math.isfinite(value) else None for key, value in results.items()}
        text = json.dumps({"iteration": iteration, **finite}, indent=2, allow_nan=False)
        path = os.path.join(output_dir, "results.json")
        write_atomically(path, lambda file: file.write(text.encode()))


def load_results(output_dir, iteration):
    """What save_results kept, None if the training has not come to ``iteration``.  Collective."""

    def load():
        try:
            with open(os.path.join(output_dir, "results.json")) as file:
                results = json.load(file)
            done = results.pop("iteration") >= iteration
            finite = {key: math.nan if v is None else float(v) for key, v in results.items()}
            return finite if done else None
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return None

    return comm.from_main_process(load)
