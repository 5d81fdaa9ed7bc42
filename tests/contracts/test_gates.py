"""The gates against the conditions of the installed sglang, run with stand-in kernels, and the cases they exist for."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import pytest
import torch

from weightprep.contracts import GATES, TARGETS, predict
from weightprep.errors import EngineError

FN, FNUZ, BF16, U8 = "float8_e4m3fn", "float8_e4m3fnuz", "bfloat16", "uint8"
FP8 = {"w_kc": FN, "w_vc": FN, "w_scale": "tensor"}
FP8_FNUZ = {"w_kc": FNUZ, "w_vc": FNUZ, "w_scale": "tensor"}
UNPREPARED = {"w_kc": BF16, "w_vc": BF16, "w_scale": "float"}
MXFP4 = {"w_kc": U8, "w_vc": U8, "w_scale_k": U8, "w_scale_v": U8, "w_scale": "float"}


@pytest.mark.parametrize(
    ("target", "version", "attributes", "path", "fast"),
    [
        ("gfx950", "0.5.23", FP8, "fp8_absorbed", True),
        ("gfx950", "0.5.23", UNPREPARED, "bf16", False),
        ("gfx950", "0.5.20", UNPREPARED, "bf16", False),
        ("gfx950", "0.5.18", UNPREPARED, "bf16_scaled", False),
        ("gfx950", "0.5.12", FP8, "fp8_absorbed", True),
        ("gfx950", "0.5.23", MXFP4, "mxfp4_absorbed", True),
        ("gfx950", "0.5.23", FP8_FNUZ, "fp8_absorbed+fp8_dequantized", False),
        ("gfx950", "0.5.23", {**FP8, "aiter": "off"}, "fp8_dequantized", False),
        ("gfx942", "0.5.23", FP8_FNUZ, "fp8_absorbed+fp8_dequantized", False),
        ("gfx942", "0.5.23", FP8, "fp8_dequantized", False),
        ("sm90", "0.5.23", FP8, "fp8_absorbed", True),
        ("sm100", "0.5.15", FP8, "fp8_absorbed", True),
        ("sm90", "0.5.23", UNPREPARED, "bf16", False),
        ("cpu", "0.5.23", FP8, "fp8_dequantized", False),
        ("cpu", "0.5.23", UNPREPARED, "bf16", False),
        ("sm90", "0.5.23", {**FP8, "w_vc": BF16}, "fp8_absorbed+bf16", False),
    ],
)
def test_paths(target: str, version: str, attributes: dict[str, str], path: str, fast: bool) -> None:
    prediction = predict(target, version, attributes)
    assert (prediction.path, prediction.fast, prediction.sound) == (path, fast, True)


@pytest.mark.parametrize(
    ("target", "attributes", "words"),
    [
        ("gfx950", {**FP8, "w_vc": BF16}, "takes w_vc for float8_e4m3fn, but it is bfloat16"),
        # one w_scale serves both matmuls, and multiplies a bf16 w_kc too
        ("gfx950", {**FP8, "w_kc": BF16}, "takes w_scale for float, but it is tensor"),
        ("gfx942", {**FP8, "w_kc": BF16}, "takes w_scale for float, but it is tensor"),
        ("sm90", {**FP8, "w_kc": BF16}, None),
        ("sm100", {**FP8, "w_kc": BF16}, None),
        ("cpu", {**FP8, "w_kc": BF16}, None),
        ("gfx950", {**FP8, "w_scale": "float"}, "takes w_scale for tensor"),
        ("sm90", {**FP8, "w_scale": "float"}, "takes w_scale for tensor"),
        ("gfx950", {"w_kc": U8, "w_vc": U8}, "takes w_scale_k for uint8, but it is absent"),
        ("gfx950", {**MXFP4, "w_scale_v": "float32"}, "takes w_scale_v for uint8, but it is float32"),
        # the gate of w_vc compares w_vc, and torch.bmm gets w_vc * w_scale
        ("gfx942", {**FP8_FNUZ, "w_vc": BF16}, "takes w_scale for float, but it is tensor"),
        ("sm90", {**FP8, "w_kc": BF16, "w_scale": "float"}, "bmm_fp8 takes w_scale for tensor"),
        ("cpu", {**FP8, "w_kc": BF16, "w_scale": "float"}, "takes w_scale for tensor"),
        ("gfx942", MXFP4, "but it is uint8"),
        ("gfx950", {**MXFP4, "aiter": "off"}, "but it is uint8"),
        ("sm90", MXFP4, "but it is uint8"),
        ("sm90", FP8_FNUZ, "but it is float8_e4m3fnuz"),
    ],
)
def test_what_kernels_would_misread(target: str, attributes: dict[str, str], words: str | None) -> None:
    prediction = predict(target, "0.5.23", attributes)
    assert not prediction.fast
    assert prediction.sound is (words is None)
    assert words is None or words in prediction.reason


def test_there_is_a_gate_for_everything() -> None:
    for target, k, v in itertools.product(TARGETS, (FN, FNUZ, BF16, U8, "float16"), (FN, FNUZ, BF16, U8, "int8")):
        predict(target, "0.5.23", {"w_kc": k, "w_vc": v, "w_scale": "tensor"})
    assert {gate.matmul for gate in GATES} == {"q", "v"}


@pytest.mark.parametrize("version", ["0.5.10", "0.4.9", "latest"])
def test_versions_without_plugins_are_refused(version: str) -> None:
    with pytest.raises(EngineError, match=f"sglang {version}"):
        predict("gfx950", version, FP8)
    with pytest.raises(EngineError, match="target gfx90a"):
        predict("gfx90a", "0.5.23", FP8)


def branch_taken(
    monkeypatch: pytest.MonkeyPatch, matmul: str, use_aiter_gfx95: bool, k: torch.dtype, v: torch.dtype
) -> str:
    """The kernel that sglang's own rocm_absorb_{q,v}_bmm calls, with stand-ins for the kernels."""
    from sglang.srt.models.deepseek_common.attention_forward_methods import forward_mla_rocm as rocm

    called: list[str] = []

    class Stop(Exception):
        pass

    def stand_in(name: str) -> object:
        def kernel(*args: object, **kwargs: object) -> None:
            called.append(name)
            raise Stop

        return kernel

    fp8 = "batched_gemm_a8w8_a_per_token_group_prequant_w_per_batched_tensor_quant"
    monkeypatch.setattr(rocm, "_use_aiter_gfx95", use_aiter_gfx95)
    monkeypatch.setattr(rocm, fp8, stand_in("fp8"), raising=False)
    monkeypatch.setattr(rocm, "batched_gemm_afp4wfp4_pre_quant", stand_in("mxfp4"), raising=False)
    monkeypatch.setattr(rocm, "_absorb_weight_bf16", stand_in("bmm"))
    monkeypatch.setattr(rocm, "_absorb_bmm_config", lambda *sizes: None)
    attention = SimpleNamespace(
        w_kc=torch.zeros(2, 32, 64).to(k),
        w_vc=torch.zeros(2, 64, 32).to(v),
        w_scale=torch.tensor(1.0),
        w_scale_k=torch.zeros(2, 1, 64, dtype=torch.uint8),
        w_scale_v=torch.zeros(2, 2, 32, dtype=torch.uint8),
        num_local_heads=2,
    )
    if matmul == "q":
        with pytest.raises(Stop):
            rocm.rocm_absorb_q_bmm(attention, torch.zeros(3, 2, 32), is_capture_mode=True)
    else:
        with pytest.raises(Stop):
            rocm.rocm_absorb_v_bmm(attention, torch.zeros(3, 2, 64))
    return called[0]


