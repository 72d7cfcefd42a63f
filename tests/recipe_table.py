"""Writes the table of recipes/README.md from the headers and the diffs of the patches.

    python tests/recipe_table.py

It also tries all pairs of recipes one after the other, which takes a minute; the last column names
the pairs that conflict.
"""

import os
import re
import tempfile
from pathlib import Path
from typing import NamedTuple

import recipes

PAGE = recipes.RECIPES / "README.md"
BEGIN = "<!-- The table is written by a program from the patches. -->"
END = "<!-- Here the table ends. -->"
HEAD = "| name | what it does | files | lines of train.py | conflicts with |"


class Change(NamedTuple):
    """What a patch does to one file."""

    path: str
    is_new: bool
    added: int
    removed: int


def changes_of(name: str) -> list[Change]:
    """Every file that a recipe changes, in the order of its patch."""
    patch = (recipes.RECIPES / f"{name}.patch").read_text(encoding="utf-8")
    changes = []
    for part in re.split(r"^diff --git ", patch, flags=re.MULTILINE)[1:]:
        path = re.match(r"a/(\S+) b/\1\n", part)[1]
        head, _, hunks = part.partition("\n@@")
        changes.append(
            Change(
                path,
                is_new="\nnew file mode" in head,
                added=len(re.findall(r"^\+", hunks, re.MULTILINE)),
                removed=len(re.findall(r"^-", hunks, re.MULTILINE)),
            )
        )
    return changes


def title_of(name: str) -> str:
    """What a recipe does, as the first line of its patch says it."""
    title = recipes.header_of(name).partition("\n")[0].removeprefix(f"{name}:").strip()
    title = title[0].upper() + title[1:]
    return title.rstrip(".").replace("|", "\\|")


def row_of(name: str, conflicts: set[tuple[str, str]]) -> str:
    """The line of a recipe in the table.

    Args:
        conflicts: pairs of names, each in alphabetical order.
    """
    files = []
    lines = ""
    for change in changes_of(name):
        if change.path == "train.py":
            lines = f"+{change.added} -{change.removed}"
        if change.path != f"tests/test_{name}.py":
            files.append(f"{change.path} (new)" if change.is_new else change.path)
    others = sorted({other for pair in conflicts if name in pair for other in pair} - {name})
    cells = [f"`{name}`", title_of(name), ", ".join(files), lines, ", ".join(others)]
    return re.sub(r" +", " ", f"| {' | '.join(cells)} |")


def table(conflicts: set[tuple[str, str]]) -> str:
    """The lines between the two comments of the page."""
    rule = re.sub(r"[^|]+", " --- ", HEAD)
    rows = [row_of(name, conflicts) for name in recipes.names()]
    return "\n".join([BEGIN, "", HEAD, rule, *rows, "", END])


def present_table(page: str) -> str:
    """The two comments of the page, and all between them."""
    return re.search(f"{re.escape(BEGIN)}.*?{re.escape(END)}", page, re.DOTALL).group()


def write() -> None:
    """Write the table anew; the pairs are tried."""
    with tempfile.TemporaryDirectory() as folder:
        conflicts = set(recipes.conflicting_pairs(recipes.make_project(Path(folder))))
    page = PAGE.read_text(encoding="utf-8")
    new = page.replace(present_table(page), table(conflicts))
    temporary = PAGE.with_suffix(".new")
    temporary.write_text(new, encoding="utf-8")
    os.replace(temporary, PAGE)


if __name__ == "__main__":
    write()
