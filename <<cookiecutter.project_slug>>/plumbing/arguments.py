"""The command line of train.py."""

import argparse
from collections.abc import Sequence


def parse_args(description: str, words: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the flags, and the KEY VALUE pairs between or after them.

    Args:
        description: what --help shows.
        words: the command line without the name of the program; None: that of this process.

    Returns:
        config, resume, eval_only, and ``opts``, the list of keys and values in turn.
    """
    parser = argparse.ArgumentParser(
        usage="%(prog)s --config FILE [--resume] [--eval-only] [KEY VALUE ...]",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--config", required=True, metavar="FILE", help="settings, a YAML file")
    parser.add_argument("--resume", action="store_true", help="continue the run in OUTPUT_DIR")
    parser.add_argument("--eval-only", action="store_true", help="evaluate, and do not train")
    # argparse.REMAINDER would swallow flags that come after a pair, and would take the value -1e-3
    # for a flag.  So everything that is not one of the flags above is a key or a value.
    args, args.opts = parser.parse_known_args(words)
    unknown_flags = [word for word in args.opts[::2] if word.startswith("-")]
    if unknown_flags:
        parser.error(f"unrecognized arguments: {' '.join(unknown_flags)}")
    return args
