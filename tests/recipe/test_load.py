"""Finding and parsing recipes: what is accepted, and how each mistake is answered."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from weightprep.errors import RecipeError
from weightprep.recipe import find_recipe, list_recipes, load_recipe, recipe_schema
from weightprep.recipe.load import recipe_directories
from weightprep.transforms import transforms

SHIPPED = {
    "glm_moe_dsa",
    "glm5_next",
    "deepseek_v3",
    "deepseek_v3_mxfp4",
    "kimi_k2",
    "kimi_k2_mxfp4",
    "glm4_moe_lite",
}
GLM = next(d for d in recipe_directories() if (d / "glm_moe_dsa.yaml").is_file()) / "glm_moe_dsa.yaml"


def write(directory: Path, text: str, name: str = "mine") -> Path:
    path = directory / f"{name}.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def glm_with(directory: Path, old: str, new: str) -> Path:
    text = GLM.read_text(encoding="utf-8").replace("name: glm_moe_dsa", "name: mine", 1)
    assert old in text
    return write(directory, text.replace(old, new, 1))


def test_what_ships() -> None:
    assert {recipe.name for recipe in list_recipes()} >= SHIPPED


@pytest.mark.parametrize("name", sorted(SHIPPED))
def test_a_recipe_is_the_same_by_name_and_by_path(name: str) -> None:
    assert load_recipe(name) == load_recipe(GLM.parent / f"{name}.yaml")


@pytest.mark.parametrize(
    ("architecture", "model_type", "name"),
    [
        ("GlmMoeDsaForCausalLM", "glm_moe_dsa", "glm_moe_dsa"),
        ("GlmMoeDsaForCausalLMNextN", None, "glm_moe_dsa"),
        ("DeepseekV2ForCausalLM", "deepseek_v2", "deepseek_v3"),
        ("DeepseekV3ForCausalLM", None, "deepseek_v3"),
        ("DeepseekV3ForCausalLM", "deepseek_v3", "deepseek_v3"),
        ("DeepseekV32ForCausalLM", "deepseek_v32", "deepseek_v3"),
        ("DeepseekV3ForCausalLM", "kimi_k2", "kimi_k2"),
        ("KimiK25ForConditionalGeneration", "kimi_k25", "kimi_k2"),
        ("Glm4MoeLiteForCausalLM", "glm4_moe_lite", "glm4_moe_lite"),
        ("Glm5NextForConditionalGeneration", "glm5_next", "glm5_next"),
    ],
)
def test_found_by_architecture(architecture: str, model_type: str | None, name: str) -> None:
    assert find_recipe(architecture, model_type).name == name


def test_an_unknown_architecture_lists_the_known_ones() -> None:
    with pytest.raises(RecipeError, match=r"(?s)LlamaForCausalLM: found no recipe.*GlmMoeDsaForCausalLM") as caught:
        find_recipe("LlamaForCausalLM")
    assert caught.value.exit_code == 2


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(RecipeError, match="glm_moe_dsa"):
        load_recipe("glm")


def test_a_users_directory_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = GLM.read_text(encoding="utf-8").replace("min_sqnr_db: 28", "min_sqnr_db: 20", 1)
    write(tmp_path, text, "glm_moe_dsa")
    shipped = load_recipe("glm_moe_dsa")
    monkeypatch.setenv("WEIGHTPREP_RECIPES", str(tmp_path))
    assert load_recipe("glm_moe_dsa").hash != shipped.hash
    assert {recipe.name for recipe in list_recipes()} >= SHIPPED
    assert [recipe.name for recipe in list_recipes()].count("glm_moe_dsa") == 1


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("schema: 1", "schema: 2", "schema"),
        ("schema: 1", "schema: 1\ncolour: red", "colour"),
        ("on: [decoder, nextn]", "on: [decoder, nextn]\n    colour: red", r"modules\.kv_b\.colour"),
        ("{format: e4m3fn, granularity: tensor}", "{format: e5m2}", r"store\[1\]\.quantize_fp8\.format"),
        ("{format: e4m3fn, granularity: tensor}", "{group: 32}", r"store\[1\]\.quantize_fp8\.group"),
        ("- quantize_fp8: {format: e4m3fn, granularity: tensor}", "- quantise: {}", r"store\[1\].*step 'quantise'"),
        ("- quantize_fp8: {format: e4m3fn, granularity: tensor}", "- quantize_fp8", "a step is a mapping"),
        ("      - dequantize: {}\n", "", r"store\[0\]: step quantize_fp8: found a whole weight"),
        ("      - split_kv_b: {}\n", "", r"load\[0\]: step e4m3_for_target: found a whole weight"),
        ("- dequantize: {}", "- split_kv_b: {}", r"store\[0\]: step split_kv_b"),
        ("on: [decoder, nextn]", "on: [decoder, encoder]", r"modules\.kv_b\.on: found encoder"),
        ("on: [decoder, nextn]", "on: []", r"modules\.kv_b\.on"),
        ("ensures: fp8_absorbed", "ensures: fp9", r"modules\.kv_b\.ensures: found fp9"),
        ("nope: qk_nope_head_dim", "qk_nope: qk_nope_head_dim", r"kv_b: step split_kv_b: found no nope under `dims`"),
        ("shape: [heads, nope, rank]", "shape: [heads, ropes, rank]", "the name 'ropes'"),
        ("shape: [heads, nope, rank]", "shape: [heads, nope ** 9, rank]", r"wanted names, integers and \+ - \* //"),
        ("shape: [heads, nope, rank]", "shape: [heads, '__import__(\"os\").getpid()', rank]", "wanted names, integers"),
        ("dtype: float8_e4m3fn", "dtype: float9", "w_kc.dtype"),
        ("strides: [nope * rank, 1, nope]", "strides: [nope * rank, 1]", r"w_kc: found .*one entry for each"),
        ("on: [decoder, nextn]", "on: [decoder, decoder]", r"modules\.kv_b: found .*a group of layers twice"),
        ("min_sqnr_db: 28", "min_sqnr_db: .nan", r"quality\.min_sqnr_db: found nan"),
        ("min_sqnr_db: 28", "min_sqnr_db: .inf", r"quality\.min_sqnr_db: found inf"),
        ("nope // 2]}", "nope // 2], finite: true}", r"contracts\.mxfp4_absorbed\.w_kc: found `finite`"),
        ('"{prefix}.self_attn.kv_b_proj"', '"self_attn.kv_b_proj"', r"must contain \{prefix\}"),
        ('"{prefix}.self_attn.kv_b_proj"', '"{prefix}.self_attn.{which}"', "and no other"),
        ('prefix: "model.layers.{i}"', 'prefix: "model.layers"', r"must contain \{i\}"),
        ("passes: [fp8_block", "passes: [fp8_row", "passes"),
        ("precision: fp8", "precision: fp8\n    precision: fp8", "repeated key"),
        ("description:", "description: &a", None),
        ("description: GLM", "description: *b GLM", "alias|undefined|while"),
    ],
)
def test_mistakes_are_named_by_file_and_key(tmp_path: Path, old: str, new: str, words: str | None) -> None:
    path = glm_with(tmp_path, old, new)
    if words is None:
        load_recipe(path)
        return
    with pytest.raises(RecipeError, match=f"(?s){words}") as caught:
        load_recipe(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    ("old", "new", "subject", "meant"),
    [
        ("architectures:", "architecture:", "architecture", "architectures"),
        ("schema: 1", "shema: 1", "shema", "schema"),
        ("    ensures:", "    ensure:", "modules.kv_b.ensure", "ensures"),
        ("alternatives:", "alternative:", "modules.kv_b.alternative", "alternatives"),
        ("count: num_hidden_layers", "counts: num_hidden_layers", "layers.decoder.counts", "count"),
        ("min_sqnr_db: 28", "min_sqnr: 28", "modules.kv_b.quality.min_sqnr", "min_sqnr_db"),
        ("strides: [nope", "stride: [nope", "contracts.fp8_absorbed.w_kc.stride", "strides"),
        ("- split_kv_b: {}", "- split_kvb: {}", "modules.kv_b.load[0]", "split_kv_b"),
        ("granularity: tensor", "granularty: tensor", "modules.kv_b.store[1].quantize_fp8.granularty", "granularity"),
    ],
)
def test_a_misspelt_key_is_answered_with_the_right_one(
    tmp_path: Path, old: str, new: str, subject: str, meant: str
) -> None:
    path = glm_with(tmp_path, old, new)
    with pytest.raises(RecipeError) as caught:
        load_recipe(path)
    assert caught.value.subject == f"{path}: {subject}"
    assert meant in caught.value.wanted.replace("one of ", "").split(", ")
    assert caught.value.remedy.startswith(f"did you mean {meant!r}? ")


def test_a_key_that_resembles_none_is_answered_with_all(tmp_path: Path) -> None:
    with pytest.raises(RecipeError) as caught:
        load_recipe(glm_with(tmp_path, "schema: 1", "schema: 1\ncolour: red"))
    assert "did you mean" not in caught.value.remedy
    assert {"schema", "name", "contracts"} <= set(caught.value.wanted.removeprefix("one of ").split(", "))


def test_a_misspelt_name_of_a_recipe() -> None:
    with pytest.raises(RecipeError, match="did you mean 'glm_moe_dsa'"):
        load_recipe("glm_moe_dsb")


@pytest.mark.parametrize(
    ("old", "new", "found", "wanted", "remedy"),
    [
        (
            "granularity: tensor",
            "granularity: tensr",
            "'tensr'",
            "'tensor', 'channel' or 'block'",
            "did you mean 'tensor'? ",
        ),
        ("passes: [fp8_block", "passes: [fp8_blok", "'fp8_blok'", "'bf16', ", "did you mean 'fp8_block'? "),
        ("min_sqnr_db: 28", "min_sqnr_db: much", "'much'", "a number", ""),
        ("on: [decoder, nextn]", "on: decoder", "'decoder'", "a list", ""),
        ("on: [decoder, nextn]", "on: []", "[]", "1 or more entries", ""),
        (
            "architectures: [GlmMoeDsaForCausalLM, GlmMoeDsaForCausalLMNextN]\n",
            "",
            "no such key",
            "the key",
            "add it; ",
        ),
    ],
)
def test_a_wrong_value_is_answered_in_plain_words(
    tmp_path: Path, old: str, new: str, found: str, wanted: str, remedy: str
) -> None:
    with pytest.raises(RecipeError) as caught:
        load_recipe(glm_with(tmp_path, old, new))
    assert caught.value.found == found
    assert caught.value.wanted.startswith(wanted)
    assert caught.value.remedy.startswith(remedy)


@pytest.mark.parametrize(
    ("text", "place", "found"),
    [
        ("schema: 1\n name: mine\n", "line 2, column 6", "mapping values are not allowed here"),
        ("schema: 1\nname: [mine\n", "line 3, column 1", "expected ',' or ']', but got '<stream end>'"),
        ("a: &x 1\nb: *x\n", "line 2, column 4", "an alias, which a recipe may not have"),
        ("a: 1\na: 2\n", "line 1, column 1", "a repeated key"),
        ("a: \x07\n", "character 4", "special characters are not allowed"),
    ],
)
def test_yaml_that_is_none_is_told_by_line_and_column(tmp_path: Path, text: str, place: str, found: str) -> None:
    path = write(tmp_path, text)
    with pytest.raises(RecipeError) as caught:
        load_recipe(path)
    assert caught.value.subject == f"{path}: {place}"
    assert caught.value.found == found


@pytest.mark.parametrize("content", [b"schema: [1\n", b"\xff\n", b"schema: 1\narchitectures: [OtherForCausalLM]\n"])
def test_a_broken_file_stops_no_other_architecture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes
) -> None:
    (tmp_path / "broken.yaml").write_bytes(content)
    monkeypatch.setenv("WEIGHTPREP_RECIPES", str(tmp_path))
    assert find_recipe("GlmMoeDsaForCausalLM").name == "glm_moe_dsa"
    with pytest.raises(RecipeError, match="no recipe for it"):
        find_recipe("LlamaForCausalLM")
    with pytest.raises(RecipeError, match=r"broken\.yaml"):
        load_recipe("broken")
    with pytest.raises(RecipeError, match=r"broken\.yaml"):
        list_recipes()


def test_a_broken_file_that_may_be_meant_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken.yaml").write_text("schema: 1\narchitectures: [GlmMoeDsaForCausalLM]\ncolour: red\n")
    monkeypatch.setenv("WEIGHTPREP_RECIPES", str(tmp_path))
    with pytest.raises(RecipeError, match=r"broken\.yaml"):
        find_recipe("GlmMoeDsaForCausalLM")
    assert find_recipe("DeepseekV3ForCausalLM").name == "deepseek_v3"


@pytest.mark.parametrize("text", ["", "- a\n- b\n", "1: 2\n", "{", "\x00", "a: !!python/object/apply:os.getpid []\n"])
def test_what_is_no_recipe(tmp_path: Path, text: str) -> None:
    with pytest.raises(RecipeError, match=r"mine\.yaml"):
        load_recipe(write(tmp_path, text))


def test_deep_nesting_and_size_are_bounded(tmp_path: Path) -> None:
    with pytest.raises(RecipeError):
        load_recipe(write(tmp_path, "a: " + "[" * 20_000))
    with pytest.raises(RecipeError, match="1 MiB"):
        load_recipe(write(tmp_path, "a: " + "b" * (1 << 20)))


def test_a_missing_file_and_a_misnamed_one(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"absent\.yaml"):
        load_recipe(tmp_path / "absent.yaml")


@pytest.mark.parametrize(
    ("make", "found"),
    [
        (lambda path: None, "No such file or directory"),
        (os.mkfifo, "no regular file"),
        (Path.mkdir, "no regular file"),
        (lambda path: path.write_bytes(b"#" * (2**20 + 1)), "a file of more than 1 MiB"),
    ],
)
def test_only_a_regular_file_of_moderate_size_is_read(
    tmp_path: Path, make: Callable[[Path], object], found: str
) -> None:
    path = tmp_path / "mine.yaml"
    make(path)
    with pytest.raises(RecipeError) as caught:
        load_recipe(path)
    assert (caught.value.subject, caught.value.found) == (str(path), found)
    with pytest.raises(RecipeError, match="wanted other, the file's name"):
        load_recipe(write(tmp_path, GLM.read_text(encoding="utf-8"), "other"))


def test_nothing_to_convert_needs_a_reason(tmp_path: Path) -> None:
    text = "schema: 1\nname: mine\narchitectures: [A]\n"
    with pytest.raises(RecipeError, match="nothing_to_convert"):
        load_recipe(write(tmp_path, text))
    recipe = load_recipe(write(tmp_path, text + "nothing_to_convert: A has no kv_b_proj\n"))
    assert recipe.nothing_to_convert == "A has no kv_b_proj"


def test_the_hash_is_that_of_the_content(tmp_path: Path) -> None:
    one = load_recipe(glm_with(tmp_path, "schema: 1\n", "# a comment\nschema: 1\n")).hash
    two = load_recipe(glm_with(tmp_path, "schema: 1\nname: mine\n", "name: mine\nschema: 1\n")).hash
    other = load_recipe(glm_with(tmp_path, "min_sqnr_db: 28", "min_sqnr_db: 27")).hash
    assert one == two != other


def test_recipes_are_frozen() -> None:
    with pytest.raises(ValueError, match="frozen"):
        load_recipe("glm_moe_dsa").name = "other"  # type: ignore[misc]


@pytest.mark.parametrize("name", sorted(SHIPPED))
def test_shipped_recipes_say_nothing_twice(name: str) -> None:
    document = yaml.safe_load((GLM.parent / f"{name}.yaml").read_text(encoding="utf-8"))
    assert len(document["architectures"]) == len(set(document["architectures"]))


@pytest.mark.parametrize("name", sorted(SHIPPED))
def test_what_show_prints_is_the_recipe(tmp_path: Path, name: str) -> None:
    recipe = load_recipe(name)
    printed = yaml.safe_dump(recipe.model_dump(mode="json", by_alias=True), sort_keys=False)
    assert load_recipe(write(tmp_path, printed, name)) == recipe


def test_the_schema_knows_every_step_and_refuses_what_is_not_one() -> None:
    step = recipe_schema()["$defs"]["StepPart"]
    assert set(step["properties"]) == set(transforms())
    assert step["properties"]["quantize_fp8"]["properties"]["granularity"]["enum"] == ["tensor", "channel", "block"]
    assert step["additionalProperties"] is False
    assert (step["minProperties"], step["maxProperties"]) == (1, 1)
    module = recipe_schema()["$defs"]["ModulePart"]
    assert {"source", "on", "store", "load", "ensures"} <= set(module["properties"])


@pytest.mark.parametrize("name", ["nosuch", "file"])
def test_a_directory_of_recipes_that_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("WEIGHTPREP_RECIPES", str(tmp_path / name))
    for look in (list_recipes, lambda: load_recipe("glm_moe_dsa"), lambda: find_recipe("GlmMoeDsaForCausalLM")):
        with pytest.raises(RecipeError) as caught:
            look()
        assert caught.value.subject == f"WEIGHTPREP_RECIPES={tmp_path / name}"
