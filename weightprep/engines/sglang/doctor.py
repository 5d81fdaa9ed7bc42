"""Looks at an installation and says whether `--load-format weightprep` would work in it, without starting anything.

sglang and aiter are examined as files: importing them asks for GPUs and compilers that may be what is missing.
"""

from __future__ import annotations

import ast
import importlib.util
import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Literal, get_args

from weightprep.engines.sglang import versions
from weightprep.engines.sglang.compressor_targets import compressor_targets
from weightprep.engines.sglang.options import TARGET_VARIABLE, Options
from weightprep.engines.sglang.source_names import resolves

__all__ = ["Finding", "examine"]

GROUP = "sglang.srt.plugins"
_NAME = "weightprep"
_VALUE = "weightprep.engines.sglang.plugin:register"
# Newer releases of aiter can write its scales for the next GEMM; which file defines it differs by release.
_SCALE_PRODUCER = "fused_flatten_fp8_group_quant"
_MAX_SOURCE = 1 << 20


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at.

    :param status: "problem" means that the flag would not work, or not do what it is for
    :param remedy: what to do, empty where nothing is to be done
    """

    subject: str
    status: Literal["ok", "note", "problem"]
    found: str
    remedy: str = ""


def examine(environment: Mapping[str, str] = os.environ) -> list[Finding]:
    """All findings, in the order in which a user would fix them."""
    torch = _torch()
    has_torch = torch.status == "ok"
    return [
        _python(),
        torch,
        _triton(),
        *_sglang(),
        *_entry_point(environment),
        *_other_plugins(),
        _gpu(environment, has_torch),
        *_aiter(),
        *(_flags(environment) if has_torch else ()),
    ]


def _python() -> Finding:
    found = ".".join(str(part) for part in sys.version_info[:3])
    if (3, 10) <= sys.version_info[:2] <= (3, 13):
        return Finding("python", "ok", found)
    return Finding("python", "problem", found, "use Python 3.10 to 3.13")


def _torch() -> Finding:
    """Whether it imports: a build for another ROCm or CUDA is installed, but fails on a library that is not here."""
    if importlib.util.find_spec("torch") is None:
        return Finding("torch", "problem", "not installed", "install the build of it for this machine's GPU")
    try:
        import torch

        return Finding("torch", "ok", str(torch.__version__))
    except Exception as error:
        found = f"{_version_of('torch')}, whose import fails: {type(error).__name__}: {error}"
        remedy = "install the build of it for this machine's ROCm or CUDA; `python -c 'import torch'` has to work"
        return Finding("torch", "problem", found, remedy)


def _triton() -> Finding:
    try:
        return Finding("triton", "ok", metadata.version("triton"))
    except metadata.PackageNotFoundError:
        return Finding("triton", "note", "not installed", "only its kernels need it: pip install triton")


def _sglang() -> Iterator[Finding]:
    root, version = versions.installed_root(), versions.installed_version()
    if root is None:
        yield Finding("sglang", "problem", "not installed", "pip install 'weightprep[sglang]'")
        return
    shown = str(version or "unknown version")
    is_release = versions.is_release(version)
    if version is not None and is_release and version < versions.OLDEST:
        yield Finding("sglang", "problem", f"{shown}, no plugin interface", f"upgrade to {versions.OLDEST} or later")
        return
    if version is None or not is_release:
        found = f"{shown}, which names no release: judged by its hook targets, with the gates of {versions.KNOWN[-1]}"
        yield Finding("sglang", "note", found)
    elif version > versions.KNOWN[-1]:
        yield Finding("sglang", "note", f"{shown}, not known to this release")
    else:
        yield Finding("sglang", "ok", shown)
    missing = versions.missing_targets(root)
    for target in missing:
        remedy = f"use sglang {versions.KNOWN[0]} to {versions.KNOWN[-1]}, or a newer weightprep"
        yield Finding("hook target", "problem", f"no {target.anywhere[0]} ({target.purpose})", remedy)
    if not missing:
        yield Finding("hook targets", "ok", f"all {len(versions.TARGETS)} found")
    yield _products(root)
    yield _compressor(root)
    yield _scales(root)


def _products(root: Path) -> Finding:
    """Whose absorbed products the sglang at `root` can run."""
    found = {name: versions.product_targets(root, hip=name == "ROCm") for name in ("ROCm", "CUDA")}
    shown = "; ".join(
        f"{platform}: {', '.join(name.rpartition('.')[2] for name in names) or 'none'}"
        for platform, names in found.items()
    )
    if all(found.values()):
        return Finding("product hooks", "ok", shown)
    remedy = f"sglang's own products run; sglang {versions.KNOWN[0]} to {versions.KNOWN[-1]} have all hook targets"
    return Finding("product hooks", "note", shown, remedy)


def _compressor(root: Path) -> Finding:
    """Whether DeepSeek-V4's compressor can be spared its widening pass in the sglang at `root`."""
    targets = compressor_targets(root)
    if targets is None:
        remedy = "nothing to do unless DeepSeek-V4 is served on ROCm; then use sglang 0.5.15 or later"
        return Finding("compressor hooks", "note", "this sglang widens no scores, or has no such compressor", remedy)
    return Finding("compressor hooks", "ok", f"{targets.producer}, {targets.consumer}")


def _scales(root: Path) -> Finding:
    """Where group scales can be had column-major without a transpose in the sglang at `root`."""
    found = [site for site in versions.SCALE_SITES if resolves(root, site)]
    if not found or not resolves(root, versions.MATERIALIZE):
        remedy = "nothing to do unless an fp8 block model is served on gfx95; then use sglang 0.5.15 or later"
        return Finding("scale hooks", "note", "this sglang transposes scales in its linear layer", remedy)
    return Finding("scale hooks", "ok", f"{len(found)} call sites of aiter's quantizations")


