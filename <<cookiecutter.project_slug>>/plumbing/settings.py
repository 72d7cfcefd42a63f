"""Settings from a file and from KEY VALUE pairs, with errors that tell what to do."""

import ast
import difflib
import logging
import os
from collections.abc import Iterator
from typing import Any

import yaml
from yacs.config import CfgNode

from plumbing import comm
from plumbing.comm import SettingsError

logger = logging.getLogger(__name__)


def merge_settings(cfg: CfgNode, path: str, opts: list[str]) -> None:
    """Set what a YAML file holds, then KEY VALUE pairs such as ["SOLVER.BASE_LR", "0.1"].

    Raises:
        SettingsError: names the file, the key, the value and the remedy.
    """
    for key, value in _read_file(path):
        _set(cfg, key, value, path)
    for word in opts[::2]:
        if "=" in word:
            raise SettingsError(f"command line: {word}: write KEY VALUE, with a space")
    if len(opts) % 2:
        raise SettingsError(f"command line: {opts[-1]} is alone: settings are KEY VALUE pairs")
    for key, text in zip(opts[::2], opts[1::2]):
        try:
            value = ast.literal_eval(text)
        except (ValueError, SyntaxError):
            value = text
        _set(cfg, key, value, "command line")


def keep_settings(cfg: CfgNode, resume: bool, save: bool) -> None:
    """Draw a seed for a negative one, log the settings, freeze and save them.  Collective.

    A resumed run takes its seed from the settings saved before, and logs what else differs.
    """
    path = os.path.join(cfg.OUTPUT_DIR, "config.yaml")
    drawn = int.from_bytes(os.urandom(4), "little") // 2
    saved, drawn = comm.from_main_process(lambda: (_saved_settings(path) if resume else {}, drawn))
    if cfg.SEED < 0:
        cfg.SEED = saved.get("SEED", drawn)
    cfg.freeze()
    logger.info("Settings:\n%s", cfg)
    for key, value in leaves(yaml.safe_load(cfg.dump())):
        if saved and value != saved.get(key):
            logger.warning("Resuming with another %s: %r, it was %r", key, value, saved.get(key))
    if save and dict(leaves(yaml.safe_load(cfg.dump()))) != saved and comm.is_main_process():
        with open(path, "w") as file:
            file.write(cfg.dump())


def _saved_settings(path: str) -> dict[str, Any]:
    if not os.path.exists(path):
        return {}
    with open(path) as file:
        return dict(leaves(yaml.safe_load(file) or {}))


def leaves(tree: dict, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """("SOLVER.BASE_LR", 0.1) and so on, for every setting in nested dicts."""
    for key, value in tree.items():
        if isinstance(value, dict) and value:
            yield from leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _read_file(path: str) -> Iterator[tuple[str, Any]]:
    if not path.endswith((".yaml", ".yml")) or not os.path.isfile(path):
        raise SettingsError(f"--config {path}: there is no such .yaml file")
    try:
        with open(path, encoding="utf-8") as file:
            tree = yaml.safe_load(file)
    except (yaml.YAMLError, UnicodeDecodeError, OSError) as error:
        raise SettingsError(f"--config {path}: not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(tree, dict) or not tree:
        raise SettingsError(f"--config {path}: holds no lines such as OUTPUT_DIR: output")
    return leaves(tree)


def _set(cfg: CfgNode, key: str, value: Any, source: str) -> None:
    known = dict(leaves(cfg))
    if key not in known:
        raise SettingsError(f"{source}: {key}: {_advice(key, list(known))}")
    node = cfg
    *parents, name = key.split(".")
    for parent in parents:
        node = node[parent]
    try:
        node[name] = _convert(value, known[key])
    except (TypeError, ValueError):
        kind = type(known[key]).__name__
        raise SettingsError(
            f"{source}: {key}: {value!r} is a {type(value).__name__}, expected a {kind}"
            f" such as {known[key]!r}"
        ) from None


def _advice(key: str, known: list[str]) -> str:
    inside = [other for other in known if other.startswith(f"{key}.")]
    if inside:
        return f"is a section; set one of {', '.join(inside)}"
    names = {other.rpartition(".")[2]: other for other in known}
    near = difflib.get_close_matches(key, known, 1, 0.5) or [
        names[name]
        for name in difflib.get_close_matches(key.rpartition(".")[2], names, 1, 0.5)
    ]
    return f"no such setting; {f'did you mean {near[0]}?' if near else 'see defaults.py'}"


def _convert(value: Any, default: Any) -> Any:
    """The value as the type of the default; whole floats pass as int, numbers as float and str."""
    kind = type(default)
    if kind is bool:
        if isinstance(value, str):
            value = {"true": True, "false": False}.get(value.lower(), value)
        if not isinstance(value, bool):
            raise TypeError
        return value
    if isinstance(value, bool) or value is None:
        raise TypeError
    if kind is tuple:
        if not isinstance(value, (list, tuple)):
            raise TypeError
        return tuple(_convert(item, default[0]) if default else item for item in value)
    if not isinstance(value, (int, float, str)) or (kind is str and value != value):
        raise TypeError
    if kind is int and float(value) != int(float(value)):
        raise ValueError
    return int(float(value)) if kind is int and not isinstance(value, int) else kind(value)
