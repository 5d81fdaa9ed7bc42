"""The absorbed forms: fp8 by definition, MXFP4 against sglang's Quark branch, e4m3fnuz against the numbers."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest
import torch
from mxfp4_oracle import scalar_mxfp4
from sources import meaning, source

from weightprep.errors import CheckpointError, RecipeError
from weightprep.formats import EncodedShape, Encoding
from weightprep.formats.mx import quantize_mxfp4
from weightprep.transforms import Bundle, StepContext, make_step, measure_amax, run_steps

DIMS = {"heads": 4, "nope": 192, "v": 256, "rank": 512}


def steps(*names: str) -> list:
    return [make_step(name, {}, "test") for name in names]


def kv_b(dims: dict[str, int], encoding: Encoding = Encoding.BF16, seed: int = 0) -> Bundle:
    return source(encoding, dims["heads"] * (dims["nope"] + dims["v"]), dims["rank"], seed)


def halves(values: np.ndarray, dims: dict[str, int]) -> tuple[np.ndarray, np.ndarray]:
    """w_kc (heads, nope, rank) and w_vc (heads, rank, v) by the definition of kv_b_proj's rows."""
    size = dims["nope"] + dims["v"]
    k = [values[head * size : head * size + dims["nope"]] for head in range(dims["heads"])]
    v = [values[head * size + dims["nope"] : (head + 1) * size].T for head in range(dims["heads"])]
    return np.stack(k), np.stack(v)


@pytest.mark.parametrize(
    "dims", [DIMS, {"heads": 3, "nope": 128, "v": 128, "rank": 512}, {**DIMS, "heads": 1, "rank": 64}]
)
def test_split_and_layout(dims: dict[str, int]) -> None:
    bundle = kv_b(dims)
    result = run_steps(steps("split_kv_b", "layout"), bundle, StepContext(dims=dims))
    h, p, v, r = (dims[name] for name in ("heads", "nope", "v", "rank"))
    w_kc, w_vc = halves(meaning(bundle), dims)
    np.testing.assert_array_equal(result["w_kc"].float().numpy(), w_kc)
    np.testing.assert_array_equal(result["w_vc"].float().numpy(), w_vc)
    assert (tuple(result["w_kc"].shape), result["w_kc"].stride()) == ((h, p, r), (p * r, 1, p))
    assert (tuple(result["w_vc"].shape), result["w_vc"].stride()) == ((h, r, v), (r * v, 1, r))
    assert set(result) == {"w_kc", "w_vc"}


def test_plain_layout_is_the_other_order() -> None:
    plain = make_step("layout", {"w_kc": "kn_contiguous", "w_vc": "kn_contiguous"}, "test")
    result = run_steps([*steps("split_kv_b"), plain], kv_b(DIMS), StepContext(dims=DIMS))
    assert result["w_kc"].is_contiguous()
    assert result["w_vc"].is_contiguous()


def test_group_scales_are_laid_out_like_their_weight() -> None:
    mixed = make_step("layout", {"w_kc": "kn_contiguous", "w_vc": "nk_contiguous"}, "test")
    absorbed = run_steps(steps("split_kv_b", "absorb_mxfp4"), kv_b(DIMS), StepContext(dims=DIMS))
    result = run_steps([mixed], absorbed, StepContext(dims=DIMS))
    for role in ("w_kc", "w_scale_k"):
        assert result[role].is_contiguous(), role
    for role in ("w_vc", "w_scale_v"):
        assert result[role].transpose(1, 2).is_contiguous(), role
    for role, tensor in absorbed.items():
        assert torch.equal(result[role], tensor), role


@pytest.mark.parametrize("wrong", [{"heads": 5}, {"nope": 128}, {"rank": 256}])
def test_dims_that_do_not_fit_the_weight(wrong: dict[str, int]) -> None:
    with pytest.raises(CheckpointError, match=r"layer.weight: found shape \[1792, 512\]"):
        run_steps(steps("split_kv_b"), kv_b(DIMS), StepContext(dims={**DIMS, **wrong}, name="layer.weight"))


@pytest.mark.parametrize("encoding", [Encoding.FP8_BLOCK, Encoding.FP8_CHANNEL, Encoding.MXFP4, Encoding.INT8_BLOCK])
def test_rows_under_several_scales_cannot_be_split(encoding: Encoding) -> None:
    with pytest.raises(RecipeError, match="split_kv_b: found a whole weight in"):
        run_steps(steps("split_kv_b"), kv_b(DIMS, encoding), StepContext(dims=DIMS))


def fp8(target: str) -> Bundle:
    names = ("dequantize", "quantize_fp8", "split_kv_b", "e4m3_for_target", "layout")
    return run_steps(steps(*names), kv_b(DIMS), StepContext(dims=DIMS, target=target))