@pytest.mark.parametrize("gfx950", [True, False])
def test_w_scale_multiplies_a_bf16_w_kc_on_rocm(gfx950: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reason for which w_vc alone in fp8 is refused there, in sglang's own code."""
    from sglang.srt.models.deepseek_common.attention_forward_methods import forward_mla_rocm as rocm

    monkeypatch.setattr(rocm, "_use_aiter_gfx95", gfx950)
    attention = SimpleNamespace(
        w_kc=torch.ones(2, 32, 64).bfloat16(), w_vc=torch.zeros(2, 64, 32).to(torch.float8_e4m3fn), num_local_heads=2
    )
    results = []
    for scale in (1.0, torch.tensor(0.5)):
        attention.w_scale = scale
        results.append(rocm.rocm_absorb_q_bmm(attention, torch.ones(3, 2, 32).bfloat16(), is_capture_mode=True))
    assert torch.equal(results[1], results[0] * 0.5)


@pytest.mark.parametrize(("target", "aiter"), [("gfx950", "on"), ("gfx950", "off"), ("gfx942", "on")])
@pytest.mark.parametrize("matmul", ["q", "v"])
def test_the_installed_sglang_takes_the_predicted_branch(
    matmul: str, target: str, aiter: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernels = {"fp8_absorbed": "fp8", "mxfp4_absorbed": "mxfp4"}
    dtypes = (torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.bfloat16, torch.uint8)
    for k, v in itertools.product(dtypes, dtypes):
        with monkeypatch.context() as patch:
            taken = branch_taken(patch, matmul, (target, aiter) == ("gfx950", "on"), k, v)
        attributes = {"w_kc": str(k)[6:], "w_vc": str(v)[6:], "aiter": aiter}
        gate = next(
            gate
            for gate in GATES
            if (gate.matmul, target in gate.targets, gate.versions) == (matmul, True, "")
            and all(attributes[name] == wanted for name, wanted in gate.needs.items())
        )
        assert kernels.get(gate.path, "bmm") == taken, (matmul, target, attributes)
