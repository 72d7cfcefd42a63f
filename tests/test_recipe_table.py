"""recipes/README.md: its table is that of the patches, and what it names is there."""

import ast
import functools
import json
import os
import re
import subprocess
import sys
from typing import NamedTuple

import pytest
import recipe_table
import recipes
import torch

PAGE = recipe_table.PAGE.read_text(encoding="utf-8")
TABLES = PAGE[PAGE.index(recipe_table.END) :]
DEFAULTS = (recipes.PROJECT / "defaults.py").read_text(encoding="utf-8")
PARITY = (recipes.ROOT / "tests" / "parity.md").read_text(encoding="utf-8")
RUN = """
    -m torch.distributed.run --standalone --nproc_per_node 2 train.py --config cfg.yaml
    MODEL.DEVICE cpu SOLVER.MAX_ITER 6 SOLVER.WARMUP_ITERS 2 LOG_PERIOD 1 TEST.EVAL_PERIOD 3
    SOLVER.AMP.ENABLED True SOLVER.AMP.DTYPE float16 TEST.BEST_METRIC
"""
EDITS = re.findall(r"^```diff\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)


def settings_in(text):
    """Dotted names of the settings that a text assigns, as defaults.py does."""
    return set(re.findall(r"^\+?_C\.([A-Z0-9_.]+) = (?!CfgNode)", text, re.MULTILINE))


@functools.cache
def settings():
    """The settings of a project, and those of all recipes."""
    names = settings_in(DEFAULTS)
    for name in recipes.names():
        names |= settings_in((recipes.RECIPES / f"{name}.patch").read_text(encoding="utf-8"))
    return names


def test_the_table_is_that_of_the_patches():
    # test_each_recipe.py checks the last column: it tries all pairs.
    written = recipe_table.table(recipes.conflicts_in_table())
    assert recipe_table.present_table(PAGE) == written, "run: python tests/recipe_table.py"


def test_a_change_of_a_patch_changes_its_row(tmp_path, monkeypatch):
    patch = tmp_path / "some.patch"
    patch.write_text(
        "some: Do something.\n\nWhat: ...\n\n"
        "diff --git a/train.py b/train.py\nindex 1..2 100644\n--- a/train.py\n+++ b/train.py\n"
        "@@ -1 +1,2 @@\n-one\n+two\n+three\n"
        "diff --git a/new.py b/new.py\nnew file mode 100644\nindex 0..1\n--- /dev/null\n"
        "+++ b/new.py\n@@ -0,0 +1 @@\n+one\n"
        "diff --git a/tests/test_some.py b/tests/test_some.py\nnew file mode 100644\n"
        "--- /dev/null\n+++ b/tests/test_some.py\n@@ -0,0 +1 @@\n+one\n"
    )
    monkeypatch.setattr(recipes, "RECIPES", tmp_path)
    row = recipe_table.row_of("some", {("some", "zeta"), ("alpha", "some"), ("alpha", "zeta")})
    assert row == "| `some` | Do something | train.py, new.py (new) | +2 -1 | alpha, zeta |"


def test_every_setting_that_the_tables_name_exists():
    named = set(re.findall(r"\b[A-Z][A-Z0-9]*_?[A-Z0-9_]*(?:\.[A-Z0-9_]+)+\b", TABLES))
    # Settings of other systems stand in the left columns.
    left = {"MODEL.BACKBONE.FREEZE_AT", "MODEL.SYNC_BN"}
    assert named - settings() - left == set()


def recipes_to_come():
    """The recipes that parity.md lists as not there yet."""
    (line,) = re.findall(r"^recipes still to come: (.*)$", PARITY, re.MULTILINE)
    return set(line.split()) - {"none"}


def test_every_recipe_that_the_tables_name_exists():
    named = set()
    for words in re.findall(r"\brecipes? ((?:`\w+`(?:,| and)? ?)+)", TABLES):
        named.update(re.findall(r"`(\w+)`", words))
    assert len(named) > 25
    assert named - set(recipes.names()) - recipes_to_come() == set()


def test_every_recipe_is_in_a_row_of_the_tables_or_needs_none():
    # These change the task, or nobody else has a hook for them.
    needs_none = {
        *("calibration", "char_language_model", "contrastive", "detection_toy", "distillation"),
        *("image_folder", "misclassified", "mixup", "segmentation", "token_mean", "fsdp"),
    }
    named = set(re.findall(r"`(\w+)`", TABLES))
    assert set(recipes.names()) - named - needs_none == set()


def test_every_link_leads_to_a_heading():
    headings = re.findall(r"^#+ (.*)$", PAGE, re.MULTILINE)
    anchors = {re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings}
    assert set(re.findall(r"\]\(#(.*?)\)", PAGE)) <= anchors


def test_each_place_of_a_hook_is_a_line_of_the_loop():
    source = (recipes.PROJECT / "train.py").read_text(encoding="utf-8")
    for line in (
        "set_random_state(cfg.SEED, iteration, comm.get_rank())",
        "scaler.unscale_(optimizer)",
        "scaler.step(optimizer)",
        "scheduler.step()",
        "is_due(iteration, max_iter, eval_period)",
    ):
        assert line in source
        assert line.partition("(")[0] in PAGE
    places = PAGE.partition("## The places of a hook")[2].partition("\n## ")[0]
    for hook in ("before_train", "after_train", "after_train_epoch", "after_backward"):
        assert f"`{hook}`" in places


def applied(edit, texts):
    """The texts of the root files, {path: text}, after an edit is made by hand."""
    texts = dict(texts)
    for part in re.split(r"^--- a/", edit, flags=re.MULTILINE)[1:]:
        path, *hunks = re.split(r"\n@@\n", part)
        path = path.partition("\n")[0]
        for hunk in hunks:
            lines = hunk.rstrip("\n").split("\n")
            old = "\n".join(line[1:] for line in lines if line[:1] != "+")
            new = "\n".join(line[1:] for line in lines if line[:1] != "-")
            if old:
                assert f"\n{texts[path]}".count(f"\n{old}\n") == 1, (path, old)
                texts[path] = f"\n{texts[path]}".replace(f"\n{old}\n", f"\n{new}\n")[1:]
    return texts


@functools.cache
def root_files():
    return {path.name: path.read_text(encoding="utf-8") for path in recipes.PROJECT.glob("*.py")}


@pytest.mark.parametrize("edit", EDITS, ids=range(len(EDITS)))
def test_a_small_edit_fits_the_files_as_they_are(edit):
    changed = applied(edit, root_files())
    assert changed != root_files()
    for text in changed.values():
        ast.parse(text)


# A line of data.py in RandomShift.
NOTE_SHIFT = """\
        with open("shifts" + os.environ["RANK"], "a") as file:
            file.write(f"{self.max_shift} ")
"""


class EditedRun(NamedTuple):
    """What a training on two ranks left, with all small edits at once."""

    printed: str
    log: str
    rows: list  # of metrics.json
    shifts: list  # of each rank: by how much each image of the training could be shifted
    checkpoint: dict


@pytest.fixture(scope="module")
def edited_run(tmp_path_factory):
    texts = root_files()
    for edit in EDITS:
        texts = applied(edit, texts)
    # What cannot be seen from outside is printed.
    texts["train.py"] = texts["train.py"].replace("change = 500", "change = 3")
    texts["train.py"] = texts["train.py"].replace(
        "torch.cuda.empty_cache()", 'print("emptied", flush=True)'
    )
    # Each rank has a file of its own: two that print at once mix their lines.
    texts["data.py"] = texts["data.py"].replace(
        "        height, width = image", f"{NOTE_SHIFT}        height, width = image"
    )
    project = recipes.make_project(tmp_path_factory.mktemp("edited"))
    for name, text in texts.items():
        (project / name).write_text(text, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, *RUN.split(), ""],
        cwd=project,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    output = project / "output"
    return EditedRun(
        done.stdout,
        (output / "log.txt").read_text(),
        [json.loads(row) for row in (output / "metrics.json").open()],
        [(project / f"shifts{rank}").read_text().split() for rank in range(2)],
        torch.load(output / "model_final.pth", weights_only=True),
    )


def test_results_of_an_evaluation_before_the_training_are_in_the_log(edited_run):
    assert "Results on digits_test" in edited_run.log.partition("iter: 0 ")[0]


def test_an_evaluation_takes_the_first_samples_only(edited_run):
    assert "Evaluated 100 samples of digits_test" in edited_run.log


def test_the_cache_is_emptied_before_each_evaluation(edited_run):
    evaluations = 2
    ranks = 2
    assert edited_run.printed.count("emptied") == evaluations * ranks


def test_the_learning_rates_of_all_groups_are_logged(edited_run):
    last = edited_run.rows[-1]
    assert last["lr/0"] == last["lr/1"] == last["lr"]


def test_the_epoch_is_shown_in_the_log(edited_run):
    assert edited_run.rows[-1]["[metric]epoch"] == pytest.approx(6 * 64 / 1437)
    assert "[metric]epoch: 0.267" in edited_run.log


def test_parameters_without_a_gradient_are_named_in_the_log(edited_run):
    assert "Without a gradient: none" in edited_run.log


def test_other_data_come_from_an_iteration_on(edited_run):
    iterations = 3
    of_a_rank = 64 // 2
    for shifts in edited_run.shifts:
        assert shifts == ["1"] * iterations * of_a_rank + ["0"] * iterations * of_a_rank


def test_the_learning_rate_is_held_through_each_epoch_after_the_warm_up(edited_run):
    assert [row["lr"] for row in edited_run.rows[2:]] == [0.1] * 4


def test_a_warm_up_may_stay_at_the_factor(edited_run):
    assert [row["lr"] for row in edited_run.rows[:2]] == pytest.approx([0.0001] * 2)


def test_the_first_loss_scale_is_ones_own(edited_run):
    assert edited_run.checkpoint["scaler"]["scale"] == 512.0


def test_two_ranks_train_while_gradients_are_sent_as_float16(edited_run):
    losses = [row["total_loss"] for row in edited_run.rows]
    assert len(losses) == 6
    assert losses[-1] < losses[0]
