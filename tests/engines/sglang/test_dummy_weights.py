"""Made-up weights in every encoding can be converted, and sound ones are left alone."""

from __future__ import annotations

import pytest
import torch

from weightprep.engines.sglang.dummy_weights import MadeUpWeights
from weightprep.formats import EncodedShape, Encoding
from weightprep.transforms import Bundle, StepContext
from weightprep.transforms.dequantize import dequantize

ROWS, COLS = 256, 128
E4M3 = torch.float8_e4m3fn


def source(encoding: Encoding, weight: torch.Tensor, scale: torch.Tensor | None) -> Bundle:
    block = (128, 128) if encoding in (Encoding.FP8_BLOCK, Encoding.INT8_BLOCK) else None
    return Bundle.source(weight, scale, EncodedShape(encoding, ROWS, COLS, block))


def broken() -> dict[str, Bundle]:
    nan, nans8 = float("nan"), torch.full((ROWS, COLS), 0x7F, dtype=torch.uint8).view(E4M3)
    ones8, bytes_ = torch.ones(ROWS, COLS).to(E4M3), torch.ones(ROWS, COLS // 2, dtype=torch.uint8)
    return {
        "bf16": source(Encoding.BF16, torch.full((ROWS, COLS), nan, dtype=torch.bfloat16), None),
        "fp32": source(Encoding.FP32, torch.full((ROWS, COLS), -float("inf")), None),
        "fp8 weight": source(Encoding.FP8_TENSOR, nans8, torch.tensor(2.0)),
        "negative": source(Encoding.FP8_BLOCK, ones8, torch.tensor([[-1.0], [2.0]])),
        "channel": source(Encoding.FP8_CHANNEL, ones8, torch.full((ROWS, 1), nan)),
        "e8m0": source(Encoding.FP8_BLOCK, ones8, torch.tensor([[255], [128]], dtype=torch.uint8)),
        "too large": source(Encoding.FP8_BLOCK, ones8, torch.tensor([[1e38], [2.0]])),
        "e8m0 too large": source(Encoding.FP8_BLOCK, ones8, torch.tensor([[254], [128]], dtype=torch.uint8)),
        "mxfp4": source(Encoding.MXFP4, bytes_, torch.full((ROWS, COLS // 32), 255, dtype=torch.uint8)),
    }


@pytest.mark.parametrize("name", broken())
def test_what_is_no_number_becomes_zero_and_scale_one(name: str) -> None:
    bundle, made_up = broken()[name], MadeUpWeights()
    usable = made_up.usable(bundle, name)
    values = dequantize(usable, StepContext(name=name))["weight"].float()
    assert torch.isfinite(values).all()
    # the first row's: a weight that was no number, or one that is 1 (0.5 in e2m1) with the scale 1
    expected = {"bf16": 0.0, "fp32": 0.0, "fp8 weight": 0.0, "mxfp4": 0.5}.get(name, 1.0)
    assert float(values[0, 0]) == expected
    if name in ("negative", "e8m0", "too large", "e8m0 too large"):
        assert float(values[-1, 0]) == 2.0
    assert made_up.changed == {name}


def test_sound_weights_are_left_alone() -> None:
    made_up = MadeUpWeights()
    bundle = source(Encoding.FP8_TENSOR, torch.ones(ROWS, COLS).to(E4M3), torch.tensor(2.0))
    usable = made_up.usable(bundle, "sound")
    assert usable["weight"] is bundle["weight"]
    assert usable["scale"] is bundle["scale"]
    assert made_up.changed == set()
