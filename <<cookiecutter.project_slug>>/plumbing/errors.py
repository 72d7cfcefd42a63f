"""The errors that end a run with one line, and the checkpoint that their messages name."""

# A loss that is not finite is noticed by the storage, and weights that are not by the
# checkpointer.  Both tell the user where to begin again; this is the one place that knows.
_last_checkpoint = "none"


class SettingsError(ValueError):
    """A mistake in what the user gave; it is printed as one line without a traceback."""


class NonFiniteError(FloatingPointError):
    """A loss or a weight is NaN or infinite; it is raised on all ranks alike."""


class StoppedBySignal(Exception):
    """A signal ended an evaluation; the process then ends with exit status 0."""


def remember_checkpoint(path: str) -> None:
    """Note the newest checkpoint, one that was saved or loaded by this process."""
    global _last_checkpoint
    _last_checkpoint = path


def last_checkpoint() -> str:
    """Return the path of the newest checkpoint, or "none"."""
    return _last_checkpoint
