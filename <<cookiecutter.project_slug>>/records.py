"""What a run leaves behind: its metrics while it goes on, its results at the end."""

import contextlib
import json
import logging
import os

from plumbing import comm
from plumbing.checkpoint.files import write_atomically
from plumbing.events import CommonMetricPrinter, JSONWriter, TensorboardXWriter

logger = logging.getLogger(__name__)


@contextlib.contextmanager
def open_writers(cfg, start_iter):
    """Writers to the log, metrics.json and TensorBoard; [] on all ranks but the main one.

    A resume replaces what was written from ``start_iter - 1`` on.  What is left at the end is
    written, also after an exception.
    """
    first, json_file = max(start_iter - 1, 0), os.path.join(cfg.OUTPUT_DIR, "metrics.json")
    writers = [
        CommonMetricPrinter(cfg.SOLVER.MAX_ITER, cfg.LOG_WINDOW),
        JSONWriter(json_file, cfg.LOG_WINDOW, first),
        TensorboardXWriter(cfg.OUTPUT_DIR, cfg.LOG_WINDOW, purge_step=first),
    ] * comm.is_main_process()
    with contextlib.ExitStack() as stack:
        for writer in reversed(writers):
            stack.callback(writer.close)
            stack.callback(writer.write)
        yield writers


def log_results(name, results):
    """The numbers of one test set, as two lines of comma-separated values."""
    names, values = ",".join(results), ",".join(f"{value:.4f}" for value in results.values())
    logger.info("Results on %s:\n%s\n%s", name, names, values)


def save_results(cfg, results):
    """Keep the numbers of a finished training as OUTPUT_DIR/results.json."""
    if comm.is_main_process():
        text = json.dumps({"iteration": cfg.SOLVER.MAX_ITER - 1, **results}, indent=2)
        path = os.path.join(cfg.OUTPUT_DIR, "results.json")
        write_atomically(path, lambda file: file.write(text.encode()))


def load_results(cfg):
    """What save_results kept, None if the training has not finished.  Collective."""

    def load():
        try:
            with open(os.path.join(cfg.OUTPUT_DIR, "results.json")) as file:
                results = json.load(file)
            return results if results.pop("iteration") >= cfg.SOLVER.MAX_ITER - 1 else None
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return None

    return comm.from_main_process(load)
