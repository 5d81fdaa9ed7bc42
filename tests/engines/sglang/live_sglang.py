"""sglang's own loaders and models in a process without a GPU, at any tensor parallel size.

Nothing of sglang is replaced but two things that ask for a GPU: the device capability and the rotary embedding's
kernel.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import torch


class _Rope(torch.nn.Module):
    def forward(self, positions: Any, q: Any, k: Any) -> Any:
        return q, k


def start(rank: int, world: int, port: int, model_path: str, **server: Any) -> Any:
    """Publish the server arguments and join the gloo group; once per process. Returns the arguments."""
    torch.cuda.get_device_capability = lambda *args, **kwargs: (9, 0)
    torch.set_num_threads(1)
    from sglang.srt.distributed import init_distributed_environment, initialize_model_parallel
    from sglang.srt.layers.dp_attention import initialize_dp_attention
    from sglang.srt.runtime_context import SpawnRanks, publish

    args = server_args(model_path, **server)
    publish(args, role="scheduler", ranks=SpawnRanks(world_rank=rank, dp_rank=0, gpu_id=rank))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    init_distributed_environment(
        world_size=world, rank=rank, local_rank=rank, backend="gloo", distributed_init_method=f"tcp://127.0.0.1:{port}"
    )
    initialize_model_parallel()
    initialize_dp_attention(server_args=args)
    import sglang.srt.layers.attention.dsa.dsa_indexer as indexer
    import sglang.srt.models.deepseek_v2 as deepseek_v2

    for module in (indexer, deepseek_v2):
        for name in ("get_rope_wrapper", "get_rope"):
            if hasattr(module, name):
                setattr(module, name, lambda *args, **kwargs: _Rope())
    return args


def server_args(model_path: str, **changes: Any) -> Any:
    from sglang.srt.server_args import ServerArgs

    base: dict[str, Any] = {
        "device": "cpu",
        "skip_tokenizer_init": True,
        "attention_backend": "torch_native",
        "mem_fraction_static": 0.3,
        "dtype": "bfloat16",
    }
    return ServerArgs(model_path=model_path, **(base | changes))


def load(args: Any, load_format: str = "auto", extra: dict[str, Any] | None = None, draft: bool = False) -> Any:
    """Load the model (or its NextN draft) through sglang's get_model."""
    from sglang.srt.configs.device_config import DeviceConfig
    from sglang.srt.configs.load_config import LoadConfig
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.model_loader import get_model

    config = ModelConfig.from_server_args(args, is_draft_model=draft)
    load_config = LoadConfig(load_format=load_format, model_loader_extra_config=dict(extra or {}))
    return get_model(model_config=config, load_config=load_config, device_config=DeviceConfig("cpu"))


@dataclass(frozen=True)
class Absorbed:
    """w_kc, w_vc and w_scale of one layer, copied, and where they are in memory."""

    w_kc: torch.Tensor
    w_vc: torch.Tensor
    w_scale: torch.Tensor | float
    pointers: tuple[int, ...]
    strides: tuple[tuple[int, ...], ...]

    @property
    def bits(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        scale = torch.as_tensor(self.w_scale, dtype=torch.float32)
        return _bits(self.w_kc), _bits(self.w_vc), scale.view(torch.int32)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.contiguous()
    return tensor.view(torch.uint8 if tensor.element_size() == 1 else torch.int16)


def attentions(model: Any) -> dict[int, Any]:
    """Layer id of the checkpoint -> attention module, of the main model or of a NextN draft."""
    if hasattr(model.model, "decoder"):
        return {model.config.num_hidden_layers: model.model.decoder.self_attn}
    layers = range(model.model.start_layer, model.model.end_layer)
    return {i: model.model.layers[i].self_attn for i in layers}


def absorbed(model: Any) -> dict[int, Absorbed]:
    return {layer: _absorbed(attn) for layer, attn in attentions(model).items()}


def _absorbed(attn: Any) -> Absorbed:
    tensors = [t for t in (attn.w_kc, attn.w_vc, attn.w_scale) if isinstance(t, torch.Tensor)]
    scale = attn.w_scale.clone() if isinstance(attn.w_scale, torch.Tensor) else attn.w_scale
    return Absorbed(
        attn.w_kc.clone(),
        attn.w_vc.clone(),
        scale,
        tuple(t.data_ptr() for t in tensors),
        tuple(t.stride() for t in tensors),
    )
