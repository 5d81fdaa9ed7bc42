"""One release's own call sites of aiter's quantizations on the CPU, as they are and with weightprep's hooks, for both
meanings of transpose_scale.

aiter's RMSNorm quantization is the wheel's Triton kernel in the interpreter; its group quantization is HIP and stood in
for.
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch
from forward_in_release import BF16, FP8, METHODS, Copies

K, GROUPS = 768, 6
EPS = 1e-6
# a shape for which sglang runs aiter's Triton GEMM, and one for which it runs the bpreshuffle GEMM
TRITON_SHAPE, SHUFFLED_SHAPE = (512, 7168), (256, K)


class Reached(Exception):
    """Carries what a projection was given out of upstream's function."""


def group_quant(x: torch.Tensor, quant_dtype: torch.dtype, group_size: int = 128, transpose_scale: bool = False) -> Any:
    """As aiter's per_group_quant_hip: with transpose_scale, transposed bytes behind row-major strides."""
    rows, columns = x.shape
    groups = columns // group_size
    largest = torch.empty((groups, rows) if transpose_scale else (rows, groups))
    scale = largest.t() if transpose_scale else largest
    grouped = x.float().view(rows, groups, group_size)
    torch.amax(grouped.abs(), dim=2, out=scale)
    scale.div_(448)
    return (grouped / scale[..., None]).to(quant_dtype).view(rows, columns), largest.view(rows, groups)


def as_strided_view(producer: Callable[..., Any]) -> Callable[..., Any]:
    """`producer` with the other meaning of transpose_scale: a view with the strides (1, rows)."""

    def produce(*arguments: Any, transpose_scale: bool = False, **keywords: Any) -> Any:
        result = producer(*arguments, transpose_scale=transpose_scale, **keywords)
        pair = result if isinstance(result[1], torch.Tensor) and result[1].dtype == torch.float32 else result[0]
        if not transpose_scale:
            return result
        told = (pair[0], pair[1].as_strided(pair[1].shape, (1, pair[1].shape[0])))
        return told if pair is result else (told, *result[1:])

    return produce


