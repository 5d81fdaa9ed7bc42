"""The hooks on the real modules of every known release: sglang's own functions, with and without, on the same inputs.

Each release's wheel is put first on the path of a process of its own, with aiter's Triton kernels from the amd-aiter
wheel in the interpreter. What only a GPU has is stood in for: CUDA's bmm_fp8, aiter's HIP quantization and GEMMs.
"""

from __future__ import annotations

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import releases
import servers

from weightprep.contracts.scale_gates import predict_scales
from weightprep.engines.sglang import versions

RELEASES = [str(version) for version in versions.KNOWN]
WITHOUT_FUNCTIONS = ("0.5.12", "0.5.15")

# Upstream rounds activations to e4m3 in groups, we keep them in bf16. Rounding to 3 bits of mantissa is off by at most
# 2^-4 and, over uniformly spread mantissas, by 0.026 rms of the value; products with independent weights keep that
# ratio. Its MXFP4 kernel rounds activations to one bit of mantissa under a power of two: 2^-2 at most, 0.12 rms on
# normal data with the values under the smallest normal one. A result that is quantized on both sides adds that
# quantization's error twice.
FP8, MXFP4 = 0.03, 0.12
# One rounding to bf16 is off by at most 2^-8.
BF16 = 2.0**-8
BOUND = {
    (weights, o_proj): (activations**2 + 2 * result**2) ** 0.5
    for weights, activations in (("fp8", FP8), ("mxfp4", MXFP4), ("bf16", BF16))
    for o_proj, result in (("bf16", 0.0), ("fp8_channel", 0.0), ("fp8_block", FP8), ("mxfp4", MXFP4))
}


# Weights and o_proj for which a release's ROCm product is head-major, so that its flatten copies. A quantization reads
# through the transpose.
HEAD_MAJOR = {
    "0.5.12": {("fp8", "bf16"), ("mxfp4", "bf16")},
    "0.5.15": {("fp8", "bf16")},
    "0.5.18": {("bf16", "bf16")},
}


