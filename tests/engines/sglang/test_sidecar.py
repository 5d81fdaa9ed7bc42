"""Which sidecars are taken for those of the weights that are being served; none of it needs sglang."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hf_cache import COMMIT, into_cache
from huggingface_hub import constants
from safetensors.torch import load_file
from sidecar_files import MANIFEST, edit_sidecar
from typer.testing import CliRunner

from weightprep.cli import app
from weightprep.engines.sglang.options import Options, split_options
from weightprep.engines.sglang.prepare import Preparation
from weightprep.engines.sglang.sidecar import Sidecar, open_sidecar
from weightprep.errors import CheckpointError, EngineError
from weightprep.recipe import find_recipe, resolve
from weightprep.synth import synthesize

MODULE = "model.layers.0.self_attn.kv_b_proj"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A checkpoint with two tensors, weight and scale, for each module, and its sidecar."""
    source = synthesize(tmp_path / "source", arch="deepseek_v3", encoding="fp8_block", layers=1, shards=2)
    arguments = ["convert", str(source), str(tmp_path / "model"), "--layout", "sidecar", "--requantize"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    return tmp_path / "model"


def edit_sources(model: Path, edit: Callable[[dict[str, str]], Any]) -> None:
    """Apply `edit` to the digests of every module's sources."""
    path = model / MANIFEST
    document = json.loads(path.read_text())
    for record in document["modules"]:
        edit(record["source_sha256"])
    path.write_text(json.dumps(document))


def preparation(config: Path, **options: str) -> Preparation:
    """Of a server of the model whose config.json is in the directory `config`."""
    content = json.loads((config / "config.json").read_text())
    plan = resolve(find_recipe(content["architectures"][0], content["model_type"]), content)
    return Preparation(plan, Options.model_validate(options), "gfx950", (128, 128))


def opened(model: Path, **options: str) -> Sidecar:
    made = preparation(model, **options)
    sidecar = open_sidecar(model, made.options, made.plan)
    assert sidecar is not None
    return sidecar


def test_every_source_tensor_must_be_recorded(model: Path) -> None:
    assert opened(model).stale([MODULE]) == []
    edit_sources(model, lambda digests: digests.pop(f"{MODULE}.weight_scale_inv", None))
    assert opened(model).stale([MODULE]) == [MODULE]


@pytest.mark.parametrize("suffix", [".weight", ".weight_scale"])
def test_the_sidecars_own_bytes_are_those_that_were_converted(suffix: str, model: Path) -> None:
    """A flipped bit of least weight in either tensor, which no figure of quality shows."""
    assert opened(model).damaged([MODULE]) == []
    before = opened(model).records[MODULE].target_sha256[MODULE + suffix]

    def flip(tensors: dict[str, torch.Tensor]) -> None:
        if MODULE + suffix in tensors:
            tensors[MODULE + suffix].reshape(-1).view(torch.uint8)[0] ^= 1

    edit_sidecar(model, flip, is_recorded=False)
    sidecar = opened(model)
    assert sidecar.stale([MODULE]) == []
    assert sidecar.damaged([MODULE]) == [MODULE]
    with pytest.raises(EngineError) as refused:
        sidecar.refuse_damaged([MODULE])
    (file,) = (path for path in (model / "weightprep").glob("*.safetensors") if MODULE + suffix in load_file(path))
    assert refused.value.subject == f"{file}: {MODULE}{suffix}"
    assert refused.value.found.startswith("SHA-256 ")
    assert refused.value.wanted == f"SHA-256 {before}, as at its conversion"
    assert f"`weightprep verify {model} {model}`" in refused.value.remedy


def test_a_tensor_that_no_record_names_is_not_served(model: Path) -> None:
    name = f"{MODULE}.weight_scale"
    edit_sidecar(model, lambda tensors: tensors.pop(name, None), is_recorded=False)
    assert opened(model).damaged([MODULE]) == [MODULE]
    with pytest.raises(EngineError, match=r"weight_scale: found no such tensor"):
        opened(model).refuse_damaged([MODULE])
    path = model / MANIFEST
    document = json.loads(path.read_text())
    for record in document["modules"]:
        record["target_sha256"].pop(name, None)
    path.write_text(json.dumps(document))
    assert opened(model).damaged([MODULE]) == []

    def add(tensors: dict[str, torch.Tensor]) -> None:
        if f"{MODULE}.weight" in tensors:
            tensors[name] = torch.tensor(1.0)

    edit_sidecar(model, add, is_recorded=False)
    with pytest.raises(EngineError, match=r"weight_scale: found SHA-256 .* wanted no such tensor"):
        opened(model).refuse_damaged([MODULE])


def test_damage_on_another_rank_is_told(model: Path) -> None:
    with pytest.raises(EngineError, match=f"{MODULE}: found SHA-256 another on another rank"):
        opened(model).refuse_damaged([MODULE])
    opened(model).refuse_damaged([])


@pytest.mark.parametrize("inside", [".", "weightprep"], ids=["what convert made", "the manifest's own"])
def test_a_sidecar_is_named_by_either_directory(inside: str, model: Path) -> None:
    sidecar = opened(model, sidecar=str(model / inside))
    assert sidecar.stale([MODULE]) == []


def test_a_directory_without_a_manifest_is_refused(model: Path, tmp_path: Path) -> None:
    with pytest.raises(EngineError, match=r"sidecar .*: found no .*manifest\.json"):
        opened(model, sidecar=str(tmp_path))


def test_a_record_of_no_source_is_no_manifest(model: Path) -> None:
    edit_sources(model, dict.clear)
    with pytest.raises(CheckpointError, match="source_sha256"):
        opened(model)


@pytest.mark.parametrize("revision", [None, "main", COMMIT])
@pytest.mark.parametrize("named", [False, True])
def test_a_hub_ids_snapshot_has_its_sidecar(model: Path, tmp_path: Path, revision: str | None, named: bool) -> None:
    cache = tmp_path / "hub"
    snapshot = into_cache(model, cache)
    options = {"sidecar": str((snapshot / MANIFEST).parent)} if named else {}
    made = preparation(snapshot, **options)
    with made.reading("org/name", revision, str(cache)):
        assert made.sidecar is not None
        assert made.sidecar.model == snapshot
        assert made.sidecar.stale([MODULE]) == []


def test_without_a_snapshot_in_the_download_dir_the_hubs_own_cache_counts(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As for sglang, which then downloads nothing; and a snapshot with no weights is one that is not there yet."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    config_alone = tmp_path / "config_alone"
    config_alone.mkdir()
    shutil.copy(model / "config.json", config_alone)
    into_cache(config_alone, tmp_path / "downloads")
    snapshot = into_cache(model, tmp_path / "hub")
    made = preparation(snapshot)
    with made.reading("org/name", None, str(tmp_path / "downloads")):
        assert made.sidecar is not None
        assert made.sidecar.model == snapshot


@pytest.mark.parametrize("revision", [None, "v2"])
@pytest.mark.parametrize("has_download_dir", [False, True])
def test_a_named_sidecar_of_a_model_that_is_not_here_is_refused(
    has_download_dir: bool, revision: str | None, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the command that fills the cache that sglang would fill."""
    downloads, hub = str(tmp_path / "downloads"), str(tmp_path / "hub")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", hub)
    made = preparation(model, sidecar=str((model / MANIFEST).parent))
    place = downloads if has_download_dir else None
    with pytest.raises(EngineError) as refused, made.reading("org/name", revision, place):
        pass
    at = "" if revision is None else " --revision v2"
    assert f"`hf download org/name{at} --cache-dir {place or hub}`" in refused.value.remedy
    assert refused.value.found.endswith(f"in {downloads} or {hub}" if has_download_dir else f"in {hub}")
    # nobody asked for one
    made = preparation(model)
    with made.reading("org/name", revision, place):
        assert made.sidecar is None


def test_scales_of_each_rank_are_refused_with_a_sidecar(model: Path) -> None:
    with pytest.raises(EngineError, match=r"(?s)scale_scope.*off"):
        opened(model, scale_scope="rank")
    made = preparation(model, scale_scope="rank", sidecar="off")
    assert open_sidecar(model, made.options, made.plan) is None


@pytest.mark.parametrize(("value", "meant"), [(False, "off"), (True, "auto")])
def test_a_boolean_is_understood(value: bool, meant: str) -> None:
    assert split_options({"sidecar": value})[0].sidecar == meant
