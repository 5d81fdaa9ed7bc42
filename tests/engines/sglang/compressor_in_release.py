"""One release's own compressor on the CPU with weightprep's hooks.

aiter's GEMM is stood in for by torch's, which like it takes and returns bf16.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

HIDDEN, HEAD_DIM, TOKENS = 64, 128, 12
COMPRESSOR = "sglang.srt.layers.attention.dsv4.compressor"


def build(ratio: int) -> Any:
    module = importlib.import_module(COMPRESSOR)
    # asks for server arguments; no context parallelism here
    module.dsa_use_prefill_cp = lambda forward_batch: False
    config = SimpleNamespace(hidden_size=HIDDEN, qk_rope_head_dim=64, rms_norm_eps=1e-6)
    compressor = module.Compressor(config, 3, False, torch.zeros(1), ratio, HEAD_DIM)
    generator = torch.Generator().manual_seed(0)
    weight = compressor.wkv_gate.weight
    weight.data.copy_(torch.randn(weight.shape, generator=generator) * HIDDEN**-0.5)
    compressor.ape.data.copy_(torch.randn(compressor.ape.shape, generator=generator))
    return compressor


def plan_of(module: Any, ratio: int, tokens: int) -> Any:
    """The release's own plan of one request of `tokens` tokens from its beginning; nothing has to be stored."""
    window = 8 if ratio == 4 else 128
    record = np.dtype([("seq_len", "<u4"), ("row", "<u2"), ("held", "<u2"), ("page_0", "<i4"), ("page_1", "<i4")])
    rows = [(end, end - 1, max(0, window - end), 0, 0) for end in range(ratio, tokens + 1, ratio)]
    raw = np.frombuffer(np.array(rows, record).tobytes(), np.uint8).reshape(len(rows), 16)
    return module.CompressorPrefillPlan(ratio, torch.from_numpy(raw.copy()), torch.empty((0, 8), dtype=torch.uint8))


def exact(score: np.ndarray, ape: np.ndarray, ratio: int) -> np.ndarray:
    """float64 of every completed window, from float64 scores and the bias as it is."""
    d, rows = HEAD_DIM, []
    for end in range(ratio, len(score) + 1, ratio):
        now = score[end - ratio : end]
        if ratio == 128:
            kv, logits = now[:, :d], now[:, d:] + ape
        else:
            kv, logits = now[:, d : 2 * d], now[:, 3 * d :] + ape[4:]
            if end > ratio:
                old = score[end - 2 * ratio : end - ratio]
                kv = np.concatenate([old[:, :d], kv])
                logits = np.concatenate([old[:, 2 * d : 3 * d] + ape[:4], logits])
        weight = np.exp(logits - logits.max(axis=0))
        rows.append((weight * kv).sum(axis=0) / weight.sum(axis=0))
    return np.array(rows)


def cases() -> Iterator[dict[str, Any]]:
    from weightprep.engines.sglang import compressor_hooks as hooks
    from weightprep.engines.sglang.versions import installed_root
    from weightprep.runtime import witness

    root = installed_root()
    assert root is not None
    targets = hooks.compressor_targets(root)
    module = importlib.import_module(COMPRESSOR)
    gemm = torch.nn.functional.linear
    stock_gemm = module.linear_bf16_fp32
    path = hooks.register_compressor_hooks(gemm)
    again = hooks.register_compressor_hooks(gemm)
    router = importlib.import_module(stock_gemm.__module__)
    common = {
        "direct": [path.direct, again.direct],
        "reason": path.reason,
        "targets": None if targets is None else [targets.producer, targets.consumer],
        "router_keeps_its_gemm": getattr(router, stock_gemm.__name__) is stock_gemm,
    }
    if targets is None:
        yield common
        return
    v2 = importlib.import_module("sglang.srt.layers.attention.dsv4.compressor_v2")
    compress = importlib.import_module(targets.consumer.rsplit(".", 1)[0])
    for ratio, tokens in ((4, TOKENS), (128, 256)):
        witness.reset()
        compressor = build(ratio)
        x = torch.randn(tokens, HIDDEN, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
        score = compressor.compute_kv_score(x, SimpleNamespace())
        ape = compressor.ape.view(-1, HEAD_DIM)
        arguments = {
            "kv_score_buffer": torch.zeros((2, ratio, score.shape[1])),
            "kv_score_input": score,
            "ape": ape,
            "plan": plan_of(compress, ratio, tokens),
            "compress_ratio": ratio,
            "head_dim": HEAD_DIM,
            "is_online": False,
        }
        # through the name that the release's backend itself calls
        out = v2.compress_forward(**arguments)
        given = torch.full(out.shape, float("nan"), dtype=torch.bfloat16)
        kept = v2.compress_forward(**arguments, out=given)
        wanted = exact(score.double().numpy(), ape.double().detach().numpy(), ratio)
        yield common | {
            "ratio": ratio,
            "score_dtype": str(score.dtype),
            "score_is_the_gemm": torch.equal(score, gemm(x, compressor.wkv_gate.weight)),
            "out_dtype": str(out.dtype),
            "largest_error": float(np.abs(out.double().numpy() - wanted).max()),
            "given_out_is_used": kept is given and torch.equal(given, out.to(torch.bfloat16)),
            "counts": witness.counts(),
            "declined": [list(key) for key in witness.declined()],
        }
