"""The form in which the measuring programs print a figure: one line, "| what | ours | ...".

    what    the thing that was measured
    ours    the project's value, with its unit
    peer    what it is compared with, measured in the same run
    figure  their ratio or difference, the number that the floor is for
    floor   "<= 1.2" or ">= 5", with a unit where the figure has one; "" for none

``__main__.py`` collects these lines of all programs into one table.
"""

import math
import operator
import re

COLUMNS = ("what", "ours", "peer", "figure", "floor")
_NUMBER = r"[-+]?[\d.,]*\d(?:e[-+]?\d+)?"
_COMPARISONS = {"<=": operator.le, ">=": operator.ge}


def print_row(what, ours, peer, figure, floor=""):
    """Print a line of the table; the cells are strings without a "|"."""
    print(f"| {' | '.join((what, ours, peer, figure, floor))} |", flush=True)


def rows_in(text):
    """The lines of the table in what a program printed, each a tuple of five cells."""
    rows = []
    for line in text.splitlines():
        line = line.strip()
        if line.startswith("|") and line.endswith("|"):
            cells = tuple(cell.strip() for cell in line[1:-1].split("|"))
            if len(cells) == len(COLUMNS):
                rows.append(cells)
    return rows


def verdict(figure, floor):
    """Whether a figure, rounded as it is shown, is "held" or "MISSED"; "" without a floor."""
    wanted = re.match(rf"(<=|>=)\s*({_NUMBER})", floor)
    if wanted is None:
        return ""
    found = re.match(_NUMBER, figure)
    value = _number(found[0]) if found else math.nan
    is_held = _COMPARISONS[wanted[1]](value, _number(wanted[2]))
    return "held" if is_held else "MISSED"


def _number(text):
    return float(text.replace(",", ""))


def aligned(rows):
    """Lines of a table whose columns are as wide as their widest cell."""
    widths = [max(map(len, column)) for column in zip(*rows)]
    lines = []
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row, widths)]
        lines.append("  ".join(cells).rstrip())
    return lines
