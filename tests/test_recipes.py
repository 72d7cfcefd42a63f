"""The prompt for recipes, and make recipe in a project: a patch that applies, or a plain word."""

import json
import shutil
import subprocess

import pytest
from conftest import PROJECT, Baker, environment_of_a_shell, files_under, git

NEW_FILE = """\
diff --git a/tests/test_toy.py b/tests/test_toy.py
new file mode 100644
index 0000000..b5f6a7e
--- /dev/null
+++ b/tests/test_toy.py
@@ -0,0 +1,2 @@
+def test_toy():
+    pass
"""
NAME = ["-c", "user.name=t", "-c", "user.email=t@example.com"]


def edit(path, line, new):
    """Replace a whole line that a file holds once."""
    text = path.read_text()
    assert text.count(f"\n{line}\n") == 1
    path.write_text(text.replace(f"\n{line}\n", f"\n{new}\n"))


def patch_of(template, tmp_path, line, new):
    """The patch, as git writes it, that changes one line of cfg.yaml."""
    copy = shutil.copytree(
        template / PROJECT, tmp_path / f"patched {len(list(tmp_path.iterdir()))}"
    )
    git("init", "--quiet", cwd=copy)
    git("add", ".", cwd=copy)
    edit(copy / "cfg.yaml", line, new)
    return "What a toy does.\n\n" + git("diff", "--full-index", cwd=copy)


@pytest.fixture(scope="module")
def template_with_recipes(template, tmp_path_factory):
    """The template with recipes that change a setting; toy and clash change the same line."""
    home = tmp_path_factory.mktemp("recipes")
    copy = shutil.copytree(template, home / "template")
    recipes = copy / PROJECT / "recipes"
    recipes.mkdir(exist_ok=True)
    toy = patch_of(template, home, "OUTPUT_DIR: output", "OUTPUT_DIR: toy") + NEW_FILE
    (recipes / "toy.patch").write_text(toy)
    (recipes / "clash.patch").write_text(
        patch_of(template, home, "OUTPUT_DIR: output", "OUTPUT_DIR: clash")
    )
    width = "  WIDTH: 32"
    (recipes / "other.patch").write_text(patch_of(template, home, width, "  WIDTH: 16"))
    answers = json.loads((copy / "cookiecutter.json").read_text())
    answers["_recipes"] = sorted({*answers["_recipes"], "toy", "clash", "other"})
    (copy / "cookiecutter.json").write_text(json.dumps(answers))
    return copy


@pytest.fixture
def bake_recipes(template_with_recipes, tmp_path):
    return Baker(template_with_recipes, tmp_path)


