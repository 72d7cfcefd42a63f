"""What a run puts (scalars, images, histograms) and the writers that show it.

The public surface is detectron2's (detectron2/utils/events.py) and fvcore's HistoryBuffer.  What
differs: tensors are put without being read; ``EventStorage.reduce`` averages all that waits over
the ranks in one collective and copies it to the host once.
"""

from .history import HistoryBuffer
from .storage import EventStorage, get_event_storage, has_event_storage
from .writers import CommonMetricPrinter, EventWriter, JSONWriter, TensorboardXWriter, open_writers