def test_fnuz_has_the_same_numbers_and_layout() -> None:
    fn, fnuz = fp8("gfx950"), fp8("gfx942")
    for role in ("w_kc", "w_vc"):
        assert fn[role].dtype is torch.float8_e4m3fn
        assert fnuz[role].dtype is torch.float8_e4m3fnuz
        assert fn[role].stride() == fnuz[role].stride()
        codes = fnuz[role].contiguous().view(torch.uint8).numpy()
        numbers = codes.view(ml_dtypes.float8_e4m3fnuz).astype(np.float32) * fnuz["w_scale"].numpy()
        np.testing.assert_array_equal(numbers, fn[role].float().numpy() * fn["w_scale"].numpy())
    assert fnuz["w_scale"].item() == 2 * fn["w_scale"].item()


def test_fnuz_codes_are_those_of_sglangs_normalization() -> None:
    from sglang.srt.layers.quantization.fp8_utils import normalize_e4m3fn_to_e4m3fnuz

    fn, fnuz = fp8("gfx950"), fp8("gfx942")
    theirs, scale, _ = normalize_e4m3fn_to_e4m3fnuz(fn["w_kc"].contiguous().clone(), fn["w_scale"])
    assert torch.equal(fnuz["w_kc"].contiguous().view(torch.uint8), theirs.view(torch.uint8))
    assert fnuz["w_scale"].item() == scale.item()


def fp8_by_definition(values: np.ndarray, amax: np.float32) -> tuple[np.ndarray, np.float32]:
    m = np.float32(448) * (np.float32(1) / amax)
    return np.clip(values * m, -448, 448).astype(ml_dtypes.float8_e4m3fn).view(np.uint8), np.float32(1) / m


def test_w_vc_alone_in_fp8_has_the_scale_of_its_own_rows() -> None:
    bundle = kv_b(DIMS, Encoding.FP32)
    # keys a hundred times as large as values: their scale would leave the values two bits
    torch.unflatten(bundle["weight"], 0, (DIMS["heads"], -1))[:, : DIMS["nope"]] *= 100
    w_kc, w_vc = halves(meaning(bundle), DIMS)
    alone = [*steps("split_kv_b", "quantize_w_vc")]
    measured = measure_amax(alone, bundle, StepContext(dims=DIMS))
    assert measured is not None
    np.testing.assert_array_equal(measured.numpy(), [np.abs(w_vc).max()])
    for amax in (None, 2 * measured):
        result = run_steps(alone, bundle, StepContext(dims=DIMS, amax=amax))
        wanted, scale = fp8_by_definition(w_vc, measured.numpy()[0] * np.float32(1 if amax is None else 2))
        np.testing.assert_array_equal(result["w_vc"].contiguous().view(torch.uint8).numpy(), wanted)
        assert result["w_scale"].item() == scale
        np.testing.assert_array_equal(
            result["w_kc"].view(torch.uint16).numpy(), w_kc.astype(ml_dtypes.bfloat16).view(np.uint16)
        )


@pytest.mark.parametrize(("row", "value"), [(0, 3.4e38), (0, float("nan")), (192, float("inf")), (192, float("nan"))])
def test_w_vc_alone_in_fp8_refuses_what_is_not_finite_in_either(row: int, value: float) -> None:
    bundle = kv_b(DIMS, Encoding.FP32)
    # 3.4e38 is a float32, and infinite in bf16
    bundle["weight"][row, 7] = value
    alone = [*steps("split_kv_b", "quantize_w_vc")]
    with pytest.raises(CheckpointError, match=r"layer\.weight: found a NaN or an infinity"):
        run_steps(alone, bundle, StepContext(dims=DIMS, name="layer.weight"))
    measured = measure_amax(alone, bundle, StepContext(dims=DIMS))
    assert measured is not None
    assert torch.isinf(measured).all() == (row >= DIMS["nope"])


def awkward_values() -> torch.Tensor:
    """bf16 rows that quantizers disagree on: ties, zeros, -0, the ends of the range, one large value."""
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(64, 192, generator=generator)
    values[0] = 0
    values[1] = torch.randint(-28, 29, (192,), generator=generator) * 0.25
    values[2] *= 2.0**-126
    values[3] *= 2.0**100
    values[4, :32] = torch.tensor([1.75] + [0.1] * 31)
    values[5, 0] = -0.0
    values[6] = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0] * 24)
    values[7] *= 2.0**-132
    return values.bfloat16()


