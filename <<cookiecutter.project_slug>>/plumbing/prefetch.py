"""Copies of batches to a device: a GPU gets the next one while it computes with this one."""

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch

from plumbing.shared_memory import leaves_of


def on_device(items: Iterable, device: str | torch.device) -> Iterator:
    """Yield the items of a loader on a device.

    For a GPU the copies run ahead, one item at most, and an error in loading that item is raised
    when its turn comes.  For the CPU the items are passed on as they are.

    Args:
        items: batches or lists of batches, see ``to_device``.
        device: a GPU must be the current one.
    """
    device_type = torch.device(device).type
    if device_type == "cpu":
        return iter(items)
    if device_type == "cuda":
        return _copied_ahead(items, device)
    return (to_device(item, device) for item in items)


class _Drawn(NamedTuple):
    """What came of drawing an item: the item, or the error, StopIteration at the end."""

    item: Any
    error: Exception | None


# The order of events on a GPU, for items 0, 1, ...:
#
#   this process        copying stream        computing stream
#   draw 0              copy 0
#                                             wait for copy 0
#   draw 1              copy 1
#   yield 0             (goes on)             compute with 0
#                                             wait for copy 1
#   draw 2              copy 2
#   yield 1             (goes on)             compute with 1
#
# The computing stream waits for its own item only: copy 1 has not begun when it waits for copy 0.
def _copied_ahead(items: Iterable, device: str | torch.device) -> Iterator:
    iterator = iter(items)
    stream = torch.cuda.Stream()
    drawn = _draw(iterator, stream, device)
    while drawn.error is None:
        item = drawn.item
        torch.cuda.current_stream().wait_stream(stream)
        # The memory belongs to the copying stream.  It must not be used for the next copy as long
        # as the computing stream needs it.
        for leaf in leaves_of(item):
            if hasattr(leaf, "record_stream"):
                leaf.record_stream(torch.cuda.current_stream())
        drawn = _draw(iterator, stream, device)
        yield item
    if not isinstance(drawn.error, StopIteration):
        raise drawn.error


def _draw(iterator: Iterator, stream: Any, device: str | torch.device) -> _Drawn:
    try:
        item = next(iterator)
        with torch.cuda.stream(stream):
            return _Drawn(to_device(item, device), None)
    except Exception as error:
        return _Drawn(None, error)


def to_device(data: Any, device: str | torch.device) -> Any:
    """Copy the tensors in dicts, lists and tuples to a device.

    From pinned memory the copy runs beside this process.  Anything that has no method ``to``, such
    as the name of a file, stays as it is.
    """
    if isinstance(data, dict):
        return {name: to_device(each, device) for name, each in data.items()}
    if isinstance(data, (list, tuple)):
        items = [to_device(each, device) for each in data]
        is_named_tuple = hasattr(data, "_fields")
        return type(data)(*items) if is_named_tuple else type(data)(items)
    if hasattr(data, "to"):
        return data.to(device, non_blocking=True)
    return data
