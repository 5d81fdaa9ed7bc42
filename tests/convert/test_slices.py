"""A conversion a slice at a time: the same result as that of the whole weight at once, in a fraction of its memory."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from large_weight import HEADS, NOPE, RANK, V, write_checkpoint

from weightprep.convert.quality import measure
from weightprep.convert.slices import run_in_slices
from weightprep.errors import CheckpointError
from weightprep.formats import EncodedShape, Encoding
from weightprep.recipe import load_recipe, resolve
from weightprep.transforms import Bundle, Step, StepContext, make_step, run_steps

# 160 rows a head: blocks of 128 straddle heads, and the last slice has fewer heads than the others
DIMS = {"heads": 7, "nope": 96, "v": 64, "rank": 128}
ROWS = 7 * 160


def steps_of(precision: str) -> tuple[Step, ...]:
    names = ("num_attention_heads", "qk_nope_head_dim", "v_head_dim", "kv_lora_rank")
    config = {"architectures": ["GlmMoeDsaForCausalLM"], "num_hidden_layers": 1, "num_nextn_predict_layers": 0}
    dims = dict(zip(names, DIMS.values(), strict=True))
    return resolve(load_recipe("glm_moe_dsa"), {**config, **dims}, precision=precision).modules[0].store


def bundle_of(encoding: Encoding) -> Bundle:
    """A weight of another magnitude in each head, in `encoding`."""
    weight = torch.randn(ROWS, 128, generator=torch.Generator().manual_seed(1))
    weight *= torch.logspace(-3, 1, 7).repeat_interleave(160).unsqueeze(1)
    bundle = Bundle.source(weight.bfloat16(), None, EncodedShape(Encoding.BF16, ROWS, 128))
    quantizers = {
        Encoding.FP8_BLOCK: [make_step("quantize_fp8", {"granularity": "block"}, "test")],
        Encoding.FP8_CHANNEL: [make_step("quantize_fp8", {"granularity": "channel"}, "test")],
        Encoding.MXFP4: [make_step("quantize_mxfp4", {}, "test")],
    }
    return run_steps(quantizers.get(encoding, []), bundle, StepContext())


def raw(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


@pytest.mark.parametrize("precision", ["fp8", "mxfp4", "bf16"])
@pytest.mark.parametrize("encoding", [Encoding.BF16, Encoding.FP8_BLOCK, Encoding.FP8_CHANNEL, Encoding.MXFP4])
def test_is_what_the_whole_weight_makes(precision: str, encoding: Encoding, monkeypatch: pytest.MonkeyPatch) -> None:
    steps, bundle = steps_of(precision), bundle_of(encoding)
    whole = run_steps(steps, bundle, StepContext(DIMS, name="w"))
    figures = measure(bundle, whole, heads=7, name="w")

    # two heads or two blocks of rows at a time
    monkeypatch.setattr("weightprep.convert.slices._SLICE_ELEMENTS", 350 * 128)
    sliced = run_in_slices(steps, bundle, DIMS, "w")
    assert (sliced.encoded, set(sliced)) == (whole.encoded, set(whole))
    for role, tensor in sliced.items():
        assert (tensor.dtype, tensor.shape, tensor.stride()) == (
            whole[role].dtype,
            whole[role].shape,
            whole[role].stride(),
        ), role
        assert torch.equal(raw(tensor), raw(whole[role])), role
    assert measure(bundle, sliced, heads=7, name="w") == figures


def test_one_scale_of_absorbed_matrices_is_that_of_all_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = [*steps_of("fp8"), make_step("split_kv_b", {}, "test")]
    whole = run_steps(steps, bundle_of(Encoding.BF16), StepContext(DIMS, name="w"))
    monkeypatch.setattr("weightprep.convert.slices._SLICE_ELEMENTS", 350 * 128)
    sliced = run_in_slices(steps, bundle_of(Encoding.BF16), DIMS, "w")
    assert set(sliced) == {"w_kc", "w_vc", "w_scale"}
    for role, tensor in sliced.items():
        assert torch.equal(raw(tensor), raw(whole[role])), role


def test_a_weight_of_other_heads_is_refused_with_its_own_shape() -> None:
    with pytest.raises(CheckpointError, match=r"shape \[1120, 128\].*\[960, 128\] for 6 heads"):
        run_in_slices(steps_of("mxfp4"), bundle_of(Encoding.BF16), {**DIMS, "heads": 6}, "w")


CONVERT = """
import json, resource, sys, torch

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * resource.getpagesize()

imported = peak()
from weightprep.cli import app

small, small_result, large, large_result, *options = sys.argv[1:]
app(["convert", small, small_result, *options], standalone_mode=False)
before = resident()
app(["convert", large, large_result, *options], standalone_mode=False)
print(json.dumps({"grown": peak() - imported, "kept": resident() - before}))
"""
# of one kv_b_proj in bf16
NBYTES = HEADS * (NOPE + V) * RANK * 2


def memory_of(tmp_path: Path, encoding: Encoding, *options: str) -> dict[str, int]:
    """Bytes by which the peak of a process that converts four weights has "grown" since the import of torch, and which
    are "kept" at its end beyond what a conversion of one head leaves."""
    small = write_checkpoint(tmp_path / "small", encoding, layers=1, heads=1)
    large = write_checkpoint(tmp_path / "large", encoding, layers=4)
    paths = [small, tmp_path / "small-result", large, tmp_path / "large-result"]
    command = [sys.executable, "-c", CONVERT, *map(str, paths), "--layout", "sidecar", "--link", "hard", *options]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found: dict[str, int] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize("workers", [1, 2])
def test_memory_stays_below_four_weights_a_worker(tmp_path: Path, workers: int) -> None:
    """With all that the process takes beside them counted in."""
    options = ["--precision", "mxfp4", "--allow-quality-loss", "--workers", str(workers)]
    assert memory_of(tmp_path, Encoding.BF16, *options)["grown"] < 4 * workers * NBYTES


def test_weights_do_not_stay_in_memory(tmp_path: Path) -> None:
    """On its way out a process has more of its libraries in memory, on top of what is still there of its own."""
    # malloc may keep some slices of 4 MB; it kept more than 80 MB where it had the weights too
    assert memory_of(tmp_path, Encoding.FP8_BLOCK, "--precision", "bf16", "--workers", "1")["kept"] < 2 * NBYTES
