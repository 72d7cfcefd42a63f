"""Values of settings: text becomes the type of the default, or a message says what is expected."""

import ast
import contextlib
import math
import re
from typing import Any

_WORDS = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
_LONGEST_SHOWN = 80  # characters of a value in a message


class ConversionError(ValueError):
    """A value is not of the type that its setting has; the message says which type is expected."""


def convert(value: Any, default: Any) -> Any:
    """Return a value as the type of the default.

    Args:
        value: text, None, or a list or dict of these.
        default: a bool, int, float, string, or a tuple or list of one of these, whose items are
            like its first one.  If it is None, or an empty list has no first item, then text
            becomes the number or bool that it looks like.

    Raises:
        ConversionError: such as "10.5 is not an integer, such as 1000".
    """
    try:
        return _convert(value, default)
    except (TypeError, ValueError, OverflowError, RecursionError):
        raise ConversionError(f"{shown(value)} is not {_described(default)}") from None


def _convert(value: Any, default: Any) -> Any:
    # An explicit YAML tag, such as !!int 5, and a list in Python's way give more than text.
    if isinstance(value, (bool, int, float)):
        value = str(value)
    if value == "None":
        value = None
    if default is None:
        return _guess(value)
    if isinstance(default, (tuple, list)):
        return type(default)(_convert_items(value, default))
    if not isinstance(value, str):
        raise TypeError
    if isinstance(default, str):
        return value
    # Before int, because a bool is an int in Python.
    if isinstance(default, bool):
        return _to_bool(value)
    if isinstance(default, int):
        return _to_int(value)
    if isinstance(default, float):
        return _to_float(value)
    raise TypeError


def _convert_items(value: Any, default: tuple | list) -> list:
    """Return the items of a list; their type is that of the default's first item."""
    if isinstance(value, str):
        value = _to_list(value)
    if not isinstance(value, (list, tuple)):
        raise TypeError
    if default:
        return [_convert(item, default[0]) for item in value]
    return [_guess(item) for item in value]


def _to_list(text: str) -> Any:
    """Return the list that is written as "1,2", "[1, 2]", "(1, 2)", "a,b" or "('a', 'b')"."""
    inner = text.strip()
    if inner[:1] + inner[-1:] in ("()", "[]"):
        inner = inner[1:-1]
    elif "," not in inner:
        raise TypeError
    # Quotes and nested lists are written as in Python.
    if re.search("[][()'\"]", inner):
        return ast.literal_eval(text.strip())
    # Python's reading of 2024_01_05 is the number 20240105, so the items stay text here.
    items = [item.strip() for item in inner.split(",")]
    if items[-1] == "":
        items.pop()  # as in "(a,)" and "[]"
    return items


def _to_bool(text: str) -> bool:
    if text.lower() not in _WORDS:
        raise ValueError
    return _WORDS[text.lower()]


def _to_int(text: str) -> int:
    """Also accepts 1e3 and 90000.0, and 0x10 as in Python."""
    # Base 10 first: base 0 is Python's way to write numbers, in which 007 is not allowed.
    for base in (10, 0):
        with contextlib.suppress(ValueError):
            return int(text, base)
    number = _to_float(text)
    if not number.is_integer():
        raise ValueError
    return int(number)


def _to_float(text: str) -> float:
    """Also accepts .inf and .nan, which is how YAML writes them."""
    return float(re.sub(r"^([-+]?)\.(inf|nan)$", r"\1\2", text.strip(), flags=re.IGNORECASE))


def _guess(value: Any) -> Any:
    """Return text as the number or bool that it looks like; a list as a tuple of such values."""
    if isinstance(value, (list, tuple)):
        return tuple(_guess(item) for item in value)
    if isinstance(value, dict):
        raise TypeError
    if str(value)[:1] in ("[", "("):
        return _guess(_to_list(value))
    for to_number in (int, _to_float):
        with contextlib.suppress(ValueError):
            return to_number(str(value))
    if str(value) in ("True", "true", "False", "false"):
        return _to_bool(str(value))
    return value


def _described(default: Any) -> str:
    """What a setting must be, with an example: "an integer, such as 1000"."""
    if isinstance(default, (tuple, list)):
        kinds = {bool: " of True or False", int: " of integers", float: " of numbers"}
        kind = kinds.get(type(default[0]), "") if default else ""
        return f"a list{kind}, such as [{','.join(map(str, default))}]"
    if isinstance(default, bool):
        return "True or False"
    if isinstance(default, int):
        return f"an integer, such as {default}"
    if isinstance(default, float):
        return f"a number, such as {default if math.isfinite(default) else 0.1}"
    if isinstance(default, str):
        return f"a string, such as {default!r}"
    return "a bool, a number, a string or a list"


def shown(value: Any) -> str:
    """A value as it is printed in a message: one line of limited length."""
    text = str(value)
    if text != text.strip() or not text:
        text = repr(text)
    text = " ".join(text.split())
    if len(text) > _LONGEST_SHOWN:
        text = f"{text[: _LONGEST_SHOWN - 3]}..."
    return text
