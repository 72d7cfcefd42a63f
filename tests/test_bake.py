"""What the template promises to the person who bakes a project with it."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time

import pytest
from conftest import PROJECT, ROOT, files_under, git

RENDERED = {"README.md", "LICENSE", "pyproject.toml"}
JINJA = re.compile(r"<<\s*cookiecutter|\{%|<#")

ODD = {
    "quotes": """The "best" 'project'""",
    "triple quotes": "a " + '"' * 3 + " b " + "'" * 3 + " c",
    "backslash": "back\\slash \\n \\u00e9 end\\",
    "unicode": "\u00dcn\u00efc\u00f6d\u00e9 \u6570\u5b57 \U0001f600",
    "braces": "{{ cookiecutter.author }} {{",
    "markup": "[bold] <Net> & *x* #1 $HOME `id` %d",
    "long": "word " * 40 + "end",
}
BAD_SLUGS = [
    *("", "a b", "a/b", "/a", "../a", "..", ".", "-a", ".a", "a-", "caf\u00e9"),
    *("a" * 65, "a" * 300, "a'\"\\b", "a\nb"),
]


def test_a_default_bake_shows_the_answers(project):
    assert project.name == "my-training-project"
    assert 'name = "my-training-project"' in (project / "pyproject.toml").read_text()
    readme = (project / "README.md").read_text()
    assert "My Training Project" in readme
    year = time.strftime("%Y", time.gmtime())
    assert f"Copyright (c) {year} Your Name\n" in (project / "LICENSE").read_text()


@pytest.mark.parametrize(
    ("license", "first", "last"),
    [
        ("MIT", "MIT License\n", "DEALINGS IN THE\nSOFTWARE.\n"),
        ("Apache-2.0", "Apache License\n", "limitations under the License.\n"),
        ("BSD-3-Clause", "BSD 3-Clause License\n", "POSSIBILITY OF SUCH DAMAGE.\n"),
    ],
)
def test_each_licence_is_whole_and_names_year_and_author(bake, license, first, last):
    text = (bake(license=license, author="Ada L.") / "LICENSE").read_text()
    assert text.lstrip().startswith(first)
    assert text.endswith(last)
    year = time.strftime("%Y", time.gmtime())
    assert len(re.findall(rf"Copyright (?:\(c\) )?{year},? Ada L\.\n", text)) == 1


def test_without_a_licence_there_is_no_licence_file(bake):
    assert not (bake(license="none") / "LICENSE").exists()


@pytest.mark.parametrize("text", ODD.values(), ids=ODD.keys())
def test_odd_answers_arrive_unchanged(bake, text):
    project = bake(project_name=text, description=text, author=text)
    assert text in (project / "README.md").read_text(encoding="utf-8")
    assert text in (project / "LICENSE").read_text(encoding="utf-8")
    assert re.fullmatch(r"[a-z0-9]([a-z0-9-]{0,62}[a-z0-9])?", project.name)


def test_a_name_without_a_letter_still_gives_a_folder(bake):
    assert bake(project_name="!!!").name == "my-project"


def test_a_typed_answer_may_hold_the_delimiters(bake):
    odd = "a << b >> {% c <# d"
    out = bake.folder()
    done = bake.command(output_dir=out, answers=f"{odd}\nodd\n{odd}\n{odd}\n1\nnone\n")
    assert done.returncode == 0, done.stderr
    assert odd in (out / "odd" / "README.md").read_text()


def refused(bake, key, value):
    """Bake with a bad answer; return the one line that refuses it and the command it gives."""
    out = bake.folder()
    done = bake.command(f"{key}={value}", output_dir=out)
    assert done.returncode != 0
    assert list(out.iterdir()) == []
    lines = [line for line in done.stderr.splitlines() if line.startswith(f"ERROR: {key}")]
    assert len(lines) == 1
    assert done.stderr.startswith(lines[0])
    line, _, again = lines[0].partition("; run again: ")
    assert " must be " in line
    assert "for example" in line
    return line, shlex.split(again)


@pytest.mark.parametrize("slug", BAD_SLUGS, ids=ascii)
def test_a_bad_slug_is_refused_in_one_line_and_leaves_nothing(bake, slug):
    line, (program, template, answer) = refused(bake, "project_slug", slug)
    assert "A-Z a-z 0-9 - _ ." in line
    assert (program, template) == ("cookiecutter", str(bake.template))
    assert bake(project_slug=answer.removeprefix("project_slug=")).is_dir()


@pytest.mark.parametrize("slug", ["a", "A.b_c-9", "3d-nets", "a" * 64])
def test_a_good_slug_is_taken_as_it_is(bake, slug):
    assert bake(project_slug=slug).name == slug


@pytest.mark.parametrize("key", ["project_name", "description", "author"])
@pytest.mark.parametrize("value", ["two\nlines", "tab\t", "\x1b[31m", "a\u2028b"], ids=ascii)
def test_a_control_character_in_an_answer_is_refused(bake, key, value):
    refused(bake, key, value)


def test_a_bad_slug_never_touches_a_folder_that_was_there(bake):
    out = bake.folder()
    (out / "a b").mkdir()
    (out / "a b" / "mine.txt").write_text("mine")
    assert bake.command("-f", "project_slug=a b", output_dir=out).returncode != 0
    assert files_under(out) == ["a b/mine.txt"]


def test_the_project_is_the_template_folder_file_for_file(template, project):
    source = template / PROJECT
    assert files_under(project) == files_under(source)
    for name in set(files_under(source)) - RENDERED:
        assert (project / name).read_bytes() == (source / name).read_bytes(), name
        assert os.access(project / name, os.X_OK) == os.access(source / name, os.X_OK), name


def test_both_readmes_exist(template):
    assert (template / "README.md").is_file()
    assert (template / PROJECT / "README.md").is_file()


def test_no_jinja_is_left_in_a_project(bake):
    for license in ("MIT", "Apache-2.0", "BSD-3-Clause"):
        project = bake(license=license)
        for name in files_under(project):
            text = (project / name).read_text(encoding="utf-8", errors="replace")
            assert name.endswith(".npz") or not JINJA.search(text), name


def test_only_three_files_of_the_project_folder_hold_jinja(template):
    folder = template / PROJECT
    held = {
        name
        for name in files_under(folder)
        if not name.endswith(".npz") and JINJA.search((folder / name).read_text(encoding="utf-8"))
    }
    assert held <= RENDERED


def test_every_python_file_is_valid_before_it_is_rendered(template):
    files = sorted((template / PROJECT).rglob("*.py")) + sorted((template / "hooks").glob("*.py"))
    assert len(files) > 2
    for path in files:
        compile(path.read_text(encoding="utf-8"), str(path), "exec")


def test_the_hooks_stay_short_enough_to_read(template):
    for path in (template / "hooks").glob("*.py"):
        assert len(path.read_text().splitlines()) <= 60, path.name


def test_every_prompt_is_a_plain_sentence(template):
    context = json.loads((template / "cookiecutter.json").read_text())
    asked = [key for key in context if not key.startswith("_")]
    assert asked == [
        *("project_name", "project_slug", "description", "author", "license", "recipes"),
    ]
    assert list(context["__prompts__"]) == asked
    for sentence in context["__prompts__"].values():
        assert " " in sentence
        assert not set("[]<>{}") & set(sentence)


def test_a_fresh_clone_bakes_the_same_project(template, project, bake, tmp_path):
    origin, clone = tmp_path / "origin", tmp_path / "clone"
    git("clone", "--quiet", "--bare", str(_commit(template, tmp_path)), str(origin), cwd=tmp_path)
    git("clone", "--quiet", str(origin), str(clone), cwd=tmp_path)
    baked = bake(template=clone)
    assert files_under(baked) == files_under(project)
    for name in files_under(project):
        assert (baked / name).read_bytes() == (project / name).read_bytes(), name


def _commit(template, tmp_path):
    """Commit the clean copy into a repository of its own and return its folder."""
    repository = tmp_path / "repository"
    git("init", "--quiet", str(repository), cwd=tmp_path)
    there = ["--git-dir", str(repository / ".git"), "--work-tree", str(template)]
    git(*there, "add", ".", cwd=template)
    name = ["-c", "user.name=t", "-c", "user.email=t@example.com"]
    git(*there, *name, "commit", "--quiet", "-m", "all", cwd=template)
    return repository


def test_a_bake_with_hooks_refused_is_whole(project, bake):
    baked = bake(accept_hooks=False)
    assert files_under(baked) == files_under(project)
    assert not (baked / ".git").exists()
    unlicensed = bake(accept_hooks=False, license="none")
    assert "All rights reserved." in (unlicensed / "LICENSE").read_text()


def test_cookiecutter_2_6_bakes_the_same_project(project, bake):
    old = ROOT / "build" / "cookiecutter-2.6.0"
    if not old.is_dir():
        pytest.skip("build/cookiecutter-2.6.0 is not there: run make test once")
    version = subprocess.run(
        [sys.executable, "-c", "import cookiecutter; print(cookiecutter.__version__)"],
        env={**os.environ, "PYTHONPATH": str(old)},
        capture_output=True,
        text=True,
    )
    assert version.stdout == "2.6.0\n"
    out = bake.folder()
    done = bake.command(output_dir=out, PYTHONPATH=str(old))
    assert done.returncode == 0, done.stderr
    for name in files_under(project):
        assert (out / project.name / name).read_bytes() == (project / name).read_bytes(), name
    out = bake.folder()
    done = bake.command("project_slug=a/b", output_dir=out, PYTHONPATH=str(old))
    assert done.stderr.startswith("ERROR: project_slug 'a/b'")
    assert list(out.iterdir()) == []


def test_a_project_starts_as_a_repository_with_every_file_added(project):
    assert git("symbolic-ref", "HEAD", cwd=project) == "refs/heads/main\n"
    assert sorted(git("ls-files", cwd=project).splitlines()) == files_under(project)
    assert git("status", "--porcelain", "--ignored", cwd=project).count("\nA ") > 3
    assert "!!" not in git("status", "--porcelain", "--ignored", cwd=project)


def test_inside_a_repository_no_second_one_is_made(bake):
    out = bake.folder()
    git("init", "--quiet", cwd=out)
    assert not (bake(output_dir=out) / ".git").exists()
    assert git("ls-files", cwd=out) == ""


def test_a_repository_that_the_environment_names_is_left_alone(bake, monkeypatch):
    other = bake.folder()
    git("init", "--quiet", cwd=other)
    monkeypatch.setenv("GIT_DIR", str(other / ".git"))
    monkeypatch.setenv("GIT_INDEX_FILE", str(other / "index"))
    assert (bake() / ".git").is_dir()
    assert not (other / "index").exists()


def test_a_machine_without_git_gets_the_project_too(project, bake):
    out = bake.folder()
    done = bake.command(output_dir=out, PATH=str(bake.folder()))
    assert (done.returncode, done.stderr) == (0, "")
    assert files_under(out / project.name) == files_under(project)


def test_caches_of_a_working_copy_do_not_reach_a_project(template, project, bake):
    used = shutil.copytree(template, bake.home / "used")
    for name in ("__pycache__", ".pytest_cache", "plumbing/__pycache__", ".ruff_cache/0.9"):
        (used / PROJECT / name).mkdir(parents=True)
        (used / PROJECT / name / "litter").write_text("x")
    baked = bake(template=used)
    assert files_under(baked) == files_under(project)
    assert not [path for path in baked.rglob("*cache*") if ".git" not in path.parts]


def test_baking_over_a_project_keeps_its_repository_and_what_it_made(bake):
    out = bake.folder()
    project = bake(output_dir=out)
    for name in ("output/model.pth", ".venv/lib/__pycache__/a.pyc"):
        (project / name).parent.mkdir(parents=True)
        (project / name).write_text("mine")
    before = git("ls-files", "--stage", cwd=project)
    bake(output_dir=out, force=True)
    assert git("ls-files", "--stage", cwd=project) == before
    assert (project / "output/model.pth").read_text() == "mine"
    assert (project / ".venv/lib/__pycache__/a.pyc").read_text() == "mine"


def test_the_command_line_prints_the_next_steps(bake):
    out = bake.folder()
    done = bake.command(output_dir=out)
    assert (done.returncode, done.stderr) == (0, "")
    steps = done.stdout.splitlines()
    assert len(steps) <= 5
    assert steps[0] == f"cd {out / 'my-training-project'}"
    assert steps[1].startswith("make train ")
    assert "make test" in steps
    assert steps[3].startswith("make help ")
    here = bake.command(output_dir=bake.folder(), PWD=str(bake.home / f"bake{bake.count}"))
    assert here.stdout.startswith("cd my-training-project\n")


def test_no_file_of_the_template_is_ignored_by_git():
    assert git("ls-files", "-ci", "--exclude-standard", cwd=ROOT) == ""
    ignored = git("ls-files", "-oi", "--exclude-standard", PROJECT, "hooks", "tests", cwd=ROOT)
    made = {"__pycache__", ".pytest_cache", ".ruff_cache", ".mypy_cache", "output", ".venv"}
    assert [name for name in ignored.splitlines() if not made & set(name.split("/"))] == []
