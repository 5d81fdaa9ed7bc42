"""Each thing that can be wrong with a source or a destination: a clear error, exit code 2, no destination."""

from __future__ import annotations

import json
import os
import shutil
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from weightprep.cli import app
from weightprep.convert.journal import journaled_files
from weightprep.synth import synthesize

KV_B = "model.layers.1.self_attn.kv_b_proj"


@pytest.fixture(scope="module")
def bf16(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return synthesize(tmp_path_factory.mktemp("bf16") / "src", shards=2)


@pytest.fixture(scope="module")
def fp8(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return synthesize(tmp_path_factory.mktemp("fp8") / "src", shards=2, encoding="fp8_block")


def index_of(root: Path) -> dict[str, object]:
    return json.loads((root / "model.safetensors.index.json").read_text())


def edit_index(root: Path, change: Callable[[dict[str, str]], object]) -> None:
    index = json.loads((root / "model.safetensors.index.json").read_text())
    change(index["weight_map"])
    (root / "model.safetensors.index.json").write_text(json.dumps(index))


def edit_config(root: Path, change: Callable[[dict[str, object]], object]) -> None:
    config = json.loads((root / "config.json").read_text())
    change(config)
    (root / "config.json").write_text(json.dumps(config))


def shard_of(root: Path, name: str) -> Path:
    return root / index_of(root)["weight_map"][name]  # type: ignore[index]


def edit_tensor(root: Path, name: str, change: Callable[[torch.Tensor], torch.Tensor | None]) -> None:
    path = shard_of(root, name)
    tensors = load_file(path)
    changed = change(tensors.pop(name))
    if changed is not None:
        tensors[name] = changed
    save_file(tensors, path, metadata={"format": "pt"})


def set_value(root: Path, name: str, value: float) -> None:
    def change(tensor: torch.Tensor) -> torch.Tensor:
        tensor.view(-1)[7] = value
        return tensor

    edit_tensor(root, name, change)


def no_index(root: Path) -> None:
    (root / "model.safetensors.index.json").unlink()


def absent_shard(root: Path) -> None:
    edit_index(root, lambda weight_map: weight_map.update({"model.norm.weight": "model-00009-of-00009.safetensors"}))


def not_in_shard(root: Path) -> None:
    edit_index(root, lambda weight_map: weight_map.update({"model.extra.weight": "model-00001-of-00002.safetensors"}))


def not_in_index(root: Path) -> None:
    edit_index(root, lambda weight_map: weight_map.pop("model.norm.weight"))


def truncated(root: Path) -> None:
    path = root / "model-00001-of-00002.safetensors"
    os.truncate(path, path.stat().st_size - 1)


def header_too_long(root: Path) -> None:
    path = root / "model-00001-of-00002.safetensors"
    path.write_bytes(struct.pack("<Q", 2**40) + path.read_bytes()[8:])


def lfs_pointer(root: Path) -> None:
    text = "version https://git-lfs.github.com/spec/v1\noid sha256:" + "0" * 64 + "\nsize 5\n"
    (root / "model-00001-of-00002.safetensors").write_text(text)


def no_scale(root: Path) -> None:
    edit_tensor(root, f"{KV_B}.weight_scale_inv", lambda tensor: None)
    edit_index(root, lambda weight_map: weight_map.pop(f"{KV_B}.weight_scale_inv"))


def floor_divided_scale(root: Path) -> None:
    edit_tensor(root, f"{KV_B}.weight_scale_inv", lambda tensor: tensor[:-1].contiguous())


def nan_scale(root: Path) -> None:
    set_value(root, f"{KV_B}.weight_scale_inv", float("nan"))


def inf_weight(root: Path) -> None:
    set_value(root, f"{KV_B}.weight", float("inf"))


def nan_weight(root: Path) -> None:
    set_value(root, f"{KV_B}.weight", float("nan"))


def unknown_architecture(root: Path) -> None:
    edit_config(root, lambda config: config.update(architectures=["MambaForCausalLM"]))


def no_dims(root: Path) -> None:
    edit_config(root, lambda config: config.pop("qk_nope_head_dim"))


def other_dims(root: Path) -> None:
    edit_config(root, lambda config: config.update(num_attention_heads=16))


def no_config(root: Path) -> None:
    (root / "config.json").unlink()


def missing_layer_weight(root: Path) -> None:
    edit_tensor(root, f"{KV_B}.weight", lambda tensor: None)
    edit_index(root, lambda weight_map: weight_map.pop(f"{KV_B}.weight"))


def pickle_only(root: Path) -> None:
    for path in root.glob("*.safetensors"):
        path.rename(path.with_suffix(".bin"))
    no_index(root)


def index_escapes(root: Path) -> None:
    edit_index(root, lambda weight_map: weight_map.update({"model.norm.weight": "../../etc/passwd"}))


def unquantized_method(root: Path) -> None:
    edit_config(root, lambda config: config.update(quantization_config={"quant_method": "modelopt"}))


BAD = [
    ("bf16", no_index, "and no model.safetensors.index.json"),
    ("bf16", absent_shard, "model-00009-of-00009.safetensors: found no such .safetensors file"),
    ("bf16", not_in_shard, "no shard has it"),
    ("bf16", not_in_index, "a tensor that the index does not name"),
    ("bf16", truncated, "the file is truncated"),
    ("bf16", header_too_long, "a header length of 1099511627776 bytes"),
    ("bf16", lfs_pointer, "a Git LFS pointer"),
    ("fp8", no_scale, f"{KV_B}.weight"),
    ("fp8", floor_divided_scale, f"{KV_B}.weight"),
    ("fp8", nan_scale, f"{KV_B}.weight: found scale nan"),
    ("bf16", inf_weight, f"{KV_B}.weight: found a NaN or an infinity"),
    ("bf16", nan_weight, f"{KV_B}.weight: found a NaN or an infinity"),
    ("bf16", unknown_architecture, "architecture MambaForCausalLM: found no recipe"),
    ("bf16", no_dims, "qk_nope_head_dim"),
    ("bf16", other_dims, "heads 16"),
    ("bf16", no_config, "config.json"),
    ("bf16", missing_layer_weight, "3 of 4 modules"),
    ("bf16", pickle_only, "weights in a pickle only"),
    ("bf16", index_escapes, "'../../etc/passwd'"),
    ("bf16", unquantized_method, "--layout sidecar"),
]


@pytest.mark.parametrize(("base", "spoil", "said"), [pytest.param(*bad, id=bad[1].__name__) for bad in BAD])
def test_bad_source(
    request: pytest.FixtureRequest, tmp_path: Path, base: str, spoil: Callable[[Path], None], said: str
) -> None:
    source = tmp_path / "src"
    shutil.copytree(request.getfixturevalue(base), source)
    spoil(source)

    result = CliRunner().invoke(app, ["convert", str(source), str(tmp_path / "dst"), "--requantize"])

    assert result.exit_code == 2
    assert said in result.stderr
    assert "\n  -> " in result.stderr
    assert not (tmp_path / "dst").exists()
    # A shard that another worker had finished by then stays, and is told of.
    partial = tmp_path / "dst.partial"
    assert partial.exists() == (f"{partial}: " in result.stderr)
    assert not partial.exists() or journaled_files(partial)


def test_zero_weight_gets_scale_one(bf16: Path, tmp_path: Path) -> None:
    source = tmp_path / "src"
    shutil.copytree(bf16, source)
    edit_tensor(source, f"{KV_B}.weight", torch.zeros_like)

    assert CliRunner().invoke(app, ["convert", str(source), str(tmp_path / "dst")]).exit_code == 0

    made = load_file(shard_of(tmp_path / "dst", f"{KV_B}.weight"))
    assert not made[f"{KV_B}.weight"].view(torch.uint8).any()
    assert (made[f"{KV_B}.weight_scale_inv"] == 1).all()


def test_single_file_without_index_works(tmp_path: Path) -> None:
    synthesize(tmp_path / "src", shards=1)
    assert not (tmp_path / "src" / "model.safetensors.index.json").exists()
    assert CliRunner().invoke(app, ["convert", str(tmp_path / "src"), str(tmp_path / "dst")]).exit_code == 0
    assert not (tmp_path / "dst" / "model.safetensors.index.json").exists()


def test_other_quant_method_takes_a_sidecar(bf16: Path, tmp_path: Path) -> None:
    source = tmp_path / "src"
    shutil.copytree(bf16, source)
    unquantized_method(source)
    result = CliRunner().invoke(app, ["convert", str(source), str(tmp_path / "dst"), "--layout", "sidecar"])
    assert result.exit_code == 0


class TestDestination:
    def refused(self, source: Path, destination: Path, said: str, *flags: str) -> None:
        before = sorted(str(path) for path in source.parent.rglob("*"))
        result = CliRunner().invoke(app, ["convert", str(source), str(destination), *flags])
        assert result.exit_code == 2
        assert said in result.stderr
        assert sorted(str(path) for path in source.parent.rglob("*")) == before

    def test_not_empty(self, bf16: Path, tmp_path: Path) -> None:
        (tmp_path / "dst").mkdir()
        (tmp_path / "dst" / "notes.txt").write_text("mine")
        self.refused(bf16, tmp_path / "dst", "found files in it")
        assert [path.name for path in (tmp_path / "dst").iterdir()] == ["notes.txt"]

    def test_overwrite_spares_what_is_no_checkpoint(self, bf16: Path, tmp_path: Path) -> None:
        (tmp_path / "dst").mkdir()
        (tmp_path / "dst" / "notes.txt").write_text("mine")
        self.refused(bf16, tmp_path / "dst", "a directory that is no checkpoint", "--overwrite")

    def test_is_the_source(self, bf16: Path) -> None:
        self.refused(bf16, bf16, "found the source itself")

    def test_is_the_source_by_a_link(self, bf16: Path, tmp_path: Path) -> None:
        (tmp_path / "link").symlink_to(bf16)
        self.refused(bf16, tmp_path / "link", "found the source itself")

    def test_inside_the_source(self, bf16: Path) -> None:
        self.refused(bf16, bf16 / "out", "found a directory inside the source")

    def test_around_the_source(self, bf16: Path) -> None:
        self.refused(bf16, bf16.parent, "found a directory that contains the source")

    def test_is_a_file(self, bf16: Path, tmp_path: Path) -> None:
        (tmp_path / "dst").write_text("a file")
        self.refused(bf16, tmp_path / "dst", "something that is not a directory")

    def test_cannot_be_made(self, bf16: Path) -> None:
        # not even root may create a directory there
        self.refused(bf16, Path("/proc/dst"), "/proc")

    def test_partial_of_something_else(self, bf16: Path, tmp_path: Path) -> None:
        (tmp_path / "dst.partial").mkdir()
        (tmp_path / "dst.partial" / "thesis.tex").write_text("mine")
        self.refused(bf16, tmp_path / "dst", "files that no conversion of weightprep left there")
        assert (tmp_path / "dst.partial" / "thesis.tex").exists()


def test_overwrite_replaces_a_checkpoint(bf16: Path, fp8: Path, tmp_path: Path) -> None:
    shutil.copytree(fp8, tmp_path / "dst")
    result = CliRunner().invoke(app, ["convert", str(bf16), str(tmp_path / "dst"), "--overwrite"])
    assert result.exit_code == 0
    assert CliRunner().invoke(app, ["verify", str(bf16), str(tmp_path / "dst")]).exit_code == 0
    assert [path.name for path in tmp_path.iterdir()] == ["dst"]


RECIPE = """
schema: 1
name: mine
architectures: [GlmMoeDsaForCausalLM]
dims: {heads: num_attention_heads, nope: qk_nope_head_dim, v: v_head_dim, rank: kv_lora_rank}
layers:
  decoder: {prefix: "model.layers.{i}", first: 0, count: num_hidden_layers}
modules:
  kv_b:
    source: "{prefix}.self_attn.kv_b_proj"
    on: [decoder]
    store: [{dequantize: {}}, {quantize_fp8: {format: e4m3fn, granularity: tensor}}]
    load: [{split_kv_b: {}}, {layout: {w_kc: nk_contiguous, w_vc: nk_contiguous}}]
    ensures: fp8_absorbed
contracts:
  fp8_absorbed:
    w_kc: {dtype: float8_e4m3fn, shape: [heads, nope, rank]}
    w_vc: {dtype: float8_e4m3fn, shape: [heads, rank, v]}
    w_scale: {dtype: float32, shape: []}
"""


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("    on: [decoder]\n", "    on: [decoder]\n    shards: 3\n", "modules.kv_b.shards"),
        ("store: [{dequantize: {}}, ", "store: [", "step quantize_fp8"),
        ("self_attn.kv_b_proj", "self_attn.kv_c_proj", "0 of 3 modules"),
    ],
    ids=["unknown key", "step that cannot follow", "matches nothing"],
)
def test_bad_recipe(bf16: Path, tmp_path: Path, old: str, new: str, said: str) -> None:
    path = tmp_path / "mine.yaml"
    assert old in RECIPE
    path.write_text(RECIPE.replace(old, new))
    result = CliRunner().invoke(app, ["convert", str(bf16), str(tmp_path / "dst"), "--recipe", str(path)])
    assert result.exit_code == 2
    assert said in result.stderr
    assert [entry.name for entry in tmp_path.iterdir()] == ["mine.yaml"]


def test_own_recipe_leaves_nextn_alone(bf16: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(RECIPE)
    arguments = [str(bf16), str(tmp_path / "dst"), "--recipe", str(tmp_path / "mine.yaml")]
    assert CliRunner().invoke(app, ["convert", *arguments]).exit_code == 0
    assert CliRunner().invoke(app, ["verify", *arguments]).exit_code == 0
    excluded = json.loads((tmp_path / "dst" / "config.json").read_text())["quantization_config"]
    # by the draft model's names as well, which would be built in fp8 otherwise
    for name in ("model.layers.3.self_attn.kv_b_proj", "model.decoder.self_attn.kv_b_proj", "model.eh_proj"):
        assert name in excluded["modules_to_not_convert"]