def test_the_quantizer_is_aiters(tmp_path: Path) -> None:
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "runtime"))
    import aiter_wheel

    folder = aiter_wheel.unpacked()
    if folder is None:
        pytest.skip("the amd-aiter wheel cannot be fetched: ours is compared with the NumPy oracle only")
    torch.save(awkward_values(), tmp_path / "values.pt")
    script = Path(__file__).with_name("aiter_mxfp4.py")
    command = [sys.executable, str(script), str(folder), str(tmp_path / "values.pt"), str(tmp_path / "results.pt")]
    done = subprocess.run(command, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr.decode()[-2000:]
    packed, scale = torch.load(tmp_path / "results.pt", weights_only=True)
    ours = quantize_mxfp4(awkward_values(), "even", "away")
    assert torch.equal(ours[0], packed)
    assert torch.equal(ours[1], scale)


def test_the_quantizer_is_the_oracles() -> None:
    ours, oracle = quantize_mxfp4(awkward_values(), "even", "away"), scalar_mxfp4(awkward_values())
    assert torch.equal(ours[0], oracle[0])
    assert torch.equal(ours[1], oracle[1])


@pytest.mark.parametrize("encoding", [Encoding.BF16, Encoding.MXFP4])
@pytest.mark.parametrize(("nope", "v"), [(128, 128), (192, 256), (512, 512)])
def test_mxfp4_is_what_sglangs_quark_branch_makes(
    encoding: Encoding, nope: int, v: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sglang.srt.layers.quantization.quark import utils

    # aiter's kernel needs a GPU; everything around it is sglang's own code
    monkeypatch.setattr(utils, "dynamic_mxfp4_quant", scalar_mxfp4)
    real_tensor = torch.tensor
    monkeypatch.setattr(torch, "tensor", lambda *a, **k: real_tensor(*a, **{**k, "device": "cpu"}))
    dims = {"heads": 3, "nope": nope, "v": v, "rank": 512}
    bundle = kv_b(dims, encoding, seed=nope)
    attention = SimpleNamespace(
        qk_nope_head_dim=nope, v_head_dim=v, kv_b_proj=SimpleNamespace(weight_scale=bundle.get("scale"))
    )
    k, k_scale, v_half, v_scale = utils.quark_post_load_weights(attention, bundle["weight"].clone(), "mxfp4")
    # the two lines that follow in post_load_weights
    k = k.transpose(1, 2).contiguous().transpose(1, 2)
    v_half = v_half.contiguous().transpose(1, 2)
    away = make_step("absorb_mxfp4", {"scale_rule": "even", "ties": "away"}, "test")
    ours = run_steps([*steps("dequantize", "split_kv_b"), away, *steps("layout")], bundle, StepContext(dims=dims))
    for role, theirs in {"w_kc": k, "w_scale_k": k_scale, "w_vc": v_half, "w_scale_v": v_scale}.items():
        assert torch.equal(ours[role], theirs), role
        assert ours[role].stride() == theirs.stride(), role
        assert ours[role].dtype is torch.uint8
    assert "w_scale" not in ours


def test_w_kc_groups_run_along_nope_and_not_along_rank() -> None:
    dims = {"heads": 2, "nope": 192, "v": 128, "rank": 512}
    weight = torch.zeros(2 * 320, 512, dtype=torch.bfloat16)
    # one large value: only its own group of 32 along nope may get a larger scale
    weight[40, 100] = 64.0
    bundle = Bundle.source(weight, None, EncodedShape(Encoding.BF16, 640, 512))
    result = run_steps(steps("split_kv_b", "absorb_mxfp4", "layout"), bundle, StepContext(dims=dims))
    assert tuple(result["w_scale_k"].shape) == (2, 6, 512)
    assert result["w_scale_k"].nonzero().tolist() == [[0, 1, 100]]


@pytest.mark.parametrize(
    "dims", [{"heads": 1, "nope": 48, "v": 64, "rank": 64}, {"heads": 1, "nope": 64, "v": 64, "rank": 80}]
)
def test_groups_that_do_not_fit_are_refused(dims: dict[str, int]) -> None:
    with pytest.raises(CheckpointError, match="multiple of 32"):
        run_steps(steps("split_kv_b", "absorb_mxfp4"), kv_b(dims), StepContext(dims=dims))


def test_whole_weights_are_packed_along_their_columns() -> None:
    bundle = source(Encoding.BF16, 4, 64)
    result = run_steps([make_step("quantize_mxfp4", {"ties": "away"}, "test")], bundle, StepContext())
    packed, scale = scalar_mxfp4(bundle["weight"])
    assert torch.equal(result["weight"], packed)
    assert torch.equal(result["scale"], scale)
    assert result.encoded == EncodedShape(Encoding.MXFP4, 4, 64)


@pytest.mark.parametrize("name", ["quantize_mxfp4", "cast"])
def test_non_finite_weights_are_refused(name: str) -> None:
    bundle = source(Encoding.FP32, 4, 64)
    bundle["weight"][1, 1] = float("inf")
    step = make_step(name, {"dtype": "bf16"} if name == "cast" else {}, "test")
    with pytest.raises(CheckpointError, match=r"layer\.weight"):
        run_steps([step], bundle, StepContext(name="layer.weight"))
