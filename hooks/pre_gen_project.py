"""Refuse, in one line and before a file is written, an answer that cannot become a project."""

import json
import re
import shlex
import sys

# A JSON list in a raw string: no quote, backslash or letter in an answer can break this source.
# The slug is the one asked for: cookiecutter.json has turned "/", "", "." and ".." in project_slug
# into a folder of its own, so that a refusal leaves no parent folder and meets no existing one.
TEMPLATE, SLUG, RECIPES, KNOWN_RECIPES, ANSWERS = json.loads(
    r"""<< [cookiecutter._template, cookiecutter.__asked_slug, cookiecutter.recipes,
    cookiecutter._recipes, {"project_name": cookiecutter.project_name,
    "description": cookiecutter.description, "author": cookiecutter.author,
    "recipes": cookiecutter.recipes}] | jsonify >>"""
)


def refuse(key, value, rule, example):
    """Leave with the one line; cookiecutter then removes the folder that it made."""
    again = shlex.join(["cookiecutter", TEMPLATE, f"{key}={example}"])
    sys.exit(f"ERROR: {key} {ascii(value)} {rule}, for example {example}; run again: {again}")


for key, value in ANSWERS.items():
    if re.search(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]", value):
        plain = " ".join(re.sub(r"[^ -~]", " ", value).split()) or "Plain text"
        refuse(key, value, "must be one line without control characters", plain)

if not re.fullmatch(r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,62}[A-Za-z0-9])?", SLUG):
    good = re.sub(r"[^A-Za-z0-9._]+", "-", SLUG).strip("-._")[:64].strip("-._") or "my-project"
    rule = "must be 1 to 64 of A-Z a-z 0-9 - _ . and start and end with a letter or a digit"
    refuse("project_slug", SLUG, rule, good)

for name in RECIPES.split():
    if name not in KNOWN_RECIPES and RECIPES.split() != ["none"]:
        known = " ".join(sorted(KNOWN_RECIPES)) or "none"
        refuse("recipes", name, f"must be some of these names: {known}", known.split()[0])
