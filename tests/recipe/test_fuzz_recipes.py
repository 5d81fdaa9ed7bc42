"""Hostile and broken recipes: whatever the file says, only a RecipeError comes out of reading and resolving it."""

from __future__ import annotations

import contextlib
import copy
from pathlib import Path

import pytest
import yaml
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from weightprep.checkpoint.config import read_config
from weightprep.errors import WeightprepError
from weightprep.recipe import load_recipe, recipe_directories, resolve
from weightprep.synth import synthesize

GLM = next(d for d in recipe_directories() if (d / "glm_moe_dsa.yaml").is_file()) / "glm_moe_dsa.yaml"
TEXT = GLM.read_text(encoding="utf-8")
DOCUMENT = yaml.safe_load(TEXT.replace("\n    on:", "\n    'on':"))

fuzzed = settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=12)
    | st.sampled_from(["{prefix}", "{i}", "heads", "heads//0", "9**9**9", "1+", "../x", "fp8", "e4m3fn", "\0", "nextn"])
)
values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3)
)


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    return dict(read_config(synthesize(tmp_path_factory.mktemp("model") / "src", layers=1, shards=1)).raw)


def use(folder: Path, text: bytes, config: dict[str, object]) -> None:
    path = folder / "glm_moe_dsa.yaml"
    path.write_bytes(text)
    with contextlib.suppress(WeightprepError):
        plan = resolve(load_recipe(path), config)
        for name in plan.recipe.contracts:
            plan.contract(name)


@fuzzed
@given(st.binary(max_size=80) | st.text(max_size=80).map(str.encode))
@example(b"a: 2001-99-99")
@example(b"a: " + b"9" * 5000)
@example(b"a: 0x")
@example(b"a: 1:99:99")
@example(b"a: .inf")
@example(b"? [a]\n: b")
@example(b"&a [*a]")
@example(b"!!python/object/apply:os.system [id]")
@example(b"[" * 10_000)
@example(b"\xff\xfe")
def test_any_text(tmp_path: Path, config: dict[str, object], text: bytes) -> None:
    use(tmp_path, text, config)


@fuzzed
@given(st.integers(0, len(TEXT) - 1), st.integers(0, 20), st.text(max_size=6))
def test_damaged_text(tmp_path: Path, config: dict[str, object], start: int, count: int, text: str) -> None:
    use(tmp_path, (TEXT[:start] + text + TEXT[start + count :]).encode(), config)


def paths(node: object, here: tuple[object, ...] = ()) -> list[tuple[object, ...]]:
    found = [here] if here else []
    items = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    for key, value in items:
        found += paths(value, (*here, key))
    return found


@fuzzed
@given(st.sampled_from(paths(DOCUMENT)), values)
def test_one_value_replaced(tmp_path: Path, config: dict[str, object], path: tuple[object, ...], value: object) -> None:
    """A recipe that is right but for one value, at any depth."""
    document = copy.deepcopy(DOCUMENT)
    *way, last = path
    node = document
    for key in way:
        node = node[key]
    node[last] = value
    use(tmp_path, yaml.safe_dump(document, sort_keys=False).encode(), config)


@fuzzed
@given(st.data())
def test_one_value_of_the_config_replaced(tmp_path: Path, config: dict[str, object], data: st.DataObject) -> None:
    key = data.draw(st.sampled_from(sorted(config)))
    use(tmp_path, TEXT.encode(), {**config, key: data.draw(values)})
