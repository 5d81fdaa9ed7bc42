"""quantize_fp8 against sglang's own cast, a NumPy oracle, and the cases that casts get wrong."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import torch
from sources import source

from weightprep.errors import CheckpointError
from weightprep.formats import EncodedShape, Encoding
from weightprep.transforms import Bundle, StepContext, make_step, measure_amax, run_steps

STEPS = [make_step("dequantize", {}, "test"), make_step("quantize_fp8", {}, "test")]
CONTEXT = StepContext(name="layer.weight")


def float_bundle(weight: torch.Tensor) -> Bundle:
    encoding = {torch.bfloat16: Encoding.BF16, torch.float16: Encoding.FP16, torch.float32: Encoding.FP32}[weight.dtype]
    return Bundle.source(weight, None, EncodedShape(encoding, weight.shape[0], weight.shape[1]))


def codes(bundle: Bundle) -> np.ndarray:
    return bundle["weight"].view(torch.uint8).numpy()


@pytest.mark.parametrize(
    ("dtype", "spread"),
    [(dtype, spread) for dtype in (torch.bfloat16, torch.float32) for spread in (1e-20, 1e-3, 1.0, 3e4, 1e37)]
    + [(torch.float16, 1e-3), (torch.float16, 1.0), (torch.float16, 1e3)],
    ids=str,
)
def test_bytes_and_scale_are_those_of_sglang(dtype: torch.dtype, spread: float) -> None:
    from sglang.srt.layers.quantization.fp8_utils import input_to_float8

    for seed in range(8):
        weight = (torch.randn(448, 160, generator=torch.Generator().manual_seed(seed)) * spread).to(dtype)
        theirs, scale = input_to_float8(weight, dtype=torch.float8_e4m3fn)
        ours = run_steps(STEPS, float_bundle(weight), CONTEXT)
        np.testing.assert_array_equal(codes(ours), theirs.view(torch.uint8).numpy())
        assert ours["scale"].view(torch.int32).item() == scale.view(torch.int32).item()
        assert ours["scale"].shape == ()


@pytest.mark.parametrize("encoding", [Encoding.FP8_BLOCK, Encoding.FP8_CHANNEL])
def test_requantization_of_fp8_is_that_of_sglang(encoding: Encoding) -> None:
    from sglang.srt.layers.quantization import fp8_utils

    bundle = source(encoding, 448, 320)
    if encoding is Encoding.FP8_BLOCK:
        theirs, scale = fp8_utils.block_quant_to_tensor_quant(bundle["weight"], bundle["scale"], [128, 128])
    else:
        theirs, scale = fp8_utils.channel_quant_to_tensor_quant(bundle["weight"], bundle["scale"])
    ours = run_steps(STEPS, bundle, CONTEXT)
    np.testing.assert_array_equal(codes(ours), theirs.view(torch.uint8).numpy())
    assert ours["scale"].item() == scale.item()


def oracle(values: np.ndarray, amax: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    m = np.float32(448) * (np.float32(1) / amax.astype(np.float32))
    scaled = np.clip(values.astype(np.float32) * m, np.float32(-448), np.float32(448))
    return scaled.astype(ml_dtypes.float8_e4m3fn).view(np.uint8), np.float32(1) / m


@pytest.mark.parametrize("granularity", ["tensor", "channel", "block"])
@pytest.mark.parametrize(("rows", "cols"), [(128, 128), (300, 200), (1, 1), (127, 513)])
def test_granularities_against_numpy(granularity: str, rows: int, cols: int) -> None:
    weight = torch.randn(rows, cols, generator=torch.Generator().manual_seed(1)).bfloat16()
    values = weight.float().numpy()
    ours = run_steps([make_step("quantize_fp8", {"granularity": granularity}, "test")], float_bundle(weight), CONTEXT)
    amax = np.empty_like(values)
    for row in range(rows):
        for col in range(cols):
            amax[row, col] = {
                "tensor": lambda: np.abs(values).max(),
                "channel": lambda row=row: np.abs(values[row]).max(),
                "block": lambda r=row // 128 * 128, c=col // 128 * 128: np.abs(values[r : r + 128, c : c + 128]).max(),
            }[granularity]()
    wanted, scale = oracle(values, amax)
    np.testing.assert_array_equal(codes(ours), wanted)
    stored = ours["scale"].numpy()
    expanded = np.kron(stored, np.ones((128, 128), np.float32))[:rows, :cols] if granularity == "block" else stored
    np.testing.assert_array_equal(np.broadcast_to(expanded, scale.shape), scale)
    assert ours.encoded.scale_shape == (stored.shape if granularity != "channel" else (rows,))


def test_a_zero_tensor_gets_scale_one() -> None:
    ours = run_steps(STEPS, float_bundle(torch.zeros(4, 32, dtype=torch.bfloat16)), CONTEXT)
    assert ours["scale"].item() == 1
    assert not codes(ours).any()


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize("granularity", ["tensor", "channel", "block"])
def test_non_finite_weights_are_refused_by_name(value: float, granularity: str) -> None:
    weight = torch.ones(4, 32, dtype=torch.bfloat16)
    weight[2, 5] = value
    with pytest.raises(CheckpointError, match=r"layer\.weight: found a NaN or an infinity"):
        run_steps([make_step("quantize_fp8", {"granularity": granularity}, "t")], float_bundle(weight), CONTEXT)


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_non_finite_weights_reach_every_rank_as_infinity(value: float) -> None:
    good, bad = torch.ones(4, 32).bfloat16(), torch.ones(4, 32).bfloat16()
    bad[0, 0] = value
    measured = [measure_amax(STEPS, float_bundle(weight), CONTEXT) for weight in (good, bad)]
    # a reduction of the GPU's may drop a NaN
    assert [value[0].item() for value in measured if value is not None] == [1, float("inf")]
    agreed = torch.stack([value for value in measured if value is not None]).amax(0)
    for weight in (good, bad):
        with pytest.raises(CheckpointError, match="NaN or an infinity"):
            run_steps(STEPS, float_bundle(weight), StepContext(amax=agreed, name="layer.weight"))


def test_a_faulty_scale_on_one_rank_stops_all() -> None:
    good, bad = source(Encoding.FP8_BLOCK, 128, 128), source(Encoding.FP8_BLOCK, 128, 128)
    bad["scale"][0, 0] = float("nan")
    measured = [measure_amax(STEPS, bundle, CONTEXT) for bundle in (good, bad)]
    agreed = torch.stack([value for value in measured if value is not None]).amax(0)
    for bundle in (good, bad):
        with pytest.raises(CheckpointError):
            run_steps(STEPS, bundle, StepContext(amax=agreed))


@pytest.mark.parametrize("encoding", [Encoding.FP8_BLOCK, Encoding.FP8_CHANNEL, Encoding.FP8_TENSOR])
@pytest.mark.parametrize("e8m0", [False, True])
def test_one_constant_scale_keeps_bytes_and_scale(encoding: Encoding, e8m0: bool) -> None:
    bundle = source(encoding, 300, 200, e8m0=e8m0 and encoding is not Encoding.FP8_TENSOR)
    bundle["scale"].fill_(118 if bundle["scale"].dtype is torch.uint8 else 0.0123)
    ours = run_steps(STEPS, bundle, CONTEXT)
    np.testing.assert_array_equal(codes(ours), codes(bundle))
    assert ours["scale"].item() == (2.0**-9 if bundle["scale"].dtype is torch.uint8 else np.float32(0.0123))
    assert ours.encoded == EncodedShape(Encoding.FP8_TENSOR, 300, 200)


@pytest.mark.parametrize("encoding", [Encoding.FP8_BLOCK, Encoding.FP8_CHANNEL])
def test_one_scale_of_zero_is_a_zero_tensor_and_not_a_scale(encoding: Encoding) -> None:
    bundle = source(encoding, 300, 200)
    bundle["scale"].fill_(0)
    ours = run_steps(STEPS, bundle, CONTEXT)
    assert ours["scale"].item() == 1
    assert not (codes(ours) & 0x7F).any()


def test_a_rank_whose_rows_share_a_scale_follows_the_others() -> None:
    whole = source(Encoding.FP8_BLOCK, 256, 128)
    whole["scale"][:] = torch.tensor([[0.001], [0.002]])
    halves = [
        Bundle.source(
            whole["weight"][row : row + 128],
            whole["scale"][row // 128 : row // 128 + 1],
            EncodedShape(Encoding.FP8_BLOCK, 128, 128, (128, 128), row),
        )
        for row in (0, 128)
    ]
    measured = [measure_amax(STEPS, half, CONTEXT) for half in halves]
    agreed = torch.stack([value for value in measured if value is not None]).amax(0)
    ranks = [run_steps(STEPS, half, StepContext(amax=agreed)) for half in halves]
    at_once = run_steps(STEPS, whole, CONTEXT)
    np.testing.assert_array_equal(np.concatenate([codes(rank) for rank in ranks]), codes(at_once))
    assert ranks[0]["scale"].item() == ranks[1]["scale"].item() == at_once["scale"].item()


def test_nothing_to_agree_on_where_no_amax_is_taken() -> None:
    assert measure_amax(STEPS, source(Encoding.FP8_TENSOR, 8, 32), CONTEXT) is None
    assert measure_amax(STEPS[:1], source(Encoding.BF16, 8, 32), CONTEXT) is None


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float8_e8m0fnu])
def test_the_one_scale_of_a_source_may_be_in_e8m0(dtype: torch.dtype) -> None:
    """The code of 2^-7 is 120: handed on as it is, it would be a scale of 120."""
    weight = torch.randn(64, 32, generator=torch.Generator().manual_seed(1)).to(torch.float8_e4m3fn)
    shape = EncodedShape(Encoding.FP8_TENSOR, 64, 32)
    made = run_steps(STEPS[1:], Bundle.source(weight, torch.tensor(120, dtype=torch.uint8).view(dtype), shape), CONTEXT)
    assert torch.equal(made["weight"].view(torch.uint8), weight.view(torch.uint8))
    assert (made["scale"].dtype, made["scale"].item()) == (torch.float32, 2.0**-7)


@pytest.mark.parametrize("value", [float("nan"), 0.5])
def test_the_one_float32_scale_of_a_source_is_handed_on_as_it_is(value: float) -> None:
    """Whether it is sound is for the contract of the result to say, whose violations may be served."""
    weight = torch.ones(64, 32).to(torch.float8_e4m3fn)
    bundle = Bundle.source(weight, torch.tensor(value), EncodedShape(Encoding.FP8_TENSOR, 64, 32))
    assert run_steps(STEPS[1:], bundle, CONTEXT)["scale"] is bundle["scale"]


def test_nan_in_e8m0_is_refused() -> None:
    weight = torch.ones(64, 32).to(torch.float8_e4m3fn)
    scale = torch.tensor(255, dtype=torch.uint8)
    with pytest.raises(CheckpointError, match="255"):
        run_steps(STEPS[1:], Bundle.source(weight, scale, EncodedShape(Encoding.FP8_TENSOR, 64, 32)), CONTEXT)
