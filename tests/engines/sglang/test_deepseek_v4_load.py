"""A small DeepSeek-V4 through `--load-format weightprep` of the real sglang: nothing is prepared, so nothing may
change; what is checked is what the model holds.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from pathlib import Path

import deepseek_v4_loads
import pytest
import torch
from deepseek_v4_loads import Loaded
from ranks import RankFailed, Ranks
from safetensors.torch import load_file, save_file

from weightprep.synth import synthesize

SMALL = {"n_routed_experts": 4, "num_attention_heads": 4, "vocab_size": 256}
# one layer of each kind: every token, every fourth with an indexer, every 128th
RATIOS = [0, 4, 128]
KINDS = "2 of ratio 4, 1 of ratio 128"
INDEXER, RATIO_128 = "model.layers.1.self_attn.indexer.compressor", "model.layers.2.self_attn.compressor"
# unquantized; experts in fp8 as in Flash-Base; experts in fp4 as in Flash and Pro
ENCODINGS = ["bf16", "fp8_block", "fp8_block_fp4_experts"]

Source = Callable[[str], Path]
Load = Callable[..., Loaded]


def write(path: Path, encoding: str) -> Path:
    overrides = SMALL | {"compress_ratios": RATIOS}
    return synthesize(path, arch="deepseek_v4", encoding=encoding, layers=len(RATIOS), shards=2, overrides=overrides)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Source:
    root = tmp_path_factory.mktemp("deepseek_v4")
    return functools.cache(lambda encoding: write(root / encoding, encoding))


@pytest.fixture(scope="module")
def rank(source: Source) -> Iterator[Ranks]:
    """A process of its own: the compressor's hooks stay in it."""
    ranks = Ranks(1, str(source("bf16")))
    yield ranks
    ranks.close()


@pytest.fixture(scope="module")
def load(rank: Ranks, source: Source) -> Load:
    """Each model is loaded once."""

    @functools.cache
    def once(encoding: str, load_format: str, draft: bool) -> Loaded:
        return rank.run(deepseek_v4_loads.load, source(encoding), load_format, draft)[0]  # type: ignore[no-any-return]

    return lambda encoding, load_format="weightprep", draft=False: once(encoding, load_format, draft)


def raw(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


@pytest.mark.parametrize(("encoding", "draft"), [*((encoding, False) for encoding in ENCODINGS), ("fp8_block", True)])
def test_the_flag_changes_no_tensor(encoding: str, draft: bool, load: Load) -> None:
    plain, ours = (load(encoding, load_format, draft) for load_format in ("auto", "weightprep"))
    assert (plain.recipe, ours.recipe) == (None, "deepseek_v4")
    assert list(ours.tensors) == list(plain.tensors)
    # the draft's are the main model's, which the server puts there later; until then they are uninitialised memory
    shared = {"model.embed_tokens.weight", "lm_head.weight"} if draft else set()
    for name in plain.tensors.keys() - shared:
        tensor, other = plain.tensors[name], ours.tensors[name]
        assert (other.dtype, other.shape, other.stride()) == (tensor.dtype, tensor.shape, tensor.stride()), name
        assert torch.equal(raw(other), raw(tensor)), name


def test_startup_says_how_many_compressors_are_on_the_direct_path(load: Load, rank: Ranks, source: Source) -> None:
    for encoding in ENCODINGS:
        (line,) = load(encoding).log
        assert line.startswith(f"weightprep: DeepseekV4ForCausalLM on gfx950: {KINDS}: compressor direct (fast); ")
    (line,) = rank.run(deepseek_v4_loads.start_again, source("bf16"), aiter=False)[0]
    assert line.split(": ", 2)[2] == (
        f"{KINDS}: compressor as upstream; the gate GEMM writes float32 itself; only aiter on ROCm writes bf16"
    )


def test_a_draft_has_no_compressor_and_is_not_refused_for_it(load: Load) -> None:
    assert load("fp8_block", "weightprep", True).log == [
        "weightprep: DeepseekV4ForCausalLMNextN on gfx950: the NextN layer has no compressor"
    ]


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_a_live_gate_weight_is_wkv_and_wgate_as_the_checkpoint_has_them(
    encoding: str, source: Source, load: Load
) -> None:
    stored: dict[str, torch.Tensor] = {}
    for file in source(encoding).glob("*.safetensors"):
        stored |= load_file(file)
    live = load(encoding).tensors
    gates = [name for name in live if name.endswith(".wkv_gate.weight")]
    assert len(gates) == 3
    for name in gates:
        prefix = name.removeprefix("model.").removesuffix("wkv_gate.weight").replace("self_attn", "attn")
        wanted = torch.cat([stored[f"{prefix}wkv.weight"], stored[f"{prefix}wgate.weight"]])
        assert live[name].dtype is wanted.dtype is torch.bfloat16
        assert torch.equal(raw(live[name]), raw(wanted)), name


@pytest.mark.parametrize(("layer", "module"), [(1, INDEXER), (2, RATIO_128)])
def test_a_live_gate_weight_in_float32_is_a_violation_that_names_it(
    layer: int, module: str, source: Source, load: Load, rank: Ranks
) -> None:
    load("fp8_block")
    with pytest.raises(RankFailed, match="ModelContractError: 1 contract violation") as raised:
        rank.run(deepseek_v4_loads.start_again, source("fp8_block"), widened=module)
    _, warning = rank.run(deepseek_v4_loads.start_again, source("fp8_block"), widened=module, on_violation="warn")[0]
    for text in (str(raised.value), warning):
        assert (
            f"layer {layer} ({module}) wkv_gate: dtype is float32, path 'compressor_gate/bf16' on gfx950 needs bfloat16"
        ) in text


def test_a_nan_in_one_gate_weight_stops_the_load(rank: Ranks, tmp_path: Path) -> None:
    root = write(tmp_path / "nan", "bf16")
    for file in root.glob("*.safetensors"):
        tensors = load_file(file)
        if "layers.2.attn.compressor.wgate.weight" in tensors:
            tensors["layers.2.attn.compressor.wgate.weight"][3, 5] = float("nan")
            save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(RankFailed, match="ModelContractError: 1 contract violation") as raised:
        rank.run(deepseek_v4_loads.load, root, "weightprep", False)
    assert f"layer 2 ({RATIO_128}) wkv_gate: a value is NaN or infinite" in str(raised.value)
