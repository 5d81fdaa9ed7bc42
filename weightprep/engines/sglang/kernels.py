"""The absorbed matmuls as this server will run them, callable alone."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch

from weightprep.engines.sglang.canary import AbsorbKernels, Sample
from weightprep.engines.sglang.versions import FORWARD_MLA, FORWARD_MLA_ROCM
from weightprep.runtime.absorb import absorb_q, absorb_v
from weightprep.runtime.choice import Backend

__all__ = ["CudaKernels", "RocmKernels", "RuntimeKernels", "server_kernels"]


@dataclass(frozen=True, slots=True)
class RuntimeKernels:
    """weightprep's own, by backend."""

    backend: Backend

    def q(self, q_nope: torch.Tensor, sample: Sample) -> torch.Tensor:
        scale, mx_scale = sample.scales_of("w_kc")
        return absorb_q(q_nope, sample.w_kc, scale, mx_scale=mx_scale, head_major=False, backend=self.backend)

    def v(self, attn_out: torch.Tensor, sample: Sample) -> torch.Tensor:
        scale, mx_scale = sample.scales_of("w_vc")
        out = absorb_v(attn_out, sample.w_vc, scale, mx_scale=mx_scale, backend=self.backend)
        if not isinstance(out, torch.Tensor):
            raise TypeError("absorb_v quantized an output that was asked for in bf16")
        return out


@dataclass(frozen=True, slots=True)
class RocmKernels:
    """sglang's functions on ROCm as they are now: its own, or with weightprep's hooks around them.

    :param module: forward_mla_rocm
    """

    module: Any

    def q(self, q_nope: torch.Tensor, sample: Sample) -> torch.Tensor:
        out: torch.Tensor = self.module.rocm_absorb_q_bmm(_attention(sample), q_nope, is_capture_mode=False)
        return out.transpose(0, 1)

    def v(self, attn_out: torch.Tensor, sample: Sample) -> torch.Tensor:
        out: torch.Tensor = self.module.rocm_absorb_v_bmm(_attention(sample), attn_out)
        return out.reshape(attn_out.shape[0], sample.w_vc.shape[0], sample.w_vc.shape[2])


@dataclass(frozen=True, slots=True)
class CudaKernels:
    """The products that sglang's forward_mla makes on CUDA, with its bmm_fp8 as it is now: its own, or hooked.

    An fp8 weight takes activations in e4m3fn with one scale for the tensor, as sglang quantizes them; a bf16 weight
    goes to torch.bmm.

    :param module: forward_mla
    """

    module: Any

    def q(self, q_nope: torch.Tensor, sample: Sample) -> torch.Tensor:
        return self._product(q_nope, sample.w_kc, sample.w_scale)

    def v(self, attn_out: torch.Tensor, sample: Sample) -> torch.Tensor:
        return self._product(attn_out, sample.w_vc, sample.w_scale)

    def _product(self, x: torch.Tensor, w: torch.Tensor, w_scale: torch.Tensor | float) -> torch.Tensor:
        heads = x.transpose(0, 1)
        if w.dtype != torch.float8_e4m3fn:
            return torch.bmm(heads, w).transpose(0, 1)
        wide = heads.float().contiguous()
        x_scale = (wide.abs().amax() / torch.finfo(w.dtype).max).reshape(1)
        out: torch.Tensor = self.module.bmm_fp8((wide / x_scale).to(w.dtype), w, x_scale, w_scale, torch.bfloat16)
        return out.transpose(0, 1)


def server_kernels(runtime: str) -> AbsorbKernels | None:
    """What the server runs with this choice of runtime; None where upstream's cannot be called alone.

    Without a GPU that is the eager reference, since sglang's CPU path is a plain torch.bmm.
    """
    if not torch.cuda.is_available():
        return RuntimeKernels(Backend.TORCH)
    if torch.version.hip is not None:
        try:
            module = importlib.import_module(FORWARD_MLA_ROCM)
        except ModuleNotFoundError:
            # before 0.5.18 the matmuls are written into the attention's forward
            module = None
        if module is not None and hasattr(module, "rocm_absorb_q_bmm"):
            return RocmKernels(module)
    else:
        module = importlib.import_module(FORWARD_MLA)
        if hasattr(module, "bmm_fp8"):
            return CudaKernels(module)
    return None if runtime == "upstream" else RuntimeKernels(Backend(runtime))


def _attention(sample: Sample) -> SimpleNamespace:
    """What those functions read of an attention; an o_proj in bf16 has them return bf16."""
    return SimpleNamespace(
        w_kc=sample.w_kc,
        w_vc=sample.w_vc,
        w_scale=sample.w_scale,
        w_scale_k=sample.w_scale_k,
        w_scale_v=sample.w_scale_v,
        num_local_heads=sample.w_kc.shape[0],
        o_proj=SimpleNamespace(weight=torch.empty(0, dtype=torch.bfloat16)),
    )
