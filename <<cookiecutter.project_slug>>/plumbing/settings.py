"""Settings from a file and from KEY VALUE pairs, with errors that tell what to do."""

import ast
import contextlib
import difflib
import os
from collections.abc import Iterator
from typing import Any

from yacs.config import CfgNode, yaml

from plumbing.comm import SettingsError


def merge_settings(cfg: CfgNode, path: str, opts: list[str]) -> None:
    """Set what a YAML file holds, then KEY VALUE pairs such as ["SOLVER.BASE_LR", "0.1"].

    Before a file comes the one that its key _BASE_ names, relative to it, as in fvcore.  A mistake
    is a SettingsError that names the source, the key, the value and the remedy.
    """
    _merge_file(cfg, path, [])
    for word in opts[::2]:
        if "=" in word or word == opts[-1] and len(opts) % 2:
            raise SettingsError(f"command line: {word}: settings are pairs: KEY VALUE")
    for key, text in zip(opts[::2], opts[1::2]):
        _set(cfg, key, None if text == "None" else text, "command line")


def _merge_file(cfg: CfgNode, path: str, above: list[str]) -> None:
    settings = dict(read_settings(path))
    if base := settings.pop("_BASE_", None):
        above = [*above, os.path.realpath(path)]
        below = os.path.join(os.path.dirname(path), str(base))
        if os.path.realpath(below) in above:
            raise SettingsError(f"{path}: _BASE_: {base} leads back to this file")
        _merge_file(cfg, below, above)
    for key, value in settings.items():
        _set(cfg, key, value, path)


def leaves(tree: dict, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """("SOLVER.BASE_LR", 0.1) and so on, for every setting in nested dicts."""
    for key, value in tree.items():
        if isinstance(value, dict) and value:
            yield from leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers = {  # a number stays as written: the default tells what it is
        first: [pair for pair in pairs if pair[0].endswith((":bool", ":null", ":merge"))]
        for first, pairs in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict:
        keys = [str(key.value) for key, _ in node.value]
        for number, (key, _) in enumerate(node.value):
            if keys[number] in keys[:number]:
                raise yaml.YAMLError(f"line {key.start_mark.line + 1} has {key.value} again")
        return super().construct_mapping(node, deep)


def read_settings(path: str) -> list[tuple[str, Any]]:
    """The settings of a YAML file, as leaves gives them, but numbers are text."""
    if not path.endswith((".yaml", ".yml")) or not os.path.isfile(path):
        raise SettingsError(f"{path}: there is no such .yaml file")
    try:
        with open(path, encoding="utf-8") as file:
            tree = yaml.load(file, _Loader)
        settings = list(leaves(tree)) if isinstance(tree, dict) else []
    except (yaml.YAMLError, ValueError, OSError, RecursionError) as error:
        raise SettingsError(f"{path}: not YAML: {' '.join(str(error).split())}") from None
    if not settings:
        raise SettingsError(f"{path}: holds no lines such as OUTPUT_DIR: output")
    keys = [key for key, _ in settings]
    if again := [key for key in keys if keys.count(key) > 1]:
        raise SettingsError(f"{path}: {again[0]} is there twice")
    return settings


def _set(cfg: CfgNode, key: str, value: Any, source: str) -> None:
    known = dict(leaves(cfg))
    if inside := [other for other in known if other.startswith(f"{key}.")]:
        raise SettingsError(f"{source}: {key}: is a section: set one of {', '.join(inside)}")
    if key not in known:
        (near,) = difflib.get_close_matches(key, known, 1, cutoff=0.0)
        raise SettingsError(f"{source}: {key}: no such setting; did you mean {near}?")
    *parents, name = key.split(".")
    for parent in parents:
        cfg = cfg[parent]
    try:
        cfg[name] = _convert(value, known[key])
    except (TypeError, ValueError, OverflowError):
        wanted = f"{type(known[key]).__name__} such as {known[key]!r}"
        error = f"{source}: {key}: {value!r} is {type(value).__name__}, expected {wanted}"
        raise SettingsError(error) from None


def _convert(value: Any, default: Any) -> Any:
    """The value as the default's type: 1 passes as a float, 1e3 as an int, 7 as a str."""
    kind = type(default)
    if isinstance(value, str) and kind is not str:
        value = value.replace(".inf", "inf")  # as in YAML
        with contextlib.suppress(ValueError, SyntaxError, RecursionError, MemoryError):
            value = ast.literal_eval(value)
    if kind in (tuple, list) and isinstance(value, (list, tuple)):
        return kind(_convert(item, default[0]) if default else item for item in value)
    if kind is bool:
        value = {"true": True, "false": False}.get(str(value).lower())
    right = isinstance(value, (bool, int, float, str)) and isinstance(value, bool) == (kind is bool)
    if not right or kind in (tuple, list):
        raise TypeError
    if kind is int and not isinstance(value, int):
        if not float(value).is_integer():
            raise ValueError
        value = float(value)
    return kind(value)
