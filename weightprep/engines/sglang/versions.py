"""The one map of what the plugin needs of sglang, by name, and how to tell that an installed sglang has it.

The names are looked up in sglang's source text, see source_names. A release that this map does not know is judged by
the same look.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from packaging.version import InvalidVersion, Version

from weightprep.contracts import READ_RELEASES
from weightprep.engines.sglang.source_names import resolves
from weightprep.errors import EngineError

__all__ = [
    "BMM_FP8",
    "COMPRESSOR",
    "COMPRESS_FORWARD",
    "FORWARD_MLA",
    "FORWARD_MLA_ROCM",
    "FP8_KERNEL",
    "FUSED_ROPE",
    "GATE",
    "GATE_GEMM",
    "GET_MODEL_LOADER",
    "KNOWN",
    "LORA_CORRECTION",
    "MATERIALIZE",
    "MXFP4_KERNEL",
    "OLDEST",
    "POST_LOAD_WEIGHTS",
    "ROCM_ABSORB_Q",
    "ROCM_ABSORB_V",
    "RUNTIME_TARGETS",
    "SCALE_SITES",
    "SERVER_ARGS",
    "SERVER_ARGS_GIVEN",
    "TARGETS",
    "UPDATE_FROM_TENSOR",
    "VERIFY_LOAD_FORMAT",
    "WIDENING_GEMM",
    "Target",
    "check_support",
    "gates_version",
    "installed_root",
    "installed_version",
    "is_release",
    "missing_runtime_targets",
    "missing_targets",
    "product_targets",
]

KNOWN = tuple(Version(text) for text in READ_RELEASES)
OLDEST = KNOWN[0]

_LOADER = "sglang.srt.model_loader.loader"
VERIFY_LOAD_FORMAT = "sglang.srt.configs.load_config.LoadConfig._verify_load_format"
GET_MODEL_LOADER = f"{_LOADER}.get_model_loader"
# What a ServerArgs runs through before anything is read of the model; the first that a release has. Not a condition:
# without it only the refusals of guard_server are lost.
SERVER_ARGS = "sglang.srt.server_args.ServerArgs"
SERVER_ARGS_GIVEN = ("resolve_once", "__post_init__")
POST_LOAD_WEIGHTS = (
    "sglang.srt.models.deepseek_common.deepseek_weight_loader.DeepseekV2WeightLoaderMixin.post_load_weights"
)


@dataclass(frozen=True, slots=True)
class Target:
    """Something of sglang that the plugin hooks, extends or calls.

    :param anywhere: dotted names under which releases have it; the first that exists is the one
    """

    purpose: str
    anywhere: tuple[str, ...]

    def found(self, root: Path) -> str | None:
        """The name under which the sglang at `root` has it, or None."""
        return next((name for name in self.anywhere if resolves(root, name)), None)


UPDATE_FROM_TENSOR = Target(
    "updates that copy straight into parameters can be followed",
    (
        "sglang.srt.model_executor.model_runner_components.weight_updater.WeightUpdater.update_weights_from_tensor",
        "sglang.srt.model_executor.model_runner.ModelRunner.update_weights_from_tensor",
    ),
)
# Not a condition: without it only adapters on kv_b_proj are affected.
LORA_CORRECTION = Target(
    "absorbed attention heeds LoRA adapters on kv_b_proj",
    ("sglang.srt.lora.deepseek_mla_correction.is_kv_b_lora_active", "sglang.srt.lora.utils.kv_b_lora_correction"),
)
TARGETS = (
    Target("plugins are loaded", ("sglang.srt.plugins.load_plugins",)),
    Target("hooks can be registered", ("sglang.srt.plugins.hook_registry.HookRegistry.register",)),
    Target(
        "--load-format takes the name weightprep",
        ("sglang.srt.arg_groups.choices.LOAD_FORMAT_CHOICES", "sglang.srt.server_args.LOAD_FORMAT_CHOICES"),
    ),
    Target("the load config takes it too", (VERIFY_LOAD_FORMAT,)),
    Target("a loader is chosen from the load config", (GET_MODEL_LOADER,)),
    Target("the loader can be extended", (f"{_LOADER}.DefaultModelLoader.load_weights_and_postprocess",)),
    Target("absorbed weights are made in one place", (POST_LOAD_WEIGHTS,)),
    Target(
        "ranks of one attention can be asked for",
        (
            "sglang.srt.distributed.parallel_state.get_attn_tp_group",
            "sglang.srt.layers.dp_attention.get_attention_tp_group",
        ),
    ),
    UPDATE_FROM_TENSOR,
)

_METHODS = "sglang.srt.models.deepseek_common.attention_forward_methods"
FORWARD_MLA, FORWARD_MLA_ROCM = f"{_METHODS}.forward_mla", f"{_METHODS}.forward_mla_rocm"
# From 0.5.18 on.
ROCM_ABSORB_Q, ROCM_ABSORB_V = f"{FORWARD_MLA_ROCM}.rocm_absorb_q_bmm", f"{FORWARD_MLA_ROCM}.rocm_absorb_v_bmm"
# From 0.5.22 on.
FUSED_ROPE = f"{FORWARD_MLA_ROCM}.fused_fp8_bmm_rope_cat_and_cache_mla"
# aiter's, as 0.5.12 and 0.5.15 bind them on ROCm.
FP8_KERNEL = f"{FORWARD_MLA}.batched_gemm_a8w8_a_per_token_group_prequant_w_per_batched_tensor_quant"
MXFP4_KERNEL = f"{FORWARD_MLA}.batched_gemm_afp4wfp4_pre_quant"
BMM_FP8 = f"{FORWARD_MLA}.bmm_fp8"

_UTILS = "sglang.srt.layers.quantization.fp8_utils"
# From 0.5.15 on: what turns row-major group scales round for the bpreshuffle GEMM.
MATERIALIZE = f"{_UTILS}.materialize_bpreshuffle_fp8_scale"
# Where sglang calls aiter's quantizations; a release has some of them.
SCALE_SITES = (
    "sglang.srt.layers.communicator.fused_rms_fp8_group_quant",
    "sglang.srt.layers.layer_boundary.residual.add_norm.fused_rms_fp8_group_quant",
    f"{FORWARD_MLA}.fused_rms_fp8_group_quant",
    f"{FORWARD_MLA}.fused_flatten_fp8_group_quant",
    f"{FORWARD_MLA_ROCM}.fused_rms_fp8_group_quant",
    f"{FORWARD_MLA_ROCM}.fused_flatten_fp8_group_quant",
    f"{_METHODS}.forward_mha.fused_rms_fp8_group_quant",
    f"{_METHODS}.forward_mha_rocm.fused_rms_fp8_group_quant",
    "sglang.srt.models.deepseek_v4.fused_rms_fp8_group_quant",
    f"{_UTILS}.aiter_per1x128_quant",
    # sglang imports it in the call, so its home is the place to rebind; nothing else calls it
    "aiter.ops.triton.fusions.fused_clamp_act_mul.fused_clamp_act_mul",
)

COMPRESSOR = "sglang.srt.layers.attention.dsv4.compressor"
# From 0.5.20 on; before, 0.5.15 and 0.5.18 call GATE_GEMM, which widens in one of WIDENING_GEMM.
GATE = f"{COMPRESSOR}.Compressor._compute_wkv_gate"
GATE_GEMM = f"{COMPRESSOR}.linear_bf16_fp32"
WIDENING_GEMM = (
    "sglang.kernels.ops.attention.dsv4.gemm.linear_bf16_fp32",
    "sglang.jit_kernel.dsv4.gemm.linear_bf16_fp32",
)
COMPRESS_FORWARD = (
    "sglang.kernels.ops.attention.dsv4.compress.compress_forward",
    "sglang.jit_kernel.dsv4.compress.compress_forward",
)

# Where one is missing sglang's own function serves, and that is told.
RUNTIME_TARGETS = (
    Target("absorbed products on ROCm", (ROCM_ABSORB_V, FP8_KERNEL)),
    Target("absorbed products on CUDA", (BMM_FP8,)),
    Target("column-major group scales", (MATERIALIZE,)),
    Target("DeepSeek-V4's compressor on bf16 scores", (GATE, GATE_GEMM)),
    LORA_CORRECTION,
)


def installed_version() -> Version | None:
    """The version of the sglang distribution, None if there is none."""
    try:
        return Version(metadata.version("sglang"))
    except (metadata.PackageNotFoundError, InvalidVersion):
        return None


def is_release(version: Version | None) -> bool:
    """Whether `version` tells which releases are older and which newer.

    A build from source without git's tags is 0.0.0.dev0, or a development version of something below every release:
    that says nothing of its age. Such a build is judged by its hook targets alone.
    """
    if version is None or version.release == (0, 0, 0):
        return False
    return version >= OLDEST or not version.is_devrelease


def gates_version() -> Version:
    """Whose gates are meant: those of the installed sglang; of the newest that was read where it is no release, since
    builds from source are nearer to that than to any other.
    """
    version = installed_version()
    return version if version is not None and is_release(version) else KNOWN[-1]


def installed_root() -> Path | None:
    """The directory of the `sglang` package, found without importing it."""
    spec = importlib.util.find_spec("sglang")
    places = list(spec.submodule_search_locations or ()) if spec is not None else []
    return Path(places[0]) if places else None


def missing_targets(root: Path) -> tuple[Target, ...]:
    """The targets that the sglang package in directory `root` lacks."""
    return tuple(target for target in TARGETS if target.found(root) is None)


def missing_runtime_targets(root: Path) -> tuple[Target, ...]:
    """What the sglang package in directory `root` lacks of what weightprep would replace."""
    return tuple(target for target in RUNTIME_TARGETS if target.found(root) is None)


def product_targets(root: Path, *, hip: bool) -> tuple[str, ...]:
    """Names of the absorbed products that can be replaced in the sglang package in directory `root`.

    :param hip: on ROCm; otherwise on CUDA
    """
    if not hip:
        names: tuple[str, ...] = (BMM_FP8,)
    elif resolves(root, ROCM_ABSORB_V):
        names = (ROCM_ABSORB_Q, ROCM_ABSORB_V)
    else:
        names = (FP8_KERNEL, MXFP4_KERNEL)
    return tuple(name for name in names if resolves(root, name))


def check_support() -> str | None:
    """Make sure that the installed sglang has everything that the plugin needs.

    :return: a notice if it is newer than the map, or no release; else None
    :raises EngineError: no sglang, one that is too old, or one that lacks a target
    """
    version, root = installed_version(), installed_root()
    if root is None:
        raise EngineError(
            "sglang",
            found="no such package",
            wanted=f"sglang>={OLDEST}",
            remedy="install it: pip install 'weightprep[sglang]'",
        )
    if version is not None and is_release(version) and version < OLDEST:
        raise EngineError(
            "sglang",
            found=str(version),
            wanted=f">={OLDEST}",
            remedy="upgrade sglang: older releases have no plugin interface",
        )
    missing = missing_targets(root)
    if missing:
        raise EngineError(
            f"sglang {version or '(unknown version)'}",
            found="without " + "; ".join(f"{target.anywhere[0]} ({target.purpose})" for target in missing),
            wanted="all hook targets of weightprep",
            remedy=f"use a release between {KNOWN[0]} and {KNOWN[-1]}, or a newer weightprep",
        )
    if version is None or not is_release(version):
        named = version or "(unknown version)"
        return f"sglang {named} names no release; {_what_is_there(root)}, the gates of {KNOWN[-1]} are assumed"
    if version > KNOWN[-1]:
        return f"sglang {version} is newer than {KNOWN[-1]}; {_what_is_there(root)}"
    return None


def _what_is_there(root: Path) -> str:
    lacking = missing_runtime_targets(root)
    if not lacking:
        return "all hook targets are there"
    left = "; ".join(f"{target.purpose} ({target.anywhere[0]})" for target in lacking)
    return f"all hook targets of the load format are there; without a target, so left to sglang: {left}"
