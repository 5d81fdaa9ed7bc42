"""What sglang's loader makes of each stored kv_b_proj, case by case as its sources have it."""

from __future__ import annotations

import pytest

from weightprep.contracts import READ_RELEASES, TARGETS
from weightprep.contracts.loading import LoadedLayer, load_layer
from weightprep.errors import EngineError

GLM, V3 = "GlmMoeDsaForCausalLM", "DeepseekV3ForCausalLM"
BF16, FN, FNUZ, U8 = "bfloat16", "float8_e4m3fn", "float8_e4m3fnuz", "uint8"


def made(encoding: str, architecture: str, method: str | None, target: str, version: str = "0.5.23") -> tuple[str, ...]:
    """w_kc, w_vc and w_scale afterwards, and w_scale_k and w_scale_v where there are any."""
    attributes = load_layer(LoadedLayer(encoding, architecture, method), target, version).attributes
    names = ("w_kc", "w_vc", "w_scale", "w_scale_k", "w_scale_v")
    assert set(attributes) <= set(names)
    return tuple(attributes[name] for name in names if name in attributes)


@pytest.mark.parametrize(
    ("version", "w_kc"), [("0.5.12", BF16), ("0.5.15", BF16), ("0.5.17", BF16), ("0.5.18", FN), ("0.5.23", FN)]
)
def test_the_cast_of_glm_begins_with_a_release(version: str, w_kc: str) -> None:
    assert made("bf16", GLM, None, "gfx950", version) == (w_kc, w_kc, "tensor" if w_kc == FN else "float")


@pytest.mark.parametrize("version", READ_RELEASES)
def test_nextn_has_another_name_and_is_not_cast(version: str) -> None:
    assert made("bf16", f"{GLM}NextN", None, "gfx950", version) == (BF16, BF16, "float")


@pytest.mark.parametrize("target", [target for target in TARGETS if target != "gfx950"])
@pytest.mark.parametrize("encoding", ["bf16", "fp16", "fp32"])
def test_nothing_is_cast_elsewhere(encoding: str, target: str) -> None:
    assert made(encoding, GLM, None, target) == (BF16, BF16, "float")


@pytest.mark.parametrize(
    ("encoding", "target", "wanted"),
    [
        ("fp8_block", "sm90", (BF16, BF16, "float")),
        ("fp8_block", "sm100", (BF16, BF16, "float")),
        ("fp8_block", "cpu", (FN, FN, "tensor")),
        ("fp8_channel", "sm90", (FN, FN, "tensor")),
        ("fp8_tensor", "sm100", (FN, FN, "tensor")),
        *((encoding, "gfx950", (FN, FN, "tensor")) for encoding in ("fp8_block", "fp8_channel", "fp8_tensor")),
        *((encoding, "gfx942", (FNUZ, FNUZ, "tensor")) for encoding in ("fp8_block", "fp8_channel", "fp8_tensor")),
        *(
            (encoding, target, (BF16, BF16, "float"))
            for encoding in ("int8_channel", "int8_block")
            for target in TARGETS
        ),
    ],
)
def test_quantized_sources(encoding: str, target: str, wanted: tuple[str, ...]) -> None:
    assert made(encoding, GLM, "fp8", target) == wanted


@pytest.mark.parametrize(
    ("encoding", "architecture", "target", "wanted"),
    [
        ("bf16", V3, "gfx950", (U8, U8, "float", U8, U8)),
        ("mxfp4", V3, "gfx950", (U8, U8, "float", U8, U8)),
        # of fp8 a requantization to one scale is made before that branch is reached
        ("fp8_channel", V3, "gfx950", (FN, FN, "tensor")),
        ("bf16", f"{V3}NextN", "gfx950", (BF16, BF16, "float")),
        ("bf16", V3, "gfx942", (BF16, BF16, "float")),
        ("bf16", GLM, "gfx950", (FN, FN, "tensor")),
        # packed bytes without scales: no kernel reads them, and a prediction of them is not sound
        ("mxfp4", GLM, "gfx950", (U8, U8, "float")),
        ("mxfp4", V3, "gfx942", (U8, U8, "float")),
    ],
)
def test_quark(encoding: str, architecture: str, target: str, wanted: tuple[str, ...]) -> None:
    assert made(encoding, architecture, "quark", target) == wanted


def test_a_release_without_plugins_is_an_error() -> None:
    with pytest.raises(EngineError):
        made("bf16", GLM, None, "gfx950", "0.5.11")
