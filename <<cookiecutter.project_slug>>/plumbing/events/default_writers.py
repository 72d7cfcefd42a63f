"""The writers that a training has."""

import os

from plumbing import comm

from .json_writer import JSONWriter
from .printer import CommonMetricPrinter
from .results import remove_results
from .tensorboard_writer import TensorboardXWriter
from .writer import EventWriter


def default_writers(output_dir: str, max_iter: int, start_iter: int = 0) -> list[EventWriter]:
    """Writers to the log, metrics.json and TensorBoard on rank 0; other ranks have none.

    The name is detectron2's.  A resumed run writes its first row, that of ``start_iter - 1``,
    again: what an earlier session wrote from there on is dropped.  The results.json of a shorter
    run, which now continues, is removed.

    Args:
        output_dir: folder of the run.
        max_iter: length of the training, for the remaining time in the log.
        start_iter: the first iteration of this session.
    """
    if not comm.is_main_process():
        return []
    remove_results(output_dir)
    first_row = max(start_iter - 1, 0)
    return [
        CommonMetricPrinter(max_iter),
        JSONWriter(os.path.join(output_dir, "metrics.json"), start_iter=first_row),
        TensorboardXWriter(output_dir, purge_step=first_row),
    ]