def make(project, *words):
    return subprocess.run(
        ["make", "--no-print-directory", "recipe", *words],
        cwd=project,
        env=environment_of_a_shell(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.fixture
def committed(bake_recipes):
    """A project whose files are committed."""
    project = bake_recipes()
    git(*NAME, "commit", "--quiet", "-m", "Start", cwd=project)
    return project


def test_cookiecutter_json_names_the_recipes_that_are_there(template):
    names = json.loads((template / "cookiecutter.json").read_text())["_recipes"]
    assert names == sorted(path.stem for path in (template / PROJECT / "recipes").glob("*.patch"))


def test_the_answer_none_or_nothing_leaves_the_project_as_it_is(bake_recipes):
    for answer in ("none", "", "  "):
        project = bake_recipes(recipes=answer)
        assert "OUTPUT_DIR: output\n" in (project / "cfg.yaml").read_text()
        assert not (project / "tests/test_toy.py").exists()


def test_recipes_that_are_asked_for_are_applied_and_added(bake_recipes):
    project = bake_recipes(recipes="toy other")
    settings = (project / "cfg.yaml").read_text()
    assert "OUTPUT_DIR: toy\n" in settings
    assert "WIDTH: 16\n" in settings
    assert (project / "tests/test_toy.py").is_file()
    assert sorted(git("ls-files", cwd=project).splitlines()) == files_under(project)
    assert git("diff", cwd=project) == ""


def test_recipes_are_applied_inside_a_repository_too(bake_recipes):
    out = bake_recipes.folder()
    git("init", "--quiet", cwd=out)
    project = bake_recipes(output_dir=out, recipes="toy")
    assert "OUTPUT_DIR: toy\n" in (project / "cfg.yaml").read_text()
    assert (project / "tests/test_toy.py").is_file()


@pytest.mark.parametrize("answer", ["emma", "toy emma", "none toy", "../toy", "toy\nother"])
def test_an_unknown_recipe_is_refused_in_one_line_that_names_the_known_ones(bake_recipes, answer):
    out = bake_recipes.folder()
    done = bake_recipes.command(f"recipes={answer}", output_dir=out)
    assert done.returncode != 0
    assert list(out.iterdir()) == []
    lines = [line for line in done.stderr.splitlines() if line.startswith("ERROR: recipes ")]
    assert len(lines) == 1
    assert done.stderr.startswith(lines[0])
    for name in ("clash", "other", "toy"):
        assert "\n" in answer or f" {name} " in lines[0].replace(",", " ,")


def test_recipes_that_exclude_each_other_leave_no_project(bake_recipes):
    out = bake_recipes.folder()
    done = bake_recipes.command("recipes=toy clash", output_dir=out)
    assert done.returncode != 0
    assert "ERROR: recipe clash does not fit those before it" in done.stderr
    assert list(out.iterdir()) == []


def test_a_recipe_without_git_is_one_line(bake_recipes):
    out = bake_recipes.folder()
    empty = str(bake_recipes.folder())
    done = bake_recipes.command("recipes=toy", output_dir=out, PATH=empty)
    assert done.returncode != 0
    assert "or git is missing" in done.stderr


def test_make_recipe_lists_the_recipes_with_what_they_do(bake_recipes):
    done = make(bake_recipes())
    assert done.returncode == 0
    assert "toy\tWhat a toy does.\n" in done.stdout


def test_make_recipe_applies_a_recipe_and_adds_it(committed):
    done = make(committed, "NAME=toy")
    assert done.returncode == 0, done.stdout
    assert "OUTPUT_DIR: toy\n" in (committed / "cfg.yaml").read_text()
    assert git("diff", "--cached", "--name-only", cwd=committed) == "cfg.yaml\ntests/test_toy.py\n"
    git("reset", "--hard", "--quiet", cwd=committed)  # as it says
    assert "git reset --hard" in done.stdout
    assert git("status", "--porcelain", cwd=committed) == ""


def test_make_recipe_works_on_a_project_within_a_repository(bake_recipes):
    out = bake_recipes.folder()
    git("init", "--quiet", cwd=out)
    project = bake_recipes(output_dir=out)
    git("add", ".", cwd=out)
    git(*NAME, "commit", "--quiet", "-m", "Start", cwd=out)
    done = make(project, "NAME=toy")
    assert done.returncode == 0, done.stdout
    assert "OUTPUT_DIR: toy\n" in (project / "cfg.yaml").read_text()


def test_make_recipe_fits_a_recipe_to_edits_elsewhere_in_the_file(committed):
    edit(committed / "cfg.yaml", "  WIDTH: 32", "  WIDTH: 8")
    git(*NAME, "commit", "--quiet", "-am", "Edit", cwd=committed)
    assert make(committed, "NAME=toy").returncode == 0
    settings = (committed / "cfg.yaml").read_text()
    assert "OUTPUT_DIR: toy\n" in settings
    assert "WIDTH: 8\n" in settings


def test_make_recipe_says_what_to_do_about_a_conflict(committed):
    edit(committed / "cfg.yaml", "OUTPUT_DIR: output", "OUTPUT_DIR: mine")
    git(*NAME, "commit", "--quiet", "-am", "Edit", cwd=committed)
    done = make(committed, "NAME=toy")
    assert done.returncode != 0
    assert "Look for the conflict markers in:\ncfg.yaml\n" in done.stdout
    assert "git reset --hard" in done.stdout
    git("reset", "--hard", "--quiet", cwd=committed)
    assert git("status", "--porcelain", cwd=committed) == ""


def test_make_recipe_says_what_is_missing(bake_recipes, committed):
    done = make(committed, "NAME=emma")
    assert (done.returncode, done.stdout.count("\n")) == (2, 2)
    assert "There is no recipe emma" in done.stdout

    edit(committed / "cfg.yaml", "  WIDTH: 32", "  WIDTH: 8")
    done = make(committed, "NAME=toy")
    assert done.returncode == 2
    assert "not committed. First: git add . && git commit" in done.stdout

    done = make(bake_recipes(), "NAME=toy")  # all added, nothing committed
    assert "not committed. First: git add . && git commit" in done.stdout

    bare = bake_recipes(accept_hooks=False)
    done = make(bare, "NAME=toy")
    assert done.returncode == 2
    assert "This is not a git repository" in done.stdout


def test_a_second_time_changes_nothing_and_says_so(committed):
    assert make(committed, "NAME=toy").returncode == 0
    git(*NAME, "commit", "--quiet", "-am", "toy", cwd=committed)
    done = make(committed, "NAME=toy")
    assert done.returncode == 0
    assert "applied already" in done.stdout
    assert git("status", "--porcelain", cwd=committed) == ""


def test_a_recipe_for_a_file_that_is_gone_says_so(committed):
    git("rm", "--quiet", "cfg.yaml", cwd=committed)
    git(*NAME, "commit", "--quiet", "-m", "Remove", cwd=committed)
    done = make(committed, "NAME=toy")
    assert done.returncode == 2
    assert "is gone or too different" in done.stdout
    assert git("status", "--porcelain", cwd=committed) == ""
