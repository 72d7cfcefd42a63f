"""Settings from YAML files and from KEY VALUE pairs, with errors that say what to do.

The settings are a tree of yacs.config.CfgNode whose leaves are the defaults.  The type of a default
is the type of its setting: a bool, an int, a float, a string, or a tuple of these.  A default
of None accepts any of them.
"""

import contextlib
import difflib
import logging
import os
import re
from collections.abc import Iterator
from typing import Any

from yacs.config import CfgNode, yaml

from plumbing.errors import SettingsError
from plumbing.values import ConversionError, convert, shown

logger = logging.getLogger(__name__)


# Merging


def merge_settings(cfg: CfgNode, path: str, opts: list[str]) -> None:
    """Set what a YAML file says, and then what KEY VALUE pairs say.

    If the file has a key _BASE_, the file that it names is merged first.

    Args:
        cfg: the settings, at their defaults; they are changed in place.
        path: the file.
        opts: words of a command line, such as ["SOLVER.BASE_LR", "0.1"].

    Raises:
        SettingsError: names the source, the key, the value and the remedy.
    """
    _merge_file(cfg, expand_path(path, "--config"), [])
    for word in opts:
        if word.startswith("--"):
            raise SettingsError(f"command line: {word} is neither a flag (see --help) nor a value")
    for index, key in enumerate(opts):
        is_key = index % 2 == 0
        if is_key and "=" in key:
            raise SettingsError(f"command line: {key}: settings are pairs: KEY VALUE, without '='")
        if is_key and index == len(opts) - 1:
            raise SettingsError(f"command line: {key}: settings are pairs: KEY VALUE")
    for key, text in zip(opts[::2], opts[1::2]):
        _set(cfg, key, text, "command line")


def merge_text(cfg: CfgNode, text: str, source: str) -> None:
    """Set what a text in YAML says, such as the settings that a checkpoint holds.

    Args:
        source: the name of the text in messages.
    """
    for key, value in _parse(text, source):
        _set(cfg, key, value, source)


def _merge_file(cfg: CfgNode, path: str, above: list[str]) -> None:
    """Merge a file after its base.

    Args:
        above: real paths of the files that lead to this one.
    """
    settings = dict(read_settings(path))
    base = settings.pop("_BASE_", None)
    if base is not None:
        if not isinstance(base, str):
            raise SettingsError(f"{path}: _BASE_: {shown(base)} is not the path of one file")
        below = os.path.join(os.path.dirname(path), expand_path(base, f"{path}: _BASE_"))
        above = [*above, os.path.realpath(path)]
        if os.path.realpath(below) in above:
            raise SettingsError(f"{path}: _BASE_: {base} leads back to this file")
        _merge_file(cfg, below, above)
    for key, value in settings.items():
        _set(cfg, key, value, path)


def _set(cfg: CfgNode, key: str, value: Any, source: str) -> None:
    """Set one setting; its value is text, None, or a list or dict of these."""
    known = dict(leaves(cfg))
    inside = [other for other in known if other.startswith(f"{key}.")]
    if inside:
        raise SettingsError(f"{source}: {key}: is a section: set one of {', '.join(inside)}")
    if key not in known:
        raise SettingsError(f"{source}: {key}: there is no such setting{_hint(key, list(known))}")
    *sections, name = key.split(".")
    for section in sections:
        cfg = cfg[section]
    try:
        cfg[name] = convert(value, known[key])
    except ConversionError as error:
        raise SettingsError(f"{source}: {key}: {error}") from None


def _hint(key: str, known: list[str]) -> str:
    """The known key that was probably meant, as the end of a message; "" if none is near."""
    # Without case, and with or without its section: solver.base_lr and BASE_LR are both near.
    lower = {other.lower(): other for other in known}
    last_words = {other.lower().rpartition(".")[2]: other for other in reversed(known)}
    for names, word in ((lower, key.lower()), (last_words, key.lower().rpartition(".")[2])):
        if word in names:
            return f"; did you mean {names[word]}?"
    near = difflib.get_close_matches(key.lower(), lower, 1, cutoff=0.6)
    if near:
        return f"; did you mean {lower[near[0]]}?"
    return ""


