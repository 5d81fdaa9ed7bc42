"""Run in a process of its own by test_compressor_hooks: the hooks on sglang's real compressor, on a CPU.

Prints one JSON document. aiter's GEMM is stood in for by torch's, which like it takes and returns bf16.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "runtime"))

from compress_oracle import Ring, compressed

from weightprep.recipe import load_recipe, resolve

HIDDEN, HEAD_DIM, RATIO, TOKENS = 64, 128, 4, 12
CONFIG: dict[str, Any] = {
    "architectures": ["DeepseekV4ForCausalLM"],
    "num_hidden_layers": 1,
    "hidden_size": HIDDEN,
    "head_dim": HEAD_DIM,
    "index_head_dim": HEAD_DIM,
}


def build() -> Any:
    from sglang.srt.layers.attention.dsv4.compressor import Compressor

    config = SimpleNamespace(hidden_size=HIDDEN, qk_rope_head_dim=64, rms_norm_eps=1e-6)
    compressor = Compressor(config, 3, False, torch.zeros(1), RATIO, HEAD_DIM)
    generator = torch.Generator().manual_seed(0)
    weight = compressor.wkv_gate.weight
    weight.data.copy_(torch.randn(weight.shape, generator=generator) * HIDDEN**-0.5)
    compressor.ape.data.copy_(torch.randn(compressor.ape.shape, generator=generator))
    return compressor


def prefill_plan() -> Any:
    """One request of TOKENS tokens from its beginning: every fourth completes a window; nothing has to be stored."""
    from sglang.kernels.ops.attention.dsv4.compress import CompressorPrefillPlan

    record = np.dtype([("seq_len", "<u4"), ("row", "<u2"), ("held", "<u2"), ("page_0", "<i4"), ("page_1", "<i4")])
    rows = [(end, end - 1, max(0, 8 - end), 0, 0) for end in range(RATIO, TOKENS + 1, RATIO)]
    raw = np.frombuffer(np.array(rows, record).tobytes(), np.uint8).reshape(len(rows), 16)
    return CompressorPrefillPlan(RATIO, torch.from_numpy(raw.copy()), torch.empty((0, 8), dtype=torch.uint8))


def compress(compressor: Any, score: torch.Tensor, **keywords: Any) -> torch.Tensor:
    """Through the name that the backend itself calls."""
    from sglang.srt.layers.attention.dsv4 import compressor_v2

    state = torch.zeros((2, RATIO, 4 * HEAD_DIM))
    ape = compressor.ape.view(-1, HEAD_DIM)
    plan = prefill_plan()
    result: torch.Tensor = compressor_v2.compress_forward(
        kv_score_buffer=state,
        kv_score_input=score,
        ape=ape,
        plan=plan,
        compress_ratio=RATIO,
        head_dim=HEAD_DIM,
        is_online=False,
        **keywords,
    )
    return result


def decode(ratio: int, head_dim: int = 64) -> dict[str, Any]:
    """Two requests, one a token behind the other, a step at a time with the engine's own plan, against float64."""
    from sglang.kernels.ops.attention.dsv4.compress import CompressorDecodePlan
    from sglang.srt.layers.attention.dsv4 import compressor_v2

    ring, steps, window = Ring(ratio), 2 * ratio + 1, 8 if ratio == 4 else ratio
    generator = torch.Generator().manual_seed(ratio)
    width = 2 * head_dim * (window // ratio)
    histories = [torch.randn(steps, width, generator=generator).to(torch.bfloat16) for _ in range(2)]
    ape = torch.randn(window, head_dim, generator=generator)
    # what no token was stored in must not be read
    state = torch.full((2 * ring.pages_per_request, ratio, width), float("nan"))
    worst, ends, dtypes = 0.0, [], set()
    for step in range(1, steps + 1):
        lengths = {request: step - request for request in range(2) if step > request}
        plan = CompressorDecodePlan(ratio, ring.decode_plan(list(lengths), list(lengths.values())))
        out = compressor_v2.compress_forward(
            kv_score_buffer=state,
            kv_score_input=torch.stack([histories[r][n - 1] for r, n in lengths.items()]),
            ape=ape,
            plan=plan,
            compress_ratio=ratio,
            head_dim=head_dim,
            is_online=False,
        )
        dtypes.add(str(out.dtype))
        for row, (request, end) in zip(out, lengths.items(), strict=True):
            if end % ratio == 0:
                wanted = compressed(histories[request].double().numpy(), ape.double().numpy(), ratio, end)
                worst = max(worst, float(np.abs(row.double().numpy() - wanted).max()))
                ends.append((request, end))
    return {"steps": steps, "largest_error": worst, "ends": sorted(ends), "dtypes": sorted(dtypes)}


def main() -> None:
    from weightprep.engines.sglang import compressor_hooks as hooks
    from weightprep.errors import EngineError
    from weightprep.runtime import witness

    report: dict[str, Any] = {"without_aiter": hooks.register_compressor_hooks().reason}

    from sglang.kernels.ops.gemm import bf16_fp32
    from sglang.srt.environ import envs
    from sglang.srt.layers.attention.dsv4 import compressor as module

    # asks for server arguments; no context parallelism here
    module.dsa_use_prefill_cp = lambda forward_batch: False
    compressor = build()
    x = torch.randn(TOKENS, HIDDEN, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    stock = compressor._compute_wkv_gate(x)
    report["stock_dtype"] = str(stock.dtype)
    gemm = torch.nn.functional.linear

    with envs.SGLANG_OPT_USE_ONLINE_COMPRESS.override(True):
        try:
            hooks.register_compressor_hooks(gemm)
        except EngineError as error:
            report["online"] = str(error)

    # the way of 0.5.15 and 0.5.18, on the same module-level name
    upstream = module.linear_bf16_fp32
    hooks._gemm = gemm
    hooks._rebind_gate_gemm()
    hooks._rebind_gate_gemm()
    report["rebound_dtype"] = str(compressor._compute_wkv_gate(x).dtype)
    report["rebound_once"] = module.linear_bf16_fp32.weightprep_original is upstream
    report["router_keeps_its_gemm"] = bf16_fp32.linear_bf16_fp32 is upstream
    module.linear_bf16_fp32 = upstream

    witness.reset()
    path = hooks.register_compressor_hooks(gemm)
    report["direct"], report["again"] = path.direct, hooks.register_compressor_hooks(gemm).direct
    score = compressor.compute_kv_score(x, SimpleNamespace())
    report["score_dtype"] = str(score.dtype)
    report["score_is_the_gemm"] = torch.equal(score, gemm(x, compressor.wkv_gate.weight))

    out = compress(compressor, score)
    report["out_dtype"] = str(out.dtype)
    report["out"] = out.double().tolist()
    report["score"], report["ape"] = score.double().tolist(), compressor.ape.view(-1, HEAD_DIM).double().tolist()
    given = torch.full((TOKENS // RATIO, HEAD_DIM), float("nan"), dtype=torch.bfloat16)
    kept = compress(compressor, score, out=given)
    report["given_out_is_used"] = kept is given and bool((given == out.to(torch.bfloat16)).all())
    report["counts"] = witness.counts()
    witness.reset()
    report["decode"] = {ratio: decode(ratio) for ratio in (4, 128)}
    report["decode_counts"], report["decode_declined"] = witness.counts(), list(witness.declined())

    from weightprep.errors import ContractError

    model = torch.nn.ModuleDict({"compressor": compressor})
    import weightprep.engines.sglang.compressor_check as check

    # the real one looks for aiter; it has run above
    check.register_compressor_hooks = lambda: hooks.CompressorPath(True, "hooked above")
    start_compressors = check.start_compressors
    plan = resolve(load_recipe("deepseek_v4"), CONFIG)
    options = {"runtime": "auto", "on_violation": "error", "target": "gfx950"}
    report["started"] = start_compressors(model, plan, **options).direct
    report["upstream"] = start_compressors(model, plan, **options | {"runtime": "upstream"}).reason
    try:
        start_compressors(torch.nn.Linear(2, 2), plan, **options)
    except EngineError as error:
        report["no_compressors"] = str(error)

    compressor.wkv_gate.weight.data = compressor.wkv_gate.weight.data.float()
    report["violations"] = [str(violation) for violation in check.compressor_violations(model, plan, "gfx950")]
    report["warned"] = start_compressors(model, plan, **options | {"on_violation": "warn"}).direct
    report["left_alone"] = start_compressors(model, plan, **options | {"runtime": "upstream"}).direct
    try:
        start_compressors(model, plan, **options)
    except ContractError as error:
        report["raised"] = str(error)
    report["float32_weight_dtype"] = str(compressor._compute_wkv_gate(x.float()).dtype)
    report["declined"] = [list(key) for key in witness.declined()]
    print(json.dumps(report))


if __name__ == "__main__":
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    with torch.inference_mode():
        main()
