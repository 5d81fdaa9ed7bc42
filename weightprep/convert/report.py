"""One self-contained HTML page about a conversion: what was converted, what it cost, and what the model now looks like.

Nothing is fetched when the page is opened and no script runs.
"""

from __future__ import annotations

import html
import os
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from weightprep.checkpoint.header import TensorInfo, read_header
from weightprep.checkpoint.manifest import MANIFEST_NAME, SIDECAR_MANIFEST, Manifest, ModuleRecord, read_manifest
from weightprep.checkpoint.repository import Checkpoint
from weightprep.convert.report_plots import DtypeMap, Series, bytes_plot, layer_plot, map_plot
from weightprep.convert.run_record import RunRecord, read_run
from weightprep.errors import CheckpointError
from weightprep.formats.encoding import FOREIGN_SUFFIXES, WEIGHT_SUFFIXES

__all__ = ["render_report"]

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem; color: #1a1a1a;
  background: #fff }
h1 { font-size: 1.5rem; overflow-wrap: anywhere } h2 { font-size: 1.15rem; margin-top: 2.4rem }
table { border-collapse: collapse; width: 100%; font-size: 13px }
td, th { border-bottom: 1px solid #ddd; padding: .25rem .6rem .25rem 0; text-align: left; vertical-align: top }
td.n, th.n { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap }
.wide { overflow-x: auto } .wide svg { width: 100%; min-width: 40rem; height: auto; display: block }
code { font-size: 13px; white-space: nowrap } .note { color: #555; max-width: 45rem } summary { cursor: pointer }
"""

# How a source that is not quantized by this tool is stored: dtype, and bits of one element.
_SOURCE = {
    "bf16": ("BF16", 16),
    "fp16": ("F16", 16),
    "fp32": ("F32", 32),
    "fp8_block": ("F8_E4M3", 8),
    "fp8_channel": ("F8_E4M3", 8),
    "fp8_tensor": ("F8_E4M3", 8),
    "mxfp4": ("U8", 4),
    "int8_channel": ("I8", 8),
    "int8_block": ("I8", 8),
}
_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.(.+)")


def render_report(destination: Path, run_file: Path | None = None) -> str:
    """The page about the conversion that made the directory `destination`.

    :param run_file: what `convert --json` printed, for its timings
    :raises CheckpointError: `destination` has no manifest, or is no sound checkpoint; `run_file` is of something else
    :raises EngineError: matplotlib is not installed
    """
    manifest = _read_manifest(destination)
    run = None if run_file is None else read_run(run_file, manifest, destination)
    after = _tensors(destination)
    before = _before(manifest, Checkpoint.open(destination))
    name = html.escape(os.fsencode(destination.resolve().name).decode(errors="replace"))
    parts = [
        f"<!doctype html><html lang='en'><head><meta charset='utf-8'><title>weightprep: {name}</title>",
        "<meta name='viewport' content='width=device-width, initial-scale=1'>",
        f"<style>{_STYLE}</style></head><body><h1>{name}</h1>",
        _summary(manifest, before, after, run),
        "<h2>Error</h2>",
        "<p class='note'>The stored numbers against the source's, both in float32. One point for each module.</p>",
        layer_plot("Relative error", _by_group(manifest, lambda record: record.quality.relative_error)),
        layer_plot("SQNR, dB", _by_group(manifest, lambda record: record.quality.sqnr_db)),
        layer_plot("SQNR of the worst head, dB", _by_group(manifest, lambda record: record.quality.worst_head_sqnr_db)),
        "<h2>Range</h2>",
        layer_plot("Largest magnitude (amax)", _by_group(manifest, lambda record: record.quality.amax)),
        layer_plot("Scale", _by_group(manifest, lambda record: record.scale)),
        layer_plot(
            "Largest over smallest head amax", _by_group(manifest, lambda record: record.quality.head_amax_ratio)
        ),
        "<p class='note'>fp8 is a floating format: a head that is much smaller than the largest loses little up to a "
        "ratio of about 1000. The worst head's SQNR shows what it lost.</p>",
        "<h2>The model before and after</h2>",
        bytes_plot(_by_dtype(before), _by_dtype(after)),
        "<p class='note'>Matrices of each layer by their dtype; where the tensors of one kind differ, as experts may, "
        "the dtype of most of their bytes. A sidecar's tensors stand beside the checkpoint's.</p>",
        map_plot([DtypeMap("Before", _by_layer(before)), DtypeMap("After", _by_layer(after))]),
        "<h2>Exclude entries that were overridden</h2>",
        _overrides(manifest),
        "<h2>Modules</h2>",
        _modules(manifest.modules),
        "</body></html>",
    ]
    return "\n".join(parts)


def _read_manifest(destination: Path) -> Manifest:
    for name in (MANIFEST_NAME, SIDECAR_MANIFEST):
        if (destination / name).exists():
            return read_manifest(destination / name)
    raise CheckpointError(
        destination,
        found=f"neither {MANIFEST_NAME} nor {SIDECAR_MANIFEST}" if destination.is_dir() else "no directory",
        wanted="a result of convert",
        remedy="pass the directory that convert wrote",
    )


def _tensors(destination: Path) -> dict[str, TensorInfo]:
    """Every tensor of the result, a sidecar's under the name of its folder."""
    found = {name: ref.info for name, ref in Checkpoint.open(destination).tensors.items()}
    for path in sorted((destination / SIDECAR_MANIFEST.parent).glob("*.safetensors")):
        found |= {f"{SIDECAR_MANIFEST.parent}:{name}": info for name, info in read_header(path).tensors.items()}
    return found


def _before(manifest: Manifest, checkpoint: Checkpoint) -> dict[str, TensorInfo]:
    """The source's tensors as far as the result tells: of a quantized source's scales the shapes are not recorded."""
    found = {name: ref.info for name, ref in checkpoint.tensors.items()}
    for record in manifest.modules if manifest.layout == "inline" else ():
        stored = [found.pop(name) for name in record.target_sha256 if name in found]
        if len(stored) != len(record.target_sha256):
            raise CheckpointError(
                record.module,
                found=f"{len(stored)} of its {len(record.target_sha256)} tensors, or the module twice in the manifest",
                wanted="what the manifest lists, once",
                remedy="run `weightprep verify SRC DST`: the result is damaged or edited",
            )
        weight = max(stored, key=lambda info: info.nbytes)
        dtype, bits = _SOURCE.get(record.source_encoding, ("other", 8))
        # the result is fp8: as many bytes as the weight has elements
        found[weight.name] = TensorInfo(weight.name, dtype, weight.shape, 0, weight.nbytes * bits // 8)
    return found


def _by_dtype(tensors: Mapping[str, TensorInfo]) -> dict[str, int]:
    sizes: Counter[str] = Counter()
    for info in tensors.values():
        sizes[info.dtype] += info.nbytes
    return dict(sizes)


def _by_layer(tensors: Mapping[str, TensorInfo]) -> dict[str, dict[int, str]]:
    """Kind of matrix ("self_attn.kv_b_proj", "mlp.experts.*.up_proj") -> layer -> dtype."""
    sizes: dict[str, dict[int, Counter[str]]] = {}
    for name, info in tensors.items():
        where, _, plain = name.rpartition(":")
        layer = _LAYER.search(plain)
        suffix = next((s for s in (*WEIGHT_SUFFIXES, *FOREIGN_SUFFIXES) if plain.endswith(s)), None)
        if layer is None or suffix is None or len(info.shape) < 2:
            continue
        kind = re.sub(r"\.\d+(?=\.|$)", ".*", layer[2].removesuffix(suffix)) + (f" ({where})" if where else "")
        sizes.setdefault(kind, {}).setdefault(int(layer[1]), Counter())[info.dtype] += info.nbytes
    return {kind: {n: found.most_common(1)[0][0] for n, found in row.items()} for kind, row in sizes.items()}


def _summary(
    manifest: Manifest,
    before: Mapping[str, TensorInfo],
    after: Mapping[str, TensorInfo],
    run: RunRecord | None,
) -> str:
    kinds = Counter((record.group, record.source_encoding, record.target_encoding) for record in manifest.modules)
    sizes = [sum(info.nbytes for info in tensors.values()) / 1e9 for tensors in (before, after)]
    rows = {
        "made by": f"weightprep {manifest.tool_version}, recipe {manifest.recipe} ({manifest.recipe_hash[:12]})",
        "layout": manifest.layout,
        "converted": "; ".join(f"{count} {group} module(s) {a} to {b}" for (group, a, b), count in kinds.items()),
        "size": f"{sizes[0]:.2f} GB before, {sizes[1]:.2f} GB after",
        "worst error": _worst(manifest.modules),
        "below the quality floor": ", ".join(manifest.below_floor) or "none",
        "dropped tensors": ", ".join(manifest.dropped) or "none",
        "time": _timing(run),
    }
    cells = "".join(f"<tr><th>{key}<td>{html.escape(value)}" for key, value in rows.items())
    return f"<table>{cells}</table>"


def _worst(records: Sequence[ModuleRecord]) -> str:
    if not records:
        return "none"
    worst = max(records, key=lambda record: record.quality.relative_error)
    return f"{worst.quality.relative_error:.4g} at {worst.module}"


def _timing(run: RunRecord | None) -> str:
    if run is None:
        return "not recorded: a manifest holds no times; --run adds those that convert --json printed"
    rate = f", {run.nbytes / 1e6 / run.seconds:.0f} MB/s" if run.seconds else ""
    placed = ", ".join(f"{count} {how}" for how, count in run.placed.items())
    return f"{run.seconds:.1f} s{rate}; files: {placed or 'none'}, {run.resumed_files} from an earlier run"


def _by_group(manifest: Manifest, value: Callable[[ModuleRecord], float | None]) -> list[Series]:
    groups = dict.fromkeys(record.group for record in manifest.modules)
    return [
        Series(group, tuple((record.layer, value(record)) for record in manifest.modules if record.group == group))
        for group in groups
    ]


def _overrides(manifest: Manifest) -> str:
    found = [record for record in manifest.modules if record.overrides_exclude is not None]
    if not found:
        return "<p>None: the checkpoint asked to leave none of the converted modules alone.</p>"
    pairs = [(html.escape(record.module), html.escape(record.overrides_exclude or "")) for record in found]
    rows = "".join(f"<tr><td><code>{module}</code><td><code>{entry}</code>" for module, entry in pairs)
    table = f"<div class='wide'><table><tr><th>module<th>entry{rows}</table></div>"
    return (
        f"<details><summary>{len(found)} of {len(manifest.modules)} converted modules were on the checkpoint's own "
        f"exclude list</summary>{table}</details>"
    )


def _modules(records: Sequence[ModuleRecord]) -> str:
    rows = "".join(
        f"<tr><td><code>{html.escape(record.module)}</code><td>{record.source_encoding}<td>{record.target_encoding}"
        f"<td class='n'>{record.quality.relative_error:.4g}<td class='n'>{_number(record.quality.sqnr_db)}"
        f"<td class='n'>{_number(record.quality.worst_head_sqnr_db)}"
        f"<td class='n'>{record.quality.amax:.4g}<td class='n'>{_number(record.scale)}"
        f"<td class='n'>{_number(record.quality.head_amax_ratio)}"
        for record in records
    )
    names = ("relative error", "SQNR, dB", "worst head, dB", "amax", "scale", "head ratio")
    figures = "".join(f"<th class='n'>{name}" for name in names)
    return f"<div class='wide'><table><tr><th>module<th>from<th>to{figures}{rows}</table></div>"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"