def leaves(tree: dict, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield ("SOLVER.BASE_LR", 0.1) and so on, for every setting in nested dicts."""
    for key, value in tree.items():
        if isinstance(value, dict) and value:
            yield from leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


# Reading


class _Loader(yaml.SafeLoader):
    """Reads YAML, but leaves every scalar as it is written: only null and "<<" mean something.

    The default of a setting tells its type later.  YAML alone would read the folder 2024_01_05 as
    the number 20240105, and the number 1e-4 as a string.
    """

    yaml_implicit_resolvers = {
        first: [pair for pair in pairs if pair[0].endswith((":null", ":merge"))]
        for first, pairs in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict:
        """Override that of yaml, which takes the last of two equal keys."""
        seen = set()
        for key, _ in node.value:
            name = str(key.value)
            if name in seen:
                raise yaml.YAMLError(f"line {key.start_mark.line + 1} has {name} again")
            seen.add(name)
        return super().construct_mapping(node, deep)


def read_settings(path: str) -> list[tuple[str, Any]]:
    """Return the settings of a YAML file as ``leaves`` gives them, with all scalars as text.

    Raises:
        SettingsError: the file cannot be read, or holds no settings.
    """
    if os.path.isdir(path):
        raise SettingsError(f"{path}: is a folder, not a .yaml file")
    if not path.endswith((".yaml", ".yml")) or not os.path.isfile(path):
        raise SettingsError(f"{path}: there is no such .yaml file")
    try:
        # An editor on Windows may have put a byte order mark before the text.
        with open(path, encoding="utf-8-sig") as file:
            text = file.read()
    except UnicodeDecodeError:
        raise SettingsError(f"{path}: is not text in UTF-8: save it in that encoding") from None
    except OSError as error:
        raise SettingsError(f"{path}: cannot be read: {error.strerror}") from None
    return _parse(text, path)


def _parse(text: str, source: str) -> list[tuple[str, Any]]:
    try:
        tree = yaml.load(text, _Loader)
        settings = list(leaves(tree)) if isinstance(tree, dict) else []
    except RecursionError:
        raise SettingsError(f"{source}: a value is nested too deeply or contains itself") from None
    except (yaml.YAMLError, ValueError, TypeError) as error:
        raise SettingsError(f"{source}: is not YAML: {' '.join(str(error).split())}") from None
    if not settings:
        raise SettingsError(f"{source}: holds no settings, such as OUTPUT_DIR: output")
    seen = set()
    for key, _ in settings:
        # "A.B: 1" and "A: {B: 1}" are the same setting.
        if key in seen:
            raise SettingsError(f"{source}: {key} is set twice")
        seen.add(key)
    return settings


def expand_path(path: str, key: str) -> str:
    """Return a path with "~" and "$NAME" replaced by what they stand for.

    Args:
        key: the setting or flag, for messages.

    Raises:
        SettingsError: the path is a URL, or there is no such user or variable.
    """
    if "://" in path:
        raise SettingsError(f"{key}: {path} is a URL: copy it to a disk and give the path there")
    expanded = os.path.expandvars(os.path.expanduser(path))
    if expanded.startswith("~"):
        raise SettingsError(f"{key}: {path}: there is no home folder {path.partition('/')[0]}")
    missing = re.search(r"\$(\w+|\{\w+\})", expanded)
    if missing:
        raise SettingsError(f"{key}: {path}: the environment variable {missing[0]} is not set")
    return expanded


# Comparing


def differences(cfg: CfgNode, defaults: CfgNode) -> dict[str, Any]:
    """Return {key: value} of the settings that are not as in the defaults."""
    before = dict(leaves(defaults))
    return {
        key: value
        for key, value in leaves(cfg)
        # Compared as text, because nan is not equal to itself and 1 is equal to True.
        if key not in before or repr(value) != repr(before[key])
    }


def changed_settings(cfg: CfgNode, path: str) -> list[tuple[str, str, str]]:
    """Compare the settings with those in the file of a run so far, config.yaml.

    Returns:
        (key, old, new) for each setting that differs, the values as text; "not a setting" stands
        for one that only the other has.  It is empty if there is no such file; if it is damaged, a
        warning says so.
    """
    if not os.path.exists(path):
        return []
    try:
        saved = dict(read_settings(path))
    except SettingsError as error:
        logger.warning("The settings of the run so far cannot be compared: %s", error)
        return []
    # Both as text that was written in the same way: their types may have changed since.
    present = dict(_parse(cfg.dump(), "the present settings"))
    values = dict(leaves(cfg))
    changes = []
    for key in {**present, **saved}:
        if present.get(key) != saved.get(key):
            old = saved.get(key)
            if key in saved and key in values:
                with contextlib.suppress(ConversionError):
                    old = convert(old, values[key])
            old = repr(old) if key in saved else "not a setting"
            new = repr(values[key]) if key in values else "not a setting"
            changes.append((key, old, new))
    return changes
