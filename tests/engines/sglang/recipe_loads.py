"""Loads of one checkpoint after the other inside a rank, for the tests of recipes."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import live_sglang
import on_ranks
import torch

ROLES = ("w_kc", "w_vc", "w_scale", "w_scale_k", "w_scale_v")


@dataclass(frozen=True)
class Loaded:
    """A model's absorbed weights by layer of the checkpoint, and the startup report where the plugin made one."""

    layers: dict[int, dict[str, torch.Tensor]]
    strides: dict[int, dict[str, tuple[int, ...]]]
    report: dict[str, Any]


@contextmanager
def _without_a_gpu() -> Iterator[None]:
    """sglang builds Quark's schemes where the device says what it can do, and its rope from a package for GPUs; no
    tensor that a checkpoint fills depends on either.
    """
    import sglang.srt.layers.quantization.quark.quark as quark
    import sglang.srt.models.glm5_next as glm5_next

    kept = quark.get_device_capability, glm5_next.get_rope
    quark.get_device_capability = lambda *args, **kwargs: (9, 5)
    glm5_next.get_rope = lambda *args, **kwargs: torch.nn.Identity()
    try:
        yield
    finally:
        quark.get_device_capability, glm5_next.get_rope = kept


def load(state: Any, path: Path, load_format: str, extra: dict[str, Any], folder: Path, draft: bool) -> Loaded:
    """The model at `path`, or its NextN draft, through sglang's get_model."""
    file = folder / "report.json"
    os.environ["WEIGHTPREP_REPORT"] = str(file)
    try:
        with _without_a_gpu():
            model = on_ranks.load_model_without_amx(state, path, load_format, extra, draft)
    finally:
        del os.environ["WEIGHTPREP_REPORT"]
    file = file.with_name("report.nextn.json") if draft else file
    report = json.loads(file.read_text()) if file.is_file() else {}
    file.unlink(missing_ok=True)
    return _loaded(model, report)


def load_with_upstreams_mxfp4(state: Any, path: Path) -> Loaded:
    """What sglang's own load makes on gfx950 of a Quark checkpoint of DeepSeek; aiter's quantizer needs a GPU and is
    the NumPy oracle here.
    """
    import absorbed_oracle
    import sglang.srt.models.deepseek_common.deepseek_weight_loader as upstream
    from sglang.srt.layers.quantization.quark import utils

    real_tensor = torch.tensor
    kept = getattr(utils, "dynamic_mxfp4_quant", None)
    upstream._use_aiter_gfx95 = True
    upstream.quark_post_load_weights = utils.quark_post_load_weights
    utils.dynamic_mxfp4_quant = absorbed_oracle.scalar_mxfp4
    # its table of e2m1 values is built on device "cuda"
    torch.tensor = lambda *args, **kwargs: real_tensor(*args, **{**kwargs, "device": "cpu"})
    try:
        with _without_a_gpu():
            return _loaded(on_ranks.load_model_without_amx(state, path, "auto", {}, False), {})
    finally:
        torch.tensor = real_tensor
        utils.dynamic_mxfp4_quant = kept
        upstream._use_aiter_gfx95 = False


def _loaded(model: Any, report: dict[str, Any]) -> Loaded:
    attentions = live_sglang.attentions(getattr(model, "language_model", None) or model)
    layers, strides = {}, {}
    for layer, attention in attentions.items():
        found = {role: getattr(attention, role, None) for role in ROLES}
        tensors = {role: tensor for role, tensor in found.items() if isinstance(tensor, torch.Tensor)}
        if not tensors:
            # a layer of linear attention
            continue
        layers[layer] = {role: tensor.clone() for role, tensor in tensors.items()}
        strides[layer] = {role: tensor.stride() for role, tensor in tensors.items()}
    return Loaded(layers, strides, report)
