"""Expressions in recipes: arithmetic, and nothing that could do anything else."""

from __future__ import annotations

import pytest

from weightprep.errors import RecipeError
from weightprep.recipe.expression import evaluate, names_in

NAMES = {"heads": 64, "nope": 192}


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        (7, 7),
        ("heads", 64),
        ("nope // 32 * heads", 384),
        ("heads * (nope + 256)", 28672),
        ("heads - nope", -128),
        ("7//2", 3),
    ],
)
def test_values(expression: str | int, value: int) -> None:
    assert evaluate(expression, NAMES, "here") == value


@pytest.mark.parametrize(
    "expression",
    [
        "heads ** 2",
        "heads / 2",
        "-heads",
        "heads.real",
        "f()",
        "heads[0]",
        "1.5",
        "'a'",
        "True",
        "",
        "1 +",
        "a := 1",
        "None",
        "lambda: 1",
        "1 if heads else 2",
        "heads < 2",
        "[1]",
        "1" * 300,
        "2 * " * 60 + "2",
    ],
)
def test_anything_else_is_refused(expression: str) -> None:
    with pytest.raises(RecipeError, match="here"):
        evaluate(expression, NAMES, "here")


@pytest.mark.parametrize(
    ("expression", "words"),
    [("rank", "the name 'rank'"), ("heads // (nope - 192)", "division by zero"), ("99999999 * 99999999", "2\\^48")],
)
def test_values_that_cannot_be(expression: str, words: str) -> None:
    with pytest.raises(RecipeError, match=words):
        evaluate(expression, NAMES, "here")


def test_names() -> None:
    assert names_in("a * (b + a) // 3", "here") == {"a", "b"}
