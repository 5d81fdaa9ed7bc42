"""Steps as declarations: parameters, forms, other packages' steps, and steps that do not keep their word."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from sources import source

from weightprep.errors import CheckpointError, RecipeError
from weightprep.formats import Encoding
from weightprep.transforms import Bundle, Form, Step, StepContext, Transform, make_step, registry, run_steps, transform
from weightprep.transforms.bundle import FLOATS


@transform(requires=Form(False, FLOATS), ensures=Form(False, frozenset({Encoding.MXFP4})))
def liar(bundle: Bundle, context: StepContext, *, times: int = 1) -> Bundle:
    """Says that it makes MXFP4, and does not."""
    return bundle


@transform(requires=Form(False, FLOATS), ensures=lambda given: given, already=lambda bundle, context: bundle)
def doubled(bundle: Bundle, context: StepContext) -> Bundle:
    """Double a weight, which every weight is already."""
    return Bundle({"weight": bundle["weight"] * 2}, bundle.encoded)


class EntryPoint:
    """What importlib.metadata gives for one entry point."""

    def __init__(self, loaded: object) -> None:
        self.name, self.value, self.loaded = "theirs", "package:theirs", loaded

    def load(self) -> object:
        return self.loaded


@pytest.fixture
def fresh_registry(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[EntryPoint]]:
    entries: list[EntryPoint] = []
    monkeypatch.setattr(registry, "entry_points", lambda group: entries if group == "weightprep.transforms" else [])
    registry.transforms.cache_clear()
    yield entries
    registry.transforms.cache_clear()


def test_another_packages_step_is_found(fresh_registry: list[EntryPoint]) -> None:
    fresh_registry.append(EntryPoint(liar))
    assert make_step("liar", {"times": 3}, "here").params == {"times": 3}


@pytest.mark.parametrize("loaded", [transform(requires=Form(False, FLOATS), ensures=lambda g: g), print])
def test_what_another_package_may_not_declare(fresh_registry: list[EntryPoint], loaded: object) -> None:
    def dequantize(bundle: Bundle, context: StepContext) -> Bundle:
        return bundle

    fresh_registry.append(EntryPoint(loaded(dequantize) if loaded is not print else loaded))
    with pytest.raises(RecipeError, match="entry point theirs = package:theirs"):
        registry.transforms()


def test_a_step_that_makes_something_else_is_caught() -> None:
    step = Step(liar, {"times": 1})
    with pytest.raises(RecipeError, match=r"(?s)layer\.weight: step liar.*wanted a whole weight in mxfp4"):
        run_steps([step], source(Encoding.BF16, 4, 32), StepContext(name="layer.weight"))


def test_a_pipeline_starts_behind_the_last_step_whose_result_it_was_given() -> None:
    bundle = source(Encoding.BF16, 4, 32)
    step = Step(doubled, {})
    assert torch.equal(run_steps([step, step], bundle, StepContext())["weight"], bundle["weight"])


@pytest.mark.parametrize(
    ("params", "words"),
    [({"granularity": "row"}, r"here\.quantize_fp8\.granularity"), ({"size": 3}, "size"), ({"format": 1}, "format")],
)
def test_parameters_are_checked(params: dict[str, object], words: str) -> None:
    with pytest.raises(RecipeError, match=words):
        make_step("quantize_fp8", params, "here")


def test_bundles_are_frozen_and_know_their_roles() -> None:
    bundle = source(Encoding.BF16, 4, 32)
    with pytest.raises(TypeError):
        bundle.tensors["weight"] = torch.zeros(1)  # type: ignore[index]
    with pytest.raises(CheckpointError, match="bundle role w_qc"):
        Bundle({"w_qc": torch.zeros(1)}, bundle.encoded)


def test_declarations_are_documented() -> None:
    for known in registry.transforms().values():
        assert isinstance(known, Transform)
        assert known.doc.endswith(".")
