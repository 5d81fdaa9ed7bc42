"""sglang's own forward_absorb_prepare and forward_absorb_core on the CPU, around whatever kernels their module binds.

What is replaced is what a CPU has not: the attention itself, the projections, and the process groups.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

METHODS = "sglang.srt.models.deepseek_common.attention_forward_methods"
HEADS, NOPE, ROPE, RANK, V, ROWS = 2, 192, 64, 512, 256, 3
BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn


class Attention(SimpleNamespace):
    """What the methods read of an attention; flags that are not set are off."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return None

    dcp_size = cp_size = 1

    def _skip_rope_for_dsa_tilelang_fused(self) -> bool:
        return False

    def _skip_rope_for_aiter_fused_mla(self) -> bool:
        return False

    def _skip_rope_for_nsa_tilelang_fused(self) -> bool:
        return False

    def _can_fuse_bmm_into_attention(self, *_: Any, **__: Any) -> bool:
        return False

    def is_dcp_mla_decode_phase(self, *_: Any, **__: Any) -> bool:
        return False

    def is_dcp_q_replicate_phase(self, *_: Any, **__: Any) -> bool:
        return False

    def prepare_attention_output_gate(self, *_: Any, **__: Any) -> None:
        return None

    def _fuse_rope_for_trtllm_mla(self, forward_batch: Any) -> bool:
        return False

    def _q8kv8_born_fp8_q_backend(self, *_: Any, **__: Any) -> bool:
        return False

    def _split_q_nope_pe(self, q: torch.Tensor, latent: torch.Tensor) -> Any:
        nope, pe = q.split([NOPE, ROPE], dim=-1)
        return nope, pe, latent[..., RANK:].unsqueeze(1)


class Seen(Exception):
    """Carries what o_proj was given out of upstream's function."""


def add_lora(attention: Any, attn_output: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """In the place of apply_v_correction: like it in place, on a view of the flat result."""
    out.view(-1, HEADS, V).add_(attn_output[..., :V] * 0.125)
    return out


def add_lora_q(attention: Any, q_nope: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """In the place of apply_q_correction: out is (M, H, rank)."""
    out[..., :NOPE].add_(q_nope * 0.125)
    return out


@contextlib.contextmanager
def platform(module: Any, *, hip: bool) -> Iterator[None]:
    """The module as on gfx95 with aiter, or as on CUDA."""
    flags = {"_is_hip": hip, "_is_cuda": not hip, "_is_cpu": False, "_use_aiter": hip, "_use_aiter_gfx95": hip}
    flags |= {"_is_cublas_ge_129": True, "_use_aiter_bpreshuffle_gfx95": False, "_is_gfx95_supported": hip}
    before = {name: getattr(module, name) for name in flags if hasattr(module, name)}
    for name in before:
        setattr(module, name, flags[name])
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(module, name, value)


def quiet(module: Any) -> None:
    """Nothing of several ranks, of graphs, or of the server's arguments."""
    off = ("dcp_enabled", "is_in_tc_piecewise_cuda_graph", "dsa_use_prefill_cp", "mla_use_prefill_cp")
    for name in (*off, "is_dcp_mla_decode_phase", "nsa_use_prefill_cp", "mla_use_dcp", "dsa_use_prefill_dcp"):
        if hasattr(module, name):
            setattr(module, name, lambda *_, **__: False)
    # the names under which releases have the correction
    correction = importlib.import_module("sglang.srt.lora.deepseek_mla_correction")
    module.apply_kv_b_lora_v_correction = correction.apply_v_correction = add_lora
    module.apply_kv_b_lora_q_correction = correction.apply_q_correction = add_lora_q
    if hasattr(module, "prepare_kv_for_attention"):
        module.prepare_kv_for_attention = lambda attn, batch, k_nope, k_pe, **_: (k_nope, k_pe)
    if hasattr(module, "get_parallel"):
        module.get_parallel = lambda: SimpleNamespace(
            dcp_enabled=False, dcp_replicate_q_proj=False, attn_dcp_size=1, attn_cp_size=1, attn_tp_size=1
        )


def value_product(module: Any, attention: Any, x: torch.Tensor, *, hip: bool) -> Any:
    """What upstream's forward_absorb_core hands to o_proj for an attention output x (M, H, rank)."""

    def o_proj(given: Any, *_: Any, **__: Any) -> Any:
        raise Seen(given)

    for name, value in vars(attention.o_proj).items():
        setattr(o_proj, name, value)
    core = Attention(**vars(attention) | {"o_proj": o_proj})
    core.attn_mqa = lambda *_, **__: x.reshape(x.shape[0], -1)
    core.current_attention_backend, core.kv_lora_rank, core.v_head_dim = "flashinfer", RANK, V
    batch = Attention(forward_mode=SimpleNamespace(is_decode=lambda: True, is_extend=lambda *_: False))
    method = _mixin(module).forward_absorb_core
    zeros = torch.zeros((x.shape[0], HEADS, 1), dtype=BF16)
    arguments = [zeros, zeros, zeros, zeros, batch, None, None, None, None]
    with platform(module, hip=hip):
        try:
            method(core, *arguments)
        except Seen as seen:
            return seen.args[0]
    raise AssertionError("o_proj was not reached")


def query_product(module: Any, attention: Any, x: torch.Tensor, *, hip: bool) -> torch.Tensor:
    """q_nope_out (M, H, rank) of upstream's forward_absorb_prepare for q_nope x (M, H, nope)."""
    q = torch.cat((x, torch.zeros((*x.shape[:2], ROPE), dtype=BF16)), dim=-1)
    latent = torch.zeros((x.shape[0], RANK + ROPE), dtype=BF16)
    prepare = Attention(**vars(attention))
    prepare.q_proj = lambda hidden: (q.flatten(1), None)
    prepare.kv_a_proj_with_mqa = lambda hidden: (latent, None)
    prepare.kv_a_layernorm = lambda k: k
    prepare.kv_lora_rank, prepare.qk_nope_head_dim, prepare.qk_rope_head_dim = RANK, NOPE, ROPE
    prepare.qk_head_dim, prepare.current_attention_backend = NOPE + ROPE, "flashinfer"
    batch = Attention(forward_mode=SimpleNamespace(is_decode=lambda: True, is_extend=lambda *_: False))
    with platform(module, hip=hip):
        result = _mixin(module).forward_absorb_prepare(prepare, None, latent, batch, None)
    return result[2]


def _mixin(module: Any) -> Any:
    return module.DeepseekMLAForwardMixin


class Copies(TorchDispatchMode):
    """Counts copies of `numel` values of one dtype: what a flatten of something transposed or a `contiguous` does."""

    def __init__(self, numel: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.numel, self.dtype, self.count = numel, dtype, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        copied = func in (torch.ops.aten.clone.default, torch.ops.aten.copy_.default)
        if copied and args[0].dtype == self.dtype and args[0].numel() == self.numel:
            self.count += 1
        return func(*args, **(kwargs or {}))


def bmm_fp8(
    a: torch.Tensor, b: torch.Tensor, a_scale: torch.Tensor, b_scale: torch.Tensor, dtype: torch.dtype, out: Any = None
) -> torch.Tensor:
    """In the place of the CUDA kernel: (H, M, N), contiguous, as that one writes it."""
    return (torch.bmm(a.float(), b.float()) * a_scale * b_scale).to(dtype)


def forward_mla() -> Any:
    module = importlib.import_module(f"{METHODS}.forward_mla")
    quiet(module)
    return module
