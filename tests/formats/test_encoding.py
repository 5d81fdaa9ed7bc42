"""How tensors are recognised: every encoding that checkpoints are published in, and every refusal."""

from __future__ import annotations

import pytest
import torch

from weightprep.errors import CheckpointError
from weightprep.formats import EncodedShape, Encoding, classify

NAME = "model.layers.0.self_attn.kv_b_proj.weight"
BF16, F32, FN, U8, I8 = torch.bfloat16, torch.float32, torch.float8_e4m3fn, torch.uint8, torch.int8
E8M0 = torch.float8_e8m0fnu


@pytest.mark.parametrize(
    ("weight", "shape", "scale", "scale_shape", "encoding", "block"),
    [
        (BF16, (1792, 512), None, None, "bf16", None),
        (torch.float16, (1792, 512), None, None, "fp16", None),
        (F32, (1792, 512), None, None, "fp32", None),
        (FN, (1792, 512), F32, (14, 4), "fp8_block", (128, 128)),
        (FN, (576, 6144), F32, (5, 48), "fp8_block", (128, 128)),
        (FN, (1792, 512), U8, (14, 4), "fp8_block", (128, 128)),
        (FN, (1792, 512), E8M0, (14, 4), "fp8_block", (128, 128)),
        (FN, (1792, 512), E8M0, (56, 16), "fp8_block", (32, 32)),
        (FN, (1792, 512), U8, (1792, 16), "fp8_block", (1, 32)),
        (FN, (1792, 512), F32, (1792,), "fp8_channel", None),
        (FN, (1792, 512), BF16, (1792, 1), "fp8_channel", None),
        (FN, (1792, 512), F32, (), "fp8_tensor", None),
        (FN, (1792, 512), F32, (1,), "fp8_tensor", None),
        (FN, (100, 100), F32, (1, 1), "fp8_block", (128, 128)),
        (U8, (1792, 256), U8, (1792, 16), "mxfp4", None),
        (I8, (1792, 256), E8M0, (1792, 16), "mxfp4", None),
        (I8, (1792, 512), F32, (1792, 1), "int8_channel", None),
        (I8, (1792, 512), F32, (14, 4), "int8_block", (128, 128)),
    ],
)
def test_recognised(
    weight: torch.dtype,
    shape: tuple[int, int],
    scale: torch.dtype | None,
    scale_shape: tuple[int, ...] | None,
    encoding: str,
    block: tuple[int, int] | None,
) -> None:
    found = classify(NAME, weight, shape, scale, scale_shape)
    cols = 2 * shape[1] if encoding == "mxfp4" else shape[1]
    assert found == EncodedShape(Encoding(encoding), shape[0], cols, block)
    if scale_shape is not None and encoding not in ("fp8_tensor",):
        assert found.scale_shape == (scale_shape if len(found.scale_shape or ()) == 2 else scale_shape[:1])


def test_packed_fp4_by_compressed_tensors_name() -> None:
    assert classify(NAME + "_packed", U8, (1792, 256), U8, (1792, 16)) == EncodedShape(Encoding.MXFP4, 1792, 512)


def test_the_checkpoints_block_size_decides_where_several_fit() -> None:
    assert classify(NAME, FN, (64, 64), F32, (1, 1), (64, 64)).block == (64, 64)
    assert classify(NAME, FN, (1792, 512), F32, (14, 4), (64, 64)).block == (128, 128), "a hint that does not fit"


@pytest.mark.parametrize(
    ("name", "weight", "shape", "scale", "scale_shape", "words"),
    [
        (NAME, FN, (1792, 512), None, None, "without a scale.*weight_scale_inv"),
        (NAME, FN, (1792, 512), F32, (13, 4), r"\[13, 4\].*\[14, 4\]"),
        (NAME, FN, (1792, 512), F32, (4, 14), r"\[4, 14\]"),
        (NAME, FN, (1792, 512), F32, (56,), r"\[56\]"),
        (NAME, FN, (1792, 512), torch.int32, (14, 4), "int32"),
        (NAME, torch.float8_e5m2, (1792, 512), F32, (14, 4), "float8_e5m2"),
        (NAME, torch.float8_e4m3fnuz, (1792, 512), F32, (14, 4), "float8_e4m3fnuz"),
        (NAME, BF16, (1792, 512), F32, (14, 4), "no scale beside"),
        (NAME, BF16, (1792,), None, None, "matrix"),
        (NAME, BF16, (0, 512), None, None, "matrix"),
        (NAME, U8, (1792, 256), FN, (1792, 32), "NVFP4"),
        (NAME, U8, (1792, 256), U8, (1792, 8), r"\[1792, 16\]"),
        (NAME, U8, (1792, 256), None, None, "without a scale"),
        (NAME, torch.int32, (1792, 64), None, None, "int32"),
        (NAME.replace("weight", "qweight"), torch.int32, (512, 224), None, None, "AWQ or GPTQ"),
        (NAME + "_packed", torch.int32, (1792, 64), BF16, (1792, 16), "pack-quantized"),
    ],
)
def test_refused_by_name_and_dtype(
    name: str,
    weight: torch.dtype,
    shape: tuple[int, ...],
    scale: torch.dtype | None,
    scale_shape: tuple[int, ...] | None,
    words: str,
) -> None:
    with pytest.raises(CheckpointError, match=f"(?s){words}") as caught:
        classify(name, weight, shape, scale, scale_shape)
    assert caught.value.subject == name


def test_rows_inside_a_block_take_the_blocks_that_they_touch() -> None:
    whole = EncodedShape(Encoding.FP8_BLOCK, 1792, 512, (128, 128))
    # one GLM head is 448 rows: 3.5 blocks
    part = whole.slice_rows(448, 896)
    assert part.encoded == EncodedShape(Encoding.FP8_BLOCK, 448, 512, (128, 128), 448)
    assert part.scale_rows == (3, 7)
    assert part.encoded.scale_shape == (4, 4)
    inner = part.encoded.slice_rows(192, 448)
    assert inner.scale_rows == (2, 4), "relative to the slice's own scale"
    assert inner.encoded.row_offset == 640


def test_rows_of_other_encodings() -> None:
    assert EncodedShape(Encoding.MXFP4, 64, 64).slice_rows(8, 16).scale_rows == (8, 16)
    assert EncodedShape(Encoding.FP8_TENSOR, 64, 64).slice_rows(8, 16).scale_rows is None
    with pytest.raises(CheckpointError, match="64 rows"):
        EncodedShape(Encoding.BF16, 64, 64).slice_rows(60, 65)