def run(version: str) -> list[dict[str, Any]] | str | None:
    """Cases of one release; its log where it failed; None where a wheel is missing."""
    installed = version == RELEASES[-1]
    folder = None if installed else releases.unpacked(version)
    if folder is None and not installed:
        return None
    environment = servers.environment(PYTHONPATH="" if folder is None else str(folder))
    del environment["SGLANG_USE_CPU_ENGINE"]
    command = [sys.executable, "-W", "ignore", str(Path(__file__).with_name("hooks_in_release.py"))]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1200, check=False)
    if done.returncode == 77:
        return None
    if done.returncode:
        return done.stdout[-2000:] + done.stderr[-6000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


@pytest.fixture(scope="module")
def all_cases() -> dict[str, list[dict[str, Any]] | str | None]:
    with ThreadPoolExecutor(2) as pool:
        return dict(zip(RELEASES, pool.map(run, RELEASES), strict=True))


@pytest.fixture(params=RELEASES)
def cases(request: pytest.FixtureRequest, all_cases: dict[str, Any]) -> tuple[str, list[dict[str, Any]]]:
    found = all_cases[request.param]
    if found is None:
        pytest.skip(f"no wheel of sglang {request.param} or of aiter: the hooks were not run on its modules")
    assert isinstance(found, list), found
    return request.param, found


def part(cases: list[dict[str, Any]], name: str, **wanted: Any) -> list[dict[str, Any]]:
    return [c for c in cases if c["part"] == name and all(c.get(key) == value for key, value in wanted.items())]


def test_the_release_is_the_one_that_was_asked_for(cases: tuple[str, list[dict[str, Any]]]) -> None:
    version, found = cases
    place = part(found, "from")[0]["place"]
    assert (f"sglang-{version}" in place) == (version != RELEASES[-1])


def test_absorbed_products_are_upstreams_for_every_o_proj(cases: tuple[str, list[dict[str, Any]]]) -> None:
    version, found = cases
    absorb = part(found, "absorb")
    rocm = "rocm" if version in WITHOUT_FUNCTIONS else "function"
    kinds = {(c["weights"], c["o_proj"]) for c in absorb if c["where"] == rocm}
    wanted = {(w, o) for w in ("fp8", "mxfp4", "bf16") for o in ("bf16", "fp8_block", "mxfp4")}
    assert kinds == wanted | (set() if version in WITHOUT_FUNCTIONS else {("fp8", "fp8_channel")})
    for case in absorb:
        assert case["difference"] <= BOUND[case["weights"], case["o_proj"]], case
        # as near to the exact product of the stored weights as upstream, or nearer
        assert case["error_ours"] <= case["error_theirs"] * 1.0001, case
        # q is head-major upstream; where only a kernel is replaced ours is batch-major, behind the same transpose
        assert case["same_form"] or (case["product"] == "q" and case["where"] != "function"), case
        if "theirs_explained" in case:
            # the whole difference is upstream's rounding of activations to MXFP4
            assert case["theirs_explained"] < BF16, case


def test_no_copy_is_left_behind_the_v_product(cases: tuple[str, list[dict[str, Any]]]) -> None:
    version, found = cases
    for case in part(found, "absorb", product="v", lora=False):
        if case["declined"] or not case["taken"]:
            continue
        assert case["copies"][1] == 0, case
        copied = case["where"] == "cuda" or (case["weights"], case["o_proj"]) in HEAD_MAJOR.get(version, ())
        assert case["copies"][0] == copied, case


def test_every_call_is_counted_or_declined_with_a_reason(cases: tuple[str, list[dict[str, Any]]]) -> None:
    _, found = cases
    for case in part(found, "absorb"):
        if case["weights"] == "bf16" and case["where"] != "function":
            # upstream's own condition did not call what is hooked
            assert not case["taken"]
            continue
        quantized = case["o_proj"] in ("fp8_block", "mxfp4")
        stays = quantized and case["lora"]
        if case["weights"] == "bf16":
            stays = quantized or case["product"] == "q"
        assert bool(case["declined"]) == stays, case
        assert bool(case["taken"]) != stays, case
        if stays:
            # what is declined is upstream's own result, bit for bit
            assert case["difference"] == 0.0, case


def test_the_compressor_takes_scores_as_the_gemm_wrote_them(cases: tuple[str, list[dict[str, Any]]]) -> None:
    version, found = cases
    compressor = part(found, "compressor")
    assert all(case["router_keeps_its_gemm"] for case in compressor)
    if version == "0.5.12":
        (case,) = compressor
        assert case["direct"] == [False, False]
        assert "0.5.12 does not widen" in case["reason"] or "does not widen" in case["reason"]
        return
    assert [case["ratio"] for case in compressor] == [4, 128]
    for case in compressor:
        assert case["direct"] == [True, True]
        assert case["score_dtype"] == "torch.bfloat16"
        assert case["score_is_the_gemm"]
        assert case["out_dtype"] == "torch.float32"
        assert case["given_out_is_used"]
        # float32 exp and sums of up to 128 terms, one quotient: under 2^-17 of values of order one
        assert case["largest_error"] < 8e-6, case
        assert case["counts"] == {"compressor_gate/bf16": 1, "compress/float32_arithmetic": 2}
        assert not case["declined"]


# Where each release transposes a scale in a kernel of its own (1), or asks for transposed bytes (0).
COPIES = {
    "0.5.15": {"linear": 1, "linear_triton": 0, "v4_norm": 0, "attention_norm": 1, "mha_q": 1},
    "0.5.18": {"linear": 1, "linear_triton": 0, "v4_norm": 0, "attention_norm": 1, "mha_q": 1, "flattened": 1},
    "0.5.20": {"linear": 0, "linear_triton": 0, "v4_norm": 0, "attention_norm": 1, "mha_q": 1, "flattened": 0},
    "0.5.22": {"linear": 0, "linear_triton": 0, "v4_norm": 0, "attention_norm": 0, "mha_q": 0, "flattened": 0},
    "0.5.23": {"linear": 0, "linear_triton": 0, "v4_norm": 0, "attention_norm": 0, "mha_q": 0, "flattened": 0},
}
# The wheel's flatten ignores the parameter, so releases that view its scales as column-major read garbage; and 0.5.15
# transposes the norm's bytes, which it asked to be transposed, once more.
WRONG_UPSTREAM = {(v, "flattened") for v in ("0.5.20", "0.5.22", "0.5.23")} | {("0.5.15", "v4_norm")}


def test_group_scales_reach_the_gemm_column_major_without_a_copy(cases: tuple[str, list[dict[str, Any]]]) -> None:
    version, found = cases
    scales = part(found, "scales")
    if version == "0.5.12":
        assert scales == []
        return
    assert {case["case"] for case in scales} == set(COPIES[version])
    # what inspect predicts from the version alone
    predicted = predict_scales("gfx950", version)
    assert predicted is not None
    assert [p.fast for p in predicted] == [not any(COPIES[version].values()), True]
    for case in scales:
        assert case["right"][1], case
        assert case["copies"][1] == 0, case
        assert case["hooked_once"]
        assert not [path for path, _ in case["declined"] if path.startswith("group_scale/")], case
        ours = case["case"] == "flattened"
        kind = "weightprep" if ours else "one_row" if case["rows"] == 1 else "column_major"
        counted = {path.rsplit("/", 1)[1] for path in case["counts"] if path.startswith("group_scale/")}
        assert counted == {kind}, case
        if case["rows"] == 1:
            continue
        doubly = version == "0.5.15" and case["case"] == "v4_norm" and case["behaviour"] == "transposed bytes"
        assert case["copies"][0] == COPIES[version][case["case"]] + doubly, case
        wrong = (version, case["case"]) in WRONG_UPSTREAM and (ours or case["behaviour"] == "transposed bytes")
        assert case["right"][0] != wrong, case


def test_absorbed_v_reaches_the_gemm_with_the_scales_where_it_reads_them(
    cases: tuple[str, list[dict[str, Any]]],
) -> None:
    version, found = cases
    absorbed = part(found, "absorbed_scales")
    assert [case["rows"] for case in absorbed] == ([] if version in WITHOUT_FUNCTIONS else [1, 2, 5])
    for case in absorbed:
        assert case["gemm"] == "bpreshuffle", case
        # the GEMM's own reading of what it was given, against the exact product of the stored weights
        assert case["error"] < FP8, case
        assert case["copies"] == 0, case
        if case["rows"] > 1:
            assert case["strides"] == [1, case["rows"]], case
        assert case["counts"] == {"absorb/torch/fp8/fp8_group": 1}
        assert not case["declined"]


def test_all_call_sites_of_a_release_are_hooked(cases: tuple[str, list[dict[str, Any]]]) -> None:
    version, found = cases
    scales = part(found, "scales")
    norms = "add_norm" if version in ("0.5.22", "0.5.23") else "communicator"
    mla, mha = (
        ("forward_mla", "forward_mha") if version in WITHOUT_FUNCTIONS else ("forward_mla_rocm", "forward_mha_rocm")
    )
    rms = [f"{module}.fused_rms_fp8_group_quant" for module in (norms, "deepseek_v4", mla, mha)]
    for case in scales:
        assert set(case["sites"]) >= {*rms, f"{mla}.fused_flatten_fp8_group_quant", "fp8_utils.aiter_per1x128_quant"}
