"""Scalars, images and histograms of a run, and their writers, as in detectron2/utils/events.py."""

from .history import HistoryBuffer
from .storage import EventStorage, get_event_storage, has_event_storage
from .writers import EventWriter, JSONWriter, TensorboardXWriter
