"""The form in which the measuring programs print a figure: one line, "| what | ours | ...".

    what    what was measured
    ours    the project's value, with its unit
    peer    what it is held against, measured in the same run
    figure  their ratio or difference, the number that the floor is for
    floor   "<= 1.15" or ">= 5", with a unit where the figure has one; "" for none

``__main__.py`` collects these lines, of whatever program, into one table.
"""

import math
import operator
import re

COLUMNS = "what", "ours", "peer", "figure", "floor"
_NUMBER = r"[-+]?[\d.,]*\d(?:e[-+]?\d+)?"
_SIDES = {"<=": operator.le, ">=": operator.ge}


def print_row(what, ours, peer, figure, floor=""):
    """Print a line of the table; the cells are texts without a "|"."""
    print(f"| {' | '.join((what, ours, peer, figure, floor))} |", flush=True)


def rows_in(text):
    """The lines of the table in what a program printed, each a tuple of five cells."""
    lines = [line.strip() for line in text.splitlines()]
    cells = [line[1:-1].split("|") for line in lines if line[:1] == line[-1:] == "|"]
    return [tuple(cell.strip() for cell in row) for row in cells if len(row) == len(COLUMNS)]


def verdict(figure, floor):
    """Whether a figure, rounded as it is shown, is "held" or "MISSED"; "" without a floor."""
    wanted, found = re.match(rf"(<=|>=)\s*({_NUMBER})", floor), re.match(_NUMBER, figure)
    if wanted is None:
        return ""
    value = float(found[0].replace(",", "")) if found else math.nan
    return "held" if _SIDES[wanted[1]](value, float(wanted[2].replace(",", ""))) else "MISSED"


def aligned(rows):
    """Lines of a table whose columns are as wide as their widest cell."""
    widths = [max(map(len, column)) for column in zip(*rows)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows
    ]
