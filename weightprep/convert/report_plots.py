"""The plots of a report: SVG that stands inside the page, drawn by matplotlib.

A fixed salt and no date: the same conversion gives the same bytes.
"""

from __future__ import annotations

import html
import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from weightprep.errors import EngineError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["DtypeMap", "Series", "bytes_plot", "layer_plot", "map_plot"]

_WIDTH_INCHES = 10
# An axis shows at least this share of its middle to both sides: noise in the fourth digit must not look like a trend.
_LEAST_SPREAD = 0.1
_COLORS = ("#4477aa", "#ee8866", "#228833", "#ccbb44", "#aa3377", "#66ccee", "#999999", "#222255")


@dataclass(frozen=True, slots=True)
class Series:
    """One layer group's values: (layer, value), value None where there is none."""

    label: str
    points: tuple[tuple[int, float | None], ...]


@dataclass(frozen=True, slots=True)
class DtypeMap:
    """Which dtype the matrices of each kind have in each layer: kind -> layer -> dtype."""

    title: str
    rows: Mapping[str, Mapping[int, str]]


def layer_plot(title: str, series: Sequence[Series]) -> str:
    """Values over layers, one colour for each group."""

    def draw(axes: Axes) -> None:
        from matplotlib.ticker import MaxNLocator

        for entry, color in zip(series, _COLORS, strict=False):
            points = [(layer, value) for layer, value in entry.points if value is not None]
            axes.plot([x for x, _ in points], [y for _, y in points], "o", ms=5, label=entry.label, color=color)
        values = [value for entry in series for _, value in entry.points if value is not None]
        if values:
            middle = (max(values) + min(values)) / 2
            half = max((max(values) - min(values)) * 0.55, abs(middle) * _LEAST_SPREAD) or 1.0
            axes.set_ylim(middle - half, middle + half)
        else:
            axes.text(0.5, 0.5, "no value", ha="center", va="center", transform=axes.transAxes)
        axes.set_xlabel("layer")
        axes.set_title(title, loc="left", fontsize=12)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.legend(frameon=False, ncols=len(series), loc="lower right", bbox_to_anchor=(1, 1), borderpad=0)
        axes.grid(axis="y", alpha=0.3)

    return _svg([draw], height=2.7, label=title)


def bytes_plot(before: Mapping[str, int], after: Mapping[str, int]) -> str:
    """Two bars of bytes, in GB, split by dtype."""
    names = sorted(before.keys() | after.keys(), key=lambda dtype: (-after.get(dtype, 0), dtype))
    colors = _colors(names)

    def draw(axes: Axes) -> None:
        left = [0.0, 0.0]
        for dtype in names:
            sizes = [after.get(dtype, 0) / 1e9, before.get(dtype, 0) / 1e9]
            axes.barh(["after", "before"], sizes, left=left, label=dtype, height=0.6, color=colors[dtype])
            left = [a + b for a, b in zip(left, sizes, strict=True)]
        axes.set_xlabel("GB")
        axes.legend(frameon=False, ncols=6, loc="lower left", bbox_to_anchor=(0, 1), borderpad=0)

    return _svg([draw], height=1.9, label="Bytes by dtype before and after")


def map_plot(maps: Sequence[DtypeMap]) -> str:
    """One panel for each map, kinds from top to bottom, layers from left to right, a colour for each dtype."""
    kinds = list(dict.fromkeys(kind for entry in maps for kind in entry.rows))
    names = sorted({dtype for entry in maps for row in entry.rows.values() for dtype in row.values()})
    colors = _colors(names)

    def panel(entry: DtypeMap) -> Callable[[Axes], None]:
        def draw(axes: Axes) -> None:
            for position, kind in enumerate(kinds):
                for dtype in names:
                    runs = _runs([layer for layer, found in entry.rows.get(kind, {}).items() if found == dtype])
                    axes.broken_barh(runs, (position - 0.4, 0.8), color=colors[dtype], label=dtype)
            axes.set_yticks(range(len(kinds)), kinds, fontsize=8)
            axes.set_ylim(len(kinds) - 0.4, -0.6)
            axes.set_xlabel("layer")
            axes.set_title(entry.title, loc="left", fontsize=12)
            handles, labels = axes.get_legend_handles_labels()
            shown = dict(zip(labels, handles, strict=True))
            place = {"loc": "lower right", "bbox_to_anchor": (1, 1), "borderpad": 0}
            axes.legend(shown.values(), shown.keys(), frameon=False, ncols=6, **place)

        return draw

    height = len(maps) * (0.9 + 0.17 * len(kinds))
    return _svg([panel(entry) for entry in maps], height=height, label="Dtypes by layer before and after")


def _colors(names: Sequence[str]) -> dict[str, str]:
    """The same colour for a dtype in every plot of every page, whatever else the model has."""
    fixed = dict(zip(("BF16", "F8_E4M3", "U8", "F32", "I8", "F16", "F8_E8M0"), _COLORS, strict=False))
    return {name: fixed.get(name, _COLORS[-1]) for name in names}


def _runs(layers: Sequence[int]) -> list[tuple[float, float]]:
    """Neighbouring layers as (left edge, width)."""
    runs: list[list[int]] = []
    for layer in sorted(layers):
        if runs and runs[-1][-1] == layer - 1:
            runs[-1].append(layer)
        else:
            runs.append([layer])
    return [(run[0] - 0.45, len(run) - 0.1) for run in runs]


def _svg(panels: Sequence[Callable[[Axes], None]], *, height: float, label: str) -> str:
    try:
        from matplotlib import rc_context
        from matplotlib.figure import Figure
    except ImportError:
        raise EngineError(
            "report", found="no matplotlib", wanted="matplotlib", remedy="pip install 'weightprep[report]'"
        ) from None
    out = io.StringIO()
    with rc_context({"svg.hashsalt": label, "svg.fonttype": "none", "font.family": "sans-serif"}):
        figure = Figure(figsize=(_WIDTH_INCHES, height), layout="constrained")
        for axes, draw in zip(figure.subplots(len(panels), squeeze=False).flat, panels, strict=True):
            draw(axes)
            axes.spines[["top", "right"]].set_visible(False)
        figure.savefig(out, format="svg", metadata={"Date": None})
    svg = out.getvalue()
    drawn = svg[svg.index("<svg") :].replace("<svg", f"<svg role='img' aria-label='{html.escape(label)}'", 1)
    return f"<div class='wide'>{drawn}</div>"