class Release:
    """sglang's modules as on gfx95 with aiter and ROCm 7.2, and what its GEMMs were given."""

    def __init__(self, rms: Callable[..., Any], flatten: Callable[..., Any], group: Callable[..., Any]) -> None:
        self.utils = importlib.import_module("sglang.srt.layers.quantization.fp8_utils")
        self.v4 = importlib.import_module("sglang.srt.models.deepseek_v4")
        self.rocm = _optional(f"{METHODS}.forward_mla_rocm")
        self.mha = _optional(f"{METHODS}.forward_mha_rocm") or importlib.import_module(f"{METHODS}.forward_mha")
        norms = _optional("sglang.srt.layers.layer_boundary.residual.add_norm")
        self.norms = norms or importlib.import_module("sglang.srt.layers.communicator")
        # before 0.5.18 the ROCm products stand in the shared module
        mla = self.rocm or importlib.import_module(f"{METHODS}.forward_mla")
        self.modules = [self.utils, self.v4, mla, self.mha, self.norms]
        for module in self.modules:
            for flag in ("_use_aiter", "_use_aiter_gfx95", "_use_aiter_bpreshuffle_gfx95", "_is_gfx95_supported"):
                setattr(module, flag, True)
            module.fused_rms_fp8_group_quant = rms
        mla.fused_flatten_fp8_group_quant = flatten
        self.utils.aiter = SimpleNamespace(dtypes=SimpleNamespace(fp8=FP8))
        self.utils.aiter_per1x128_quant = functools.partial(group, group_size=128)
        self.utils.gemm_a8w8_blockscale_bpreshuffle = functools.partial(self._gemm, "bpreshuffle")
        self.utils.triton_gemm_a8w8_blockscale = functools.partial(self._gemm, "triton")
        self.given: tuple[str, torch.Tensor, torch.Tensor] | None = None

    def _gemm(self, kind: str, q: torch.Tensor, w: torch.Tensor, x_scale: torch.Tensor, *_: Any, dtype: Any) -> Any:
        self.given = kind, q, x_scale
        return torch.zeros((q.shape[0], w.shape[0]), dtype=dtype)

    def linear(self, x: torch.Tensor, shape: tuple[int, int], scale: torch.Tensor | None = None) -> Any:
        """What the GEMM that sglang chooses for a weight of `shape` is given: its name, values, scales."""
        weight = torch.zeros(shape, dtype=FP8)
        self.utils.aiter_w8a8_block_fp8_linear(x, weight, [128, 128], torch.ones(1), input_scale=scale)
        return self.given

    def v4_norm(self, x: torch.Tensor, weight: torch.Tensor) -> Any:
        (q, scale), _ = self.v4._fused_rmsnorm_fp8_quant(x, weight, EPS)
        return self.linear(q, SHUFFLED_SHAPE, scale)

    def attention_norm(self, x: torch.Tensor, weight: torch.Tensor) -> Any:
        norm = SimpleNamespace(weight=weight, variance_epsilon=EPS)
        self.norms.get_attn_tp_context = lambda: SimpleNamespace(is_dsa=False, input_scattered=False)
        if hasattr(self.norms, "_update_and_read_residual_aiter_fp8_group"):
            (q, scale), _ = self.norms._update_and_read_residual_aiter_fp8_group(norm, x, None, None)
            return self.linear(q, SHUFFLED_SHAPE, scale)

        def stop(hidden_states: Any, **_: Any) -> Any:
            raise Reached(hidden_states)

        communicator = SimpleNamespace(
            input_layernorm=norm, _sp_variant=None, _communicate_simple_fn=stop, _context=None, qkv_latent_func=None
        )
        try:
            self.norms.LayerCommunicator.prepare_attn(communicator, x, None, None, quant_format="fp8")
        except Reached as reached:
            q, scale = reached.args[0][:2]
        return self.linear(q, SHUFFLED_SHAPE, scale)

    def mha_q(self, x: torch.Tensor, weight: torch.Tensor) -> Any:
        def stop(pair: Any) -> Any:
            raise Reached(pair)

        stop.weight = torch.zeros(1, dtype=FP8)  # type: ignore[attr-defined]
        stop.weight_scale = torch.ones((2, 2))  # type: ignore[attr-defined]
        self.mha.get_attn_tp_context = lambda: SimpleNamespace(fetch_qkv_latent=lambda: torch.cat((x, x), dim=1))
        attention = SimpleNamespace(
            q_lora_rank=K,
            kv_lora_rank=K - 64,
            qk_rope_head_dim=64,
            use_dsa=False,
            q_b_proj=stop,
            q_a_layernorm=SimpleNamespace(weight=weight, variance_epsilon=EPS),
        )
        mixin = getattr(self.mha, "DeepseekMHARocmForwardMixin", None) or self.mha.DeepseekMHAForwardMixin
        prepare = getattr(mixin, "forward_normal_rocm_prepare", None) or mixin.forward_normal_prepare
        try:
            prepare(attention, None, None, None, None)
        except Reached as reached:
            q, scale = reached.args[0][:2]
        return self.linear(q, SHUFFLED_SHAPE, scale)

    def flattened(self, x: torch.Tensor) -> Any:
        """x (M, H, N) through rocm_absorb_v_bmm with weights that are the identity, for an o_proj in block fp8."""
        heads, columns = x.shape[1:]
        attention = SimpleNamespace(
            w_kc=torch.zeros(1, dtype=BF16),
            w_vc=torch.eye(columns, dtype=BF16).expand(heads, columns, columns).contiguous(),
            w_scale=1.0,
            num_local_heads=heads,
            o_proj=SimpleNamespace(weight=torch.zeros(1, dtype=FP8), weight_scale=torch.ones((2, 2))),
        )
        q, scale = self.rocm.rocm_absorb_v_bmm(attention, x)
        return self.linear(q, (256, heads * columns), scale)


