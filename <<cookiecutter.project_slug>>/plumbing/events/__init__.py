"""Scalars, images and histograms of a run, and their writers, as in detectron2/utils/events.py."""

from .default_writers import default_writers
from .history import HistoryBuffer
from .json_writer import JSONWriter
from .printer import CommonMetricPrinter
from .results import load_results, remove_results, save_results
from .storage import EventStorage, get_event_storage, has_event_storage
from .tensorboard_writer import TensorboardXWriter
from .writer import EventWriter, open_writers
