"""verify finds every way in which a result can be wrong."""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from weightprep.checkpoint.header import read_header
from weightprep.cli import app
from weightprep.convert.verify import Verdict, verify
from weightprep.synth import synthesize

KV_B = "model.layers.1.self_attn.kv_b_proj"


@pytest.fixture(scope="module", params=["inline", "sidecar"])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    root = tmp_path_factory.mktemp(request.param)
    synthesize(root / "src", layers=2, shards=3)
    arguments = ["convert", str(root / "src"), str(root / "dst"), "--layout", request.param, "--link", "copy"]
    assert CliRunner().invoke(app, arguments).exit_code == 0
    return root / "src", root / "dst"


@pytest.fixture
def spoiled(pair: tuple[Path, Path], tmp_path: Path) -> tuple[Path, Path]:
    shutil.copytree(pair[1], tmp_path / "dst")
    return pair[0], tmp_path / "dst"


def home(root: Path) -> Path:
    """Where the converted tensors are."""
    return root / "weightprep" if (root / "weightprep").exists() else root


def file_of(directory: Path, name: str) -> Path:
    for path in directory.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            if name in file.keys():  # noqa: SIM118  (not a mapping)
                return path
    raise AssertionError(name)


def edit(path: Path, change: Callable[[dict[str, object]], object]) -> None:
    data = json.loads(path.read_text())
    change(data)
    path.write_text(json.dumps(data, indent=2))


def test_sound(pair: tuple[Path, Path]) -> None:
    verdict = verify(*pair)
    assert verdict.findings == ()
    assert (verdict.modules, verdict.files) == (3, 4)


def test_every_flipped_bit_is_found(pair: tuple[Path, Path], tmp_path: Path) -> None:
    """Each time one bit of one tensor, untouched, converted or a scale, anywhere in it."""
    source, result = pair
    chance = random.Random(1)
    kinds = {"untouched": 0, "converted": 0, "scale": 0}
    directories = {result, home(result)}
    tensors = [
        (path, header.data_start, info)
        for directory in sorted(directories)
        for path in sorted(directory.glob("*.safetensors"))
        for header in [read_header(path)]
        for info in header.tensors.values()
    ]
    made = [entry for entry in tensors if entry[2].dtype == "F8_E4M3" or "weight_scale" in entry[2].name]
    for number in range(30):
        path, start, info = chance.choice(made if number % 3 else tensors)
        with path.open("r+b") as file:
            position = start + info.begin + chance.randrange(info.nbytes)
            file.seek(position)
            byte = file.read(1)[0]
            file.seek(position)
            file.write(bytes([byte ^ 1 << chance.randrange(8)]))
            file.flush()
            verdict = verify(source, result)
            file.seek(position)
            file.write(bytes([byte]))
        assert any(info.name in finding.subject for finding in verdict.findings), info.name
        kinds["scale" if "scale" in info.name else "converted" if info.dtype == "F8_E4M3" else "untouched"] += 1
    assert min(kinds.values()) > 2
    assert verify(source, result).findings == ()


def drop_untouched(root: Path) -> None:
    path = file_of(root, "model.norm.weight")
    tensors = load_file(path)
    del tensors["model.norm.weight"]
    save_file(tensors, path, metadata={"format": "pt"})


def drop_converted(root: Path) -> None:
    path = file_of(home(root), f"{KV_B}.weight")
    tensors = load_file(path)
    del tensors[f"{KV_B}.weight"]
    save_file(tensors, path, metadata={"format": "pt"})


def tensor_in_two_shards(root: Path) -> None:
    path = file_of(root, "model.norm.weight")
    other = next(p for p in sorted(root.glob("model-*.safetensors")) if p != path)
    tensors = load_file(other)
    tensors["model.norm.weight"] = load_file(path)["model.norm.weight"]
    save_file(tensors, other, metadata={"format": "pt"})


def unknown_tensor(root: Path) -> None:
    path = file_of(home(root), f"{KV_B}.weight")
    tensors = load_file(path)
    tensors["model.surprise.weight"] = tensors[f"{KV_B}.weight"].clone()
    save_file(tensors, path, metadata={"format": "pt"})