def absorbed(quant: Any) -> Iterator[dict[str, Any]]:
    """The hooked V product for an o_proj in block fp8, through sglang's own linear, where its GEMM reads columns.

    :param quant: aiter.ops.triton.fused_fp8_quant of the wheel
    """
    import absorb_against_upstream as absorb

    from weightprep.engines.sglang import runtime_hooks
    from weightprep.engines.sglang.guard import ensure_hook
    from weightprep.runtime import witness

    flatten = lambda x, transpose_scale=False, **rest: quant.fused_flatten_fp8_group_quant(x, **rest)  # noqa: E731
    release = Release(quant.fused_rms_fp8_group_quant, flatten, group_quant)
    if release.rocm is None:
        return
    importlib.import_module("sglang.srt.models.deepseek_common.utils")._use_aiter_bpreshuffle_gfx95 = True
    ensure_hook(f"{METHODS}.forward_mla_rocm.{runtime_hooks.V_PATH}", runtime_hooks.rocm_absorb_v)
    attention, exact = absorb.attention("fp8", "fp8_block")
    heads, rank, columns = exact["w_vc"].shape
    width = heads * columns
    for rows in (1, 2, 5):
        x = torch.randn((rows, heads, rank), generator=torch.Generator().manual_seed(rows)).to(BF16)
        witness.reset()
        q, scale = release.rocm.rocm_absorb_v_bmm(attention, x)
        call = functools.partial(release.linear, q, (256, width), scale)
        read = run(call, rows, width // 128)
        values = torch.tensor(read["q"], dtype=torch.uint8).view(FP8).double().view(rows, width)
        given = values * torch.tensor(read["scales"], dtype=torch.float64).repeat_interleave(128, dim=1)
        wanted = torch.bmm(x.double().transpose(0, 1), exact["w_vc"]).transpose(0, 1).flatten(1)
        yield {
            "rows": rows,
            "gemm": read["gemm"],
            "copies": read["copies"],
            "strides": scale.stride(),
            "error": absorb.relative(given, wanted),
            "counts": witness.counts(),
            "declined": [list(key) for key in witness.declined()],
        }


def _optional(name: str) -> Any | None:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError:
        return None


def run(call: Callable[[], Any], rows: int, groups: int) -> dict[str, Any]:
    """What the GEMM was given: the scales as it reads them, column-major bytes or by their strides."""
    with Copies(rows * groups, torch.float32) as copies:
        kind, q, scale = call()
    read = scale.as_strided((rows, groups), (1, rows)) if kind == "bpreshuffle" else scale
    return {"gemm": kind, "q": q.view(torch.uint8).tolist(), "scales": read.tolist(), "copies": copies.count}


def cases(quant: Any) -> Iterator[dict[str, Any]]:
    """:param quant: aiter.ops.triton.fused_fp8_quant of the wheel"""
    from weightprep.engines.sglang import scale_hooks
    from weightprep.engines.sglang.scale_check import probe_producers, scale_producers
    from weightprep.runtime import witness

    sys.modules["aiter.ops.quant"] = SimpleNamespace(per_group_quant_hip=group_quant)  # type: ignore[assignment]
    # what upstream calls where the wheel's own lacks the parameter: it ignores it
    flatten = lambda x, transpose_scale=False, **rest: quant.fused_flatten_fp8_group_quant(x, **rest)  # noqa: E731
    generator = torch.Generator().manual_seed(0)
    weight = torch.rand(K, generator=generator).to(BF16)
    for behaviour in ("transposed bytes", "strided view"):
        told = as_strided_view if behaviour == "strided view" else lambda producer: producer
        rms, group = told(quant.fused_rms_fp8_group_quant), told(group_quant)
        for rows in (1, 5) if behaviour == "transposed bytes" else (5,):
            x = torch.randn((rows, K), generator=generator).to(BF16)
            long = torch.randn((rows, TRITON_SHAPE[1]), generator=generator).to(BF16)
            heads = torch.randn((rows, 3, 256), generator=generator).to(BF16)
            direct = rms(x, weight, EPS, group_size=128, dtype_quant=FP8)[0]
            wanted = {
                "linear": group(x, FP8),
                "linear_triton": group(long, FP8),
                "v4_norm": direct,
                "attention_norm": direct,
                "mha_q": direct,
                "flattened": flatten(heads, group_size=128, dtype_quant=FP8),
            }
            release = Release(rms, flatten, group)
            calls: dict[str, Callable[[], Any]] = {
                "linear": lambda r=release, x=x: r.linear(x, SHUFFLED_SHAPE),
                "linear_triton": lambda r=release, x=long: r.linear(x, TRITON_SHAPE),
                "v4_norm": lambda r=release, x=x: r.v4_norm(x, weight),
                "attention_norm": lambda r=release, x=x: r.attention_norm(x, weight),
                "mha_q": lambda r=release, x=x: r.mha_q(x, weight),
            }
            if release.rocm is not None:
                calls["flattened"] = lambda r=release, x=heads: r.flattened(x)
            before = {name: run(call, rows, wanted[name][1].shape[1]) for name, call in calls.items()}
            sys.modules["aiter.ops.triton.fused_fp8_quant"] = SimpleNamespace(  # type: ignore[assignment]
                fused_rms_fp8_group_quant=rms, fused_flatten_fp8_group_quant=quant.fused_flatten_fp8_group_quant
            )
            sys.modules["aiter.ops.quant"] = SimpleNamespace(per_group_quant_hip=group)  # type: ignore[assignment]
            producers = {report.name: report.producer for report in probe_producers(scale_producers(), "cpu")}
            hooked = scale_hooks.hook_scale_sites({n: p for n, p in producers.items() if p is not None})
            again = scale_hooks.hook_scale_sites({n: p for n, p in producers.items() if p is not None})
            for name, call in calls.items():
                witness.reset()
                after = run(call, rows, wanted[name][1].shape[1])
                q, scale = wanted[name]
                truth = {"q": q.view(torch.uint8).tolist(), "scales": scale.tolist()}
                yield {
                    "case": name,
                    "behaviour": behaviour,
                    "rows": rows,
                    "gemm": after["gemm"],
                    "copies": [before[name]["copies"], after["copies"]],
                    "right": [all(side[key] == truth[key] for key in truth) for side in (before[name], after)],
                    "counts": witness.counts(),
                    "declined": [list(key) for key in witness.declined()],
                    "sites": sorted(f"{site.module.rsplit('.', 1)[1]}.{site.name}" for site in hooked),
                    "hooked_once": hooked == again,
                }