def _entry_point(environment: Mapping[str, str]) -> Iterator[Finding]:
    ours = [entry for entry in metadata.entry_points(group=GROUP) if entry.name == _NAME]
    if not ours:
        yield Finding("entry point", "problem", f"no {_NAME} in {GROUP}", "install weightprep into this environment")
        return
    foreign = [entry.value for entry in ours if entry.value != _VALUE]
    if foreign:
        yield Finding("entry point", "problem", f"{_NAME} = {foreign[0]}", "uninstall the package that takes this name")
    else:
        yield Finding("entry point", "ok", f"{GROUP}: {_NAME}")
    allowed = environment.get("SGLANG_PLUGINS", "")
    names = [part.strip() for part in allowed.split(",") if part.strip()]
    # a value of commas alone names no plugin, and leaves all of them out
    if allowed and _NAME not in names:
        remedy = f"add it: SGLANG_PLUGINS={','.join([*names, _NAME])}"
        yield Finding("SGLANG_PLUGINS", "problem", f"{allowed!r} leaves {_NAME} out", remedy)


def _other_plugins() -> Iterator[Finding]:
    """Plugins whose source names something that we hook: the last one applied would win."""
    names = {name.rpartition(".")[2] for target in versions.TARGETS for name in target.anywhere} - {"load_plugins"}
    names -= {"register", "get_attn_tp_group", "get_attention_tp_group", "LOAD_FORMAT_CHOICES"}
    for entry in metadata.entry_points(group=GROUP):
        if entry.name == _NAME or entry.dist is None:
            continue
        used = {name for text in _sources(entry.dist) for name in names if name in text}
        if used:
            remedy = f"if startup fails, leave it out: SGLANG_PLUGINS={_NAME}"
            yield Finding(f"plugin {entry.name}", "note", f"names {', '.join(sorted(used))} too", remedy)
        else:
            yield Finding(f"plugin {entry.name}", "ok", "touches nothing that weightprep hooks")


def _sources(distribution: metadata.Distribution) -> Iterator[str]:
    for file in distribution.files or ():
        path = Path(str(distribution.locate_file(file)))
        if path.suffix == ".py" and path.is_file() and path.stat().st_size <= _MAX_SOURCE:
            yield path.read_text(errors="replace")


def _gpu(environment: Mapping[str, str], has_torch: bool) -> Finding:
    forced = environment.get(TARGET_VARIABLE)
    known = get_args(Options.model_fields["target"].annotation)
    if forced and forced not in known:
        remedy = f"unset {TARGET_VARIABLE}, or name one of {', '.join(known)}"
        return Finding("target", "problem", f"{forced}, from {TARGET_VARIABLE}, which a load refuses", remedy)
    if forced and forced != "auto":
        return Finding("target", "note", f"{forced}, from {TARGET_VARIABLE}", "unset it to use this machine's own")
    if not has_torch:
        return Finding("target", "note", "unknown without torch")
    from weightprep.engines.sglang.hardware import UNKNOWN_GPU_REMEDY, describe_gpu, detect_target

    target = detect_target()
    if target is None:
        gpus = ", ".join(name for name in known if name not in ("auto", "cpu"))
        remedy = f"{UNKNOWN_GPU_REMEDY}: {gpus}"
        return Finding("target", "problem", f"{describe_gpu()}, a GPU without known gates", remedy)
    if target == "cpu":
        return Finding("target", "note", "no GPU: weights are prepared, no fast path is taken")
    return Finding("target", "ok", target)


def _aiter() -> Iterator[Finding]:
    spec = importlib.util.find_spec("aiter")
    places = list(spec.submodule_search_locations or ()) if spec is not None else []
    if not places:
        yield Finding("aiter", "note", "not installed", "needed on ROCm only")
        return
    yield Finding("aiter", "ok", f"{_version_of('amd-aiter', 'aiter')} in {places[0]}")
    parameters = _parameters_of(_SCALE_PRODUCER, Path(places[0]) / "ops")
    if parameters is None:
        yield Finding(_SCALE_PRODUCER, "note", "not in this aiter", "sglang 0.5.23 needs a newer aiter on ROCm")
    elif "transpose_scale" in parameters:
        yield Finding(_SCALE_PRODUCER, "ok", "has transpose_scale; which layout it writes is probed at startup")
    else:
        remedy = "sglang 0.5.23 passes it: use a newer aiter on ROCm"
        yield Finding(_SCALE_PRODUCER, "note", "has no transpose_scale", remedy)


def _version_of(*names: str) -> str:
    """Of the first of these distributions that is installed."""
    for name in names:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return "unknown version"


def _parameters_of(function: str, folder: Path) -> set[str] | None:
    for file in sorted(folder.rglob("*.py")):
        text = file.read_text(errors="replace")
        if f"def {function}(" not in text:
            continue
        try:
            tree = ast.parse(text)
        except SyntaxError:
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef) and node.name == function:
                return {argument.arg for argument in (*node.args.args, *node.args.kwonlyargs)}
    return None


def _flags(environment: Mapping[str, str]) -> Iterator[Finding]:
    import torch

    if torch.version.hip is None:
        return
    from weightprep.engines.sglang.hardware import AITER_REMEDY, AITER_VARIABLE, aiter_is_on

    value = environment.get(AITER_VARIABLE, "")
    if aiter_is_on(environment):
        yield Finding(AITER_VARIABLE, "ok", value)
    else:
        yield Finding(AITER_VARIABLE, "problem", value or "unset: the fp8 paths are off", AITER_REMEDY)