def lying_index(root: Path) -> None:
    def swap(index: dict[str, dict[str, str]]) -> None:
        shards = sorted(set(index["weight_map"].values()))
        was = index["weight_map"]["model.norm.weight"]
        index["weight_map"]["model.norm.weight"] = next(shard for shard in shards if shard != was)

    edit(root / "model.safetensors.index.json", swap)


def index_with_a_ghost(root: Path) -> None:
    edit(
        root / "model.safetensors.index.json", lambda index: index["weight_map"].update({"ghost": "model.safetensors"})
    )


def lying_total(root: Path) -> None:
    edit(root / "model.safetensors.index.json", lambda index: index["metadata"].update({"total_size": 1}))


def config_edited(root: Path) -> None:
    edit(root / "config.json", lambda config: config.update({"num_hidden_layers": 5}))


def config_gone(root: Path) -> None:
    (root / "config.json").unlink()


def file_missing(root: Path) -> None:
    (root / "generation_config.json").unlink()


def file_edited(root: Path) -> None:
    (root / "README.md").write_text("other")


def shard_missing(root: Path) -> None:
    file_of(root, "model.norm.weight").unlink()


def shard_truncated(root: Path) -> None:
    path = file_of(root, "model.norm.weight")
    os.truncate(path, path.stat().st_size - 1)


def shard_no_safetensors(root: Path) -> None:
    file_of(root, "model.norm.weight").write_bytes(b"\0" * 100)


def manifest_gone(root: Path) -> None:
    (root / "weightprep.json").unlink()


def manifest_figures(root: Path) -> None:
    edit(root / "weightprep.json", lambda manifest: manifest["modules"][0]["quality"].update({"sqnr_db": 99.0}))


def manifest_scale(root: Path) -> None:
    edit(root / "weightprep.json", lambda manifest: manifest["modules"][0].update({"scale": 1.0}))


def manifest_without_a_module(root: Path) -> None:
    edit(root / "weightprep.json", lambda manifest: manifest["modules"].pop())


def manifest_of_another_recipe(root: Path) -> None:
    edit(root / "weightprep.json", lambda manifest: manifest.update({"recipe_hash": "0" * 64}))


SPOILERS = [
    drop_untouched,
    drop_converted,
    tensor_in_two_shards,
    unknown_tensor,
    lying_index,
    index_with_a_ghost,
    lying_total,
    config_edited,
    config_gone,
    file_missing,
    file_edited,
    shard_missing,
    shard_truncated,
    shard_no_safetensors,
    manifest_gone,
    manifest_figures,
    manifest_scale,
    manifest_without_a_module,
    manifest_of_another_recipe,
]


@pytest.mark.parametrize("spoil", SPOILERS)
def test_finds(spoiled: tuple[Path, Path], spoil: Callable[[Path], None]) -> None:
    source, result = spoiled
    spoil(result)

    outcome = CliRunner().invoke(app, ["verify", str(source), str(result), "--json"])

    assert outcome.exit_code == 1
    document = json.loads(outcome.stdout)
    assert not document["ok"]
    assert document["findings"]


def test_config_that_hides_a_scale(spoiled: tuple[Path, Path]) -> None:
    """kv_b_proj back on the exclude list: a loader would take the fp8 bytes for numbers without a scale."""
    source, result = spoiled
    config = json.loads((result / "config.json").read_text())
    if "quantization_config" not in config:
        return
    config["quantization_config"]["modules_to_not_convert"].append(KV_B)
    (result / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    assert [finding for finding in verify(source, result).findings if "config.json" in finding.subject]


def test_source_that_changed_makes_a_sidecar_stale(pair: tuple[Path, Path], tmp_path: Path) -> None:
    source, result = pair
    shutil.copytree(source, tmp_path / "src")
    path = file_of(tmp_path / "src", f"{KV_B}.weight")
    tensors = load_file(path)
    tensors[f"{KV_B}.weight"][3, 5] += 1
    save_file(tensors, path, metadata={"format": "pt"})

    verdict: Verdict = verify(tmp_path / "src", result)

    assert any("the source has changed since" in finding.wanted for finding in verdict.findings)


def test_result_that_is_no_directory_is_a_usage_error(pair: tuple[Path, Path], tmp_path: Path) -> None:
    assert CliRunner().invoke(app, ["verify", str(pair[0]), str(tmp_path / "nothing")]).exit_code == 2
