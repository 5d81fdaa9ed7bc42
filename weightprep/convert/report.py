"""One self-contained HTML page about a conversion: what was converted, what it cost, and what the model now looks like.

The plots are SVG inside the page, drawn by matplotlib: nothing is fetched when the page is opened and no script runs.
"""

from __future__ import annotations

import html
import io
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from weightprep.checkpoint.manifest import MANIFEST_NAME, SIDECAR_MANIFEST, Manifest, ModuleRecord, read_manifest
from weightprep.checkpoint.repository import Checkpoint
from weightprep.errors import EngineError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["render_report"]

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem; color: #1a1a1a }
h1 { font-size: 1.5rem } h2 { font-size: 1.15rem; margin-top: 2.2rem }
table { border-collapse: collapse; width: 100%; font-size: 13px }
td, th { border-bottom: 1px solid #ddd; padding: .25rem .5rem; text-align: left }
td.n { text-align: right; font-variant-numeric: tabular-nums }
svg { width: 100%; height: auto } code { font-size: 13px } .note { color: #555 }
"""


@dataclass(frozen=True, slots=True)
class _Series:
    label: str
    points: tuple[tuple[int, float | None], ...]


def render_report(destination: Path, run: Mapping[str, Any] | None = None) -> str:
    """The page about the conversion that made the directory `destination`.

    :param run: what `convert --json` printed, for its timings
    :raises CheckpointError: `destination` has no manifest, or is no sound checkpoint
    :raises EngineError: matplotlib is not installed
    """
    path = destination / MANIFEST_NAME
    manifest = read_manifest(path if path.exists() else destination / SIDECAR_MANIFEST)
    checkpoint = Checkpoint.open(destination)
    name = html.escape(destination.resolve().name)
    parts = [
        f"<!doctype html><html lang='en'><meta charset='utf-8'><title>weightprep: {name}</title>",
        f"<style>{_STYLE}</style><h1>{name}</h1>",
        _summary(manifest, run),
        "<h2>Error</h2>",
        _plot("Relative error", _by_group(manifest, lambda record: record.quality.relative_error)),
        _plot("SQNR, dB", _by_group(manifest, lambda record: record.quality.sqnr_db)),
        "<h2>Range</h2>",
        _plot("Largest magnitude", _by_group(manifest, lambda record: record.quality.amax)),
        _plot("Scale", _by_group(manifest, lambda record: record.scale)),
        _plot("Largest over smallest head", _by_group(manifest, lambda record: record.quality.head_amax_ratio)),
        "<p class='note'>fp8 is a floating format: heads of different size do not hurt each other up to a ratio of "
        "about 1000.</p>",
        "<h2>The model's bytes, before and after</h2>",
        _dtypes(manifest, checkpoint),
        "<h2>Exclude entries that were overridden</h2>",
        _overrides(manifest),
        "<h2>Modules</h2>",
        _modules(manifest.modules),
        "</html>",
    ]
    return "\n".join(parts)


def _summary(manifest: Manifest, run: Mapping[str, Any] | None) -> str:
    kinds = Counter((record.source_encoding, record.target_encoding) for record in manifest.modules)
    rows = {
        "made by": f"weightprep {manifest.tool_version}, recipe {manifest.recipe} ({manifest.recipe_hash[:12]})",
        "layout": manifest.layout,
        "converted": ", ".join(f"{count} modules {a} to {b}" for (a, b), count in sorted(kinds.items())),
        "below the quality floor": ", ".join(manifest.below_floor) or "none",
        "dropped tensors": ", ".join(manifest.dropped) or "none",
    }
    if run is not None and "seconds" in run:
        rate = float(run["bytes"]) / 1e6 / float(run["seconds"])
        rows["time"] = f"{float(run['seconds']):.1f} s, {rate:.0f} MB/s, {run.get('resumed_files', 0)} files resumed"
    cells = "".join(f"<tr><th>{key}<td>{html.escape(value)}" for key, value in rows.items())
    return f"<table>{cells}</table>"


def _by_group(manifest: Manifest, value: Any) -> list[_Series]:
    groups = dict.fromkeys(record.group for record in manifest.modules)
    return [
        _Series(group, tuple((record.layer, value(record)) for record in manifest.modules if record.group == group))
        for group in groups
    ]


def _plot(title: str, series: Sequence[_Series]) -> str:
    from matplotlib.ticker import MaxNLocator

    def draw(axes: Axes) -> None:
        for entry in series:
            points = [(layer, value) for layer, value in entry.points if value is not None]
            axes.plot([layer for layer, _ in points], [value for _, value in points], "o", ms=4, label=entry.label)
        axes.set_xlabel("layer")
        axes.set_title(title, loc="left", fontsize=11)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.legend(frameon=False)
        axes.grid(axis="y", alpha=0.3)

    return _svg(draw, height=2.6, label=title)


def _dtypes(manifest: Manifest, checkpoint: Checkpoint) -> str:
    after: Counter[str] = Counter()
    for ref in checkpoint.tensors.values():
        after[ref.info.dtype] += ref.nbytes
    before = Counter(after)
    for record in manifest.modules if manifest.layout == "inline" else ():
        stored = [checkpoint.tensors[name] for name in record.target_sha256]
        for ref in stored:
            before[ref.info.dtype] -= ref.nbytes
        # of a quantized source the shape of the scale is not recorded; its weight has the result's number of elements
        elements = max(ref.nbytes // ref.dtype.itemsize for ref in stored)
        dtype, bits = _SOURCE.get(record.source_encoding, ("other", 8))
        before[dtype] += elements * bits // 8
    names = sorted(before.keys() | after.keys(), key=lambda dtype: -after[dtype])

    def draw(axes: Axes) -> None:
        left = [0.0, 0.0]
        for dtype in names:
            sizes = [after[dtype] / 1e9, before[dtype] / 1e9]
            axes.barh(["after", "before"], sizes, left=left, label=dtype, height=0.6)
            left = [a + b for a, b in zip(left, sizes, strict=True)]
        axes.set_xlabel("GB")
        axes.legend(frameon=False, ncols=6, loc="lower center", bbox_to_anchor=(0.5, 1.0))

    return _svg(draw, height=1.8, label="bytes by dtype before and after")


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


def _overrides(manifest: Manifest) -> str:
    found = [record for record in manifest.modules if record.overrides_exclude is not None]
    if not found:
        return "<p>None: the checkpoint asked to leave none of the converted modules alone.</p>"
    pairs = [(html.escape(record.module), html.escape(record.overrides_exclude or "")) for record in found]
    rows = "".join(f"<tr><td><code>{module}</code><td><code>{entry}</code>" for module, entry in pairs)
    return f"<table><tr><th>module<th>entry{rows}</table>"


def _modules(records: Sequence[ModuleRecord]) -> str:
    rows = "".join(
        f"<tr><td><code>{html.escape(record.module)}</code><td>{record.source_encoding}<td>{record.target_encoding}"
        f"<td class='n'>{record.quality.relative_error:.4g}<td class='n'>{_number(record.quality.sqnr_db)}"
        f"<td class='n'>{record.quality.amax:.4g}<td class='n'>{_number(record.scale)}"
        f"<td class='n'>{_number(record.quality.head_amax_ratio)}"
        for record in records
    )
    head = "<tr><th>module<th>from<th>to<th>relative error<th>SQNR, dB<th>amax<th>scale<th>head ratio"
    return f"<table>{head}{rows}</table>"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"


def _svg(draw: Any, *, height: float, label: str) -> str:
    try:
        from matplotlib import rc_context
        from matplotlib.figure import Figure
    except ImportError:
        raise EngineError(
            "report", found="no matplotlib", wanted="matplotlib", remedy="pip install 'weightprep[report]'"
        ) from None
    out = io.StringIO()
    # A fixed salt and no date: the same conversion gives the same page.
    with rc_context({"svg.hashsalt": label, "svg.fonttype": "none", "font.family": "sans-serif"}):
        figure = Figure(figsize=(10, height), layout="constrained")
        draw(figure.subplots())
        figure.savefig(out, format="svg", metadata={"Date": None})
    svg = out.getvalue()
    return svg[svg.index("<svg") :].replace("<svg", f"<svg role='img' aria-label='{html.escape(label)}'", 1)
