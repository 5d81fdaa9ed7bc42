"""The compressor's hooks on the real classes of sglang 0.5.23, and their targets in every release."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from weightprep.contracts.compressor_gates import predict_compressor
from weightprep.engines.sglang.compressor_targets import compressor_targets
from weightprep.engines.sglang.versions import COMPRESS_FORWARD, GATE, GATE_GEMM

HERE = Path(__file__).parent
RELEASES = {
    "0.5.12": None,
    "0.5.15": (GATE_GEMM, COMPRESS_FORWARD[1]),
    "0.5.18": (GATE_GEMM, COMPRESS_FORWARD[0]),
    "0.5.20": (GATE, COMPRESS_FORWARD[0]),
    "0.5.22": (GATE, COMPRESS_FORWARD[0]),
    "0.5.23": (GATE, COMPRESS_FORWARD[0]),
}


def sources(version: str, into: Path) -> Path | None:
    """sglang's Python sources of one release that the hooks look at, from its wheel; None where pip cannot fetch it."""
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "weightprep-tests" / "wheels"
    cache.mkdir(parents=True, exist_ok=True)
    if not list(cache.glob(f"sglang-{version}-*.whl")):
        pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(cache), f"sglang=={version}"]
        if subprocess.run(pip, capture_output=True, check=False).returncode:
            return None
    with zipfile.ZipFile(next(cache.glob(f"sglang-{version}-*.whl"))) as wheel:
        parts = ("sglang/srt/layers/attention/dsv4/", "sglang/jit_kernel/dsv4/", "sglang/kernels/ops/attention/dsv4/")
        wheel.extractall(into, [n for n in wheel.namelist() if n.startswith(parts) and n.endswith(".py")])
    return into / "sglang"


@pytest.mark.parametrize("version", RELEASES)
def test_what_is_hooked_in_each_release(version: str, tmp_path: Path) -> None:
    root = sources(version, tmp_path)
    if root is None:
        pytest.skip(f"pip could not fetch sglang {version}: its compressor was not looked at")
    targets = compressor_targets(root)
    assert (None if targets is None else (targets.producer, targets.consumer)) == RELEASES[version]
    dtypes = {"wkv": "bfloat16", "wgate": "bfloat16", "ape": "float32"}
    # what inspect predicts from the version alone is what is found by looking
    assert predict_compressor("gfx950", version, dtypes)[2] == (RELEASES[version] or ())
    module = (root / "srt/layers/attention/dsv4/compressor.py").read_text()
    if targets is not None and targets.producer == GATE_GEMM:
        # The rebound name reaches every producer of the scores, the early gather of 0.5.18 included.
        assert module.count("kv_score = linear_bf16_fp32(x, self.wkv_gate.weight)") == (1 if version == "0.5.15" else 2)


@pytest.fixture(scope="module")
def report() -> Any:
    # The kernels are tested elsewhere; here their eager reference runs, whose casts need no patching.
    environment = {k: v for k, v in os.environ.items() if k not in ("SGLANG_USE_AITER", "TRITON_INTERPRET")}
    script = [sys.executable, str(HERE / "compressor_process.py")]
    run = subprocess.run(script, capture_output=True, text=True, check=False, env=environment)
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout.splitlines()[-1])


def test_without_aiter_nothing_is_hooked(report: Any) -> None:
    assert "writes float32 itself" in report["without_aiter"]
    assert report["stock_dtype"] == "torch.float32"


def test_online_compress_is_refused_by_name(report: Any) -> None:
    assert report["online"].startswith("SGLANG_OPT_USE_ONLINE_COMPRESS: found online compress")


def test_the_score_stays_as_the_gemm_wrote_it(report: Any) -> None:
    assert report["direct"]
    assert report["again"]
    assert report["score_dtype"] == "torch.bfloat16"
    assert report["score_is_the_gemm"]


def test_older_releases_rebind_one_name_and_leave_the_router_alone(report: Any) -> None:
    assert report["rebound_dtype"] == "torch.bfloat16"
    assert report["rebound_once"]
    assert report["router_keeps_its_gemm"]


def test_the_backends_compress_takes_it_and_returns_float32(report: Any) -> None:
    """Against float64 with the bias unrounded: upstream's own consumer would round it to bf16, 1e-3 and more off."""
    assert report["out_dtype"] == "torch.float32"
    score, ape = np.array(report["score"]), np.array(report["ape"])
    head_dim = ape.shape[1]
    for row, end in zip(report["out"], (4, 8, 12), strict=True):
        kv, logits = score[end - 4 : end, head_dim : 2 * head_dim], score[end - 4 : end, 3 * head_dim :] + ape[4:]
        if end > 4:
            old = score[end - 8 : end - 4]
            kv = np.concatenate([old[:, :head_dim], kv])
            logits = np.concatenate([old[:, 2 * head_dim : 3 * head_dim] + ape[:4], logits])
        weight = np.exp(logits - logits.max(axis=0))
        # float32 exp, sums of eight, one quotient: under 2^-20 of values of order one.
        np.testing.assert_allclose(np.array(row), (weight * kv).sum(axis=0) / weight.sum(axis=0), atol=4e-6, rtol=4e-6)


def test_an_output_that_upstream_allocates_is_filled_in_its_dtype(report: Any) -> None:
    assert report["given_out_is_used"]


@pytest.mark.parametrize("ratio", [4, 128])
def test_decode_runs_on_the_engines_own_plan_and_is_exact(ratio: int, report: Any) -> None:
    """On a CPU upstream's own function cannot run: a step that was left to it would have ended the process."""
    found = report["decode"][str(ratio)]
    assert found["ends"] == [[request, end] for request in range(2) for end in (ratio, 2 * ratio)]
    assert found["dtypes"] == ["torch.float32"]
    # float32 exp, sums of up to 128 terms and a quotient, with the bias unrounded: under 2^-17 of values of order one
    assert found["largest_error"] < 8e-6


def test_every_decode_step_is_witnessed(report: Any) -> None:
    steps = sum(found["steps"] for found in report["decode"].values())
    assert report["decode_counts"] == {"compress/float32_arithmetic": steps}
    assert not report["decode_declined"]


def test_calls_are_witnessed(report: Any) -> None:
    assert report["counts"] == {"compressor_gate/bf16": 1, "compress/float32_arithmetic": 2}


def test_a_gate_weight_in_float32_is_a_violation_and_runs_upstream(report: Any) -> None:
    (violation,) = report["violations"]
    assert "layer 3 (compressor) wkv_gate: dtype is float32" in violation
    assert "needs bfloat16" in violation
    assert report["float32_weight_dtype"] == "torch.float32"
    assert ["compressor_gate/bf16", "activations in torch.float32, gate weight in torch.float32"] in report["declined"]


def test_startup_checks_gate_weights_only_where_the_path_is_on(report: Any) -> None:
    assert report["started"]
    assert report["upstream"] == "the option runtime is upstream"
    assert "without compressors" in report["no_compressors"]
    assert report["warned"]
    assert not report["left_alone"]
    assert "1 contract violation" in report["raised"]
