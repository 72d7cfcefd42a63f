"""The maintainer's command for recipes: check one out as a working project, write the patch back.

    python tests/recipes.py open NAME      build/recipes/NAME is a project with the recipe applied
    python tests/recipes.py save NAME      write what is there as recipes/NAME.patch
    python tests/recipes.py refresh        apply all recipes to the present files, write them back

A patch has a header before its first "diff --git" line: a title, and the paragraphs What, When,
Cost and Source.  A new recipe begins with an empty one: ``open`` makes the header to fill in, in
the file RECIPE.txt of the working project, and ``save`` puts it on top of the patch.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
PROJECT = ROOT / "<<cookiecutter.project_slug>>"
RECIPES = PROJECT / "recipes"
WORK = ROOT / "build" / "recipes"
HEADER_FILE = "RECIPE.txt"
NEW_HEADER = """\
{name}: a title that says what the loop gets

What: ...
When: ...
Cost: ...
Source: ...
"""
# Whatever repository the environment points at, and whoever the user is.
ENVIRONMENT = {
    **{key: value for key, value in os.environ.items() if not key.startswith("GIT_")},
    "GIT_CONFIG_GLOBAL": os.devnull,
    "GIT_CONFIG_NOSYSTEM": "1",
    "GIT_AUTHOR_NAME": "template",
    "GIT_AUTHOR_EMAIL": "template@example.invalid",
    "GIT_COMMITTER_NAME": "template",
    "GIT_COMMITTER_EMAIL": "template@example.invalid",
}


def git(*arguments, cwd, check=True):
    """Run git in a folder.  Returns the finished process; a failure raises unless ``check``."""
    done = subprocess.run(
        ["git", *map(str, arguments)], cwd=cwd, capture_output=True, text=True, env=ENVIRONMENT
    )
    if check and done.returncode != 0:
        raise RuntimeError(f"git {' '.join(map(str, arguments))}: {done.stdout}{done.stderr}")
    return done


def names():
    """The names of all recipes, sorted."""
    return sorted(path.stem for path in RECIPES.glob("*.patch"))


def make_project(folder):
    """A repository with the files of the project, as a bake makes it, and one commit."""
    listed = git("ls-files", "-co", "--exclude-standard", "-z", cwd=PROJECT).stdout.split("\0")
    for name in filter(None, listed):
        source = PROJECT / name
        if source.is_file():
            target = folder / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target)
    git("init", "--quiet", cwd=folder)
    git("add", ".", cwd=folder)
    git("commit", "--quiet", "-m", "base", cwd=folder)
    return folder


def apply(name, folder, *options):
    """Apply a recipe as ``make recipe`` does.  Returns the finished process of git."""
    patch = RECIPES / f"{name}.patch"
    # A copied folder has other times than git noted, and would seem to be edited.
    git("update-index", "-q", "--refresh", cwd=folder)
    return git("apply", "--3way", "--whitespace=nowarn", *options, patch, cwd=folder, check=False)


def header_of(name):
    """The text of a patch before its first change."""
    text = (RECIPES / f"{name}.patch").read_text(encoding="utf-8")
    return text.partition("diff --git")[0]


def conflicting_pairs(base):
    """The pairs of recipes of which the second does not apply after the first.

    Args:
        base: a project as ``make_project`` makes it; it is left as it was.

    Returns:
        [(name, name), ...], both in alphabetical order.
    """
    pairs = []
    for index, first in enumerate(names()):
        assert apply(first, base).returncode == 0, first
        git("commit", "--quiet", "-m", first, cwd=base)
        for second in names()[index + 1 :]:
            # Most pairs fit as they are, which is quicker to find out than by a merge.
            patch = RECIPES / f"{second}.patch"
            fits = git("apply", "--check", patch, cwd=base, check=False).returncode == 0
            if not fits and apply(second, base).returncode != 0:
                pairs.append((first, second))
            if not fits:
                git("reset", "--quiet", "--hard", cwd=base)
                git("clean", "--quiet", "-d", "--force", cwd=base)
        git("reset", "--quiet", "--hard", "HEAD~", cwd=base)
    return pairs


def conflicts_in_table():
    """The pairs that the table of recipes/README.md says do not go together."""
    pairs = set()
    for line in (RECIPES / "README.md").read_text(encoding="utf-8").splitlines():
        cells = [cell.strip(" `") for cell in line.strip("|").split("|")]
        if cells[0] in names():
            for other in re.findall(r"\w+", cells[-1]):
                if other in names():
                    pairs.add(tuple(sorted((cells[0], other))))
    return pairs


def open_recipe(name):
    """Make build/recipes/NAME.  Returns whether the recipe applied without a conflict."""
    folder = WORK / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    make_project(folder)
    # The base may have changed since the patch was written.  The template's repository still has
    # the old files, from which git can merge.
    objects = git("rev-parse", "--path-format=absolute", "--git-path", "objects", cwd=ROOT)
    alternates = folder / ".git" / "objects" / "info" / "alternates"
    alternates.write_text(objects.stdout, encoding="utf-8")
    if name not in names():
        (folder / HEADER_FILE).write_text(NEW_HEADER.format(name=name), encoding="utf-8")
        print(f"{folder}: a new recipe; edit it and {HEADER_FILE}, then save")
        return True
    (folder / HEADER_FILE).write_text(header_of(name), encoding="utf-8")
    done = apply(name, folder)
    if done.returncode != 0:
        print(f"{folder}: conflicts to resolve, then save:\n{done.stderr}")
    return done.returncode == 0


def save_recipe(name):
    """Write the changes of build/recipes/NAME as a patch that ``git apply --3way`` takes."""
    folder = WORK / name
    header = (folder / HEADER_FILE).read_text(encoding="utf-8").strip()
    if "..." in header:
        sys.exit(f"{folder / HEADER_FILE}: fill in the header first")
    git("add", "--all", ".", cwd=folder)
    git("reset", "--quiet", HEADER_FILE, cwd=folder)
    # --full-index: a 3-way merge finds the file that a change was made to by its whole id.
    diff = git("diff", "--cached", "--full-index", "--no-color", "HEAD", cwd=folder).stdout
    if "<<<<<<<" in diff:
        sys.exit(f"{folder}: a conflict is not resolved")
    RECIPES.mkdir(exist_ok=True)
    (RECIPES / f"{name}.patch").write_text(f"{header}\n\n{diff}", encoding="utf-8")


def refresh():
    """Write every recipe against the present files; stop at the first conflict."""
    for name in names():
        if not open_recipe(name):
            sys.exit(1)
        save_recipe(name)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("command", choices=("open", "save", "refresh"))
    parser.add_argument("name", nargs="?")
    args = parser.parse_args()
    if args.command == "refresh":
        refresh()
    elif args.name is None:
        parser.error(f"{args.command} needs the name of a recipe")
    elif args.command == "open":
        sys.exit(0 if open_recipe(args.name) else 1)
    else:
        save_recipe(args.name)
