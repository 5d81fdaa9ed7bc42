"""The one map of what the plugin needs of sglang, by name, and how to tell that an installed sglang has it.

The names are looked up in sglang's source text, not imported: `doctor` must answer on machines where sglang does not
import, and a process must not import model code before its environment is final. A release that this map does not know
is judged by the same look.
"""

from __future__ import annotations

import ast
import importlib.util
from dataclasses import dataclass
from functools import lru_cache
from importlib import metadata
from pathlib import Path

from packaging.version import InvalidVersion, Version

from weightprep.contracts import READ_RELEASES
from weightprep.errors import EngineError

__all__ = [
    "KNOWN",
    "LORA_CORRECTION",
    "OLDEST",
    "POST_LOAD_WEIGHTS",
    "TARGETS",
    "UPDATE_FROM_TENSOR",
    "Target",
    "check_support",
    "gates_version",
    "installed_root",
    "installed_version",
    "is_release",
    "missing_targets",
    "resolves",
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
        return f"sglang {named} names no release; all hook targets are there, the gates of {KNOWN[-1]} are assumed"
    if version > KNOWN[-1]:
        return f"sglang {version} is newer than {KNOWN[-1]}; all hook targets are there"
    return None


@lru_cache(maxsize=128)
def resolves(root: Path, dotted: str) -> bool:
    """Whether the sglang package in `root` defines the module-level name or class attribute `dotted`.

    A name imported from elsewhere counts where it is a module's own name, as sglang re-exports some.
    """
    parts = dotted.split(".")[1:]
    for split in range(len(parts), 0, -1):
        for file in (root.joinpath(*parts[:split]).with_suffix(".py"), root.joinpath(*parts[:split], "__init__.py")):
            if file.is_file():
                return _defines(_parse(file), parts[split:])
    return False


@lru_cache(maxsize=32)
def _parse(file: Path) -> ast.Module | None:
    try:
        return ast.parse(file.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return None


def _defines(tree: ast.Module | None, names: list[str]) -> bool:
    body: list[ast.stmt] = tree.body if tree is not None else []
    for position, name in enumerate(names):
        found = next((node for node in body if name in _names(node)), None)
        if found is None:
            return False
        if position + 1 < len(names):
            if not isinstance(found, ast.ClassDef):
                return False
            body = found.body
    return bool(names) and tree is not None


def _names(node: ast.stmt) -> set[str]:
    if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        return {node.name}
    if isinstance(node, ast.Assign):
        return {target.id for target in node.targets if isinstance(target, ast.Name)}
    if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
        return {node.target.id}
    if isinstance(node, ast.ImportFrom):
        return {alias.asname or alias.name for alias in node.names}
    if isinstance(node, ast.If | ast.Try):
        # sglang binds the kernels of one platform in a branch.
        return {name for inner in (*node.body, *node.orelse) for name in _names(inner)}
    return set()
