"""`weightprep inspect`: what a checkpoint holds and which kernel paths its layers will take, from headers alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from weightprep.cli.next_steps import AITER_SWITCH
from weightprep.cli.output import command, print_json, print_lines, say
from weightprep.contracts import name_targets
from weightprep.convert.options import Layout

if TYPE_CHECKING:
    from weightprep.convert.compressor_prediction import CompressorForecast
    from weightprep.convert.prediction import LayerForecast

__all__ = ["inspect"]


@command
def inspect(
    src: Annotated[Path, typer.Argument(help="The checkpoint directory, or org/name\\[@revision] on the hub.")],
    target: Annotated[
        list[str] | None,
        typer.Option(help=f"{name_targets()}; may be repeated. Default: gfx950."),
    ] = None,
    engine: Annotated[
        str | None,
        typer.Option(help="The engine whose gates are evaluated, sglang==VERSION; default: the sglang installed here."),
    ] = None,
    recipe: Annotated[str | None, typer.Option(help="Recipe name or YAML file; default: by architecture.")] = None,
    precision: Annotated[str | None, typer.Option(help="As for convert.")] = None,
    json: Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")] = False,
) -> int | None:
    """Tell which path each layer will take on which hardware, and why, before anything is loaded.

    "today" is what the engine does with the checkpoint as it is, "prepared" what it does with weightprep.

    Examples:

      weightprep inspect GLM-5.2

      weightprep inspect GLM-5.2 --target gfx950 --target sm90 --engine sglang==0.5.20

      weightprep inspect zai-org/GLM-5.2   (fetches headers, not weights)
    """
    from weightprep.checkpoint.hub import open_headers
    from weightprep.checkpoint.manifest import SIDECAR_MANIFEST
    from weightprep.cli.convert import parse_precision
    from weightprep.cli.engine import choose_engine
    from weightprep.cli.plan import unmatched_lines
    from weightprep.contracts.scale_gates import predict_scales
    from weightprep.convert.compressor_prediction import forecast_compressors
    from weightprep.convert.coverage import unclaimed_modules, why_unclaimed
    from weightprep.convert.options import ConvertOptions
    from weightprep.convert.outlook import outlook
    from weightprep.convert.planner import plan_model
    from weightprep.convert.prediction import forecast

    chosen = choose_engine(engine)
    version = chosen.version
    if chosen.note is not None:
        say(chosen.note)
    checkpoint = open_headers(src)
    options = ConvertOptions(src, src, recipe=recipe, precision=parse_precision(precision))
    model = plan_model(checkpoint, options)
    prospect = outlook(checkpoint, model, options)
    today_note = _today_note(model.architecture)
    unclaimed = unclaimed_modules(model, checkpoint.tensors)
    forecasts = [layer for name in target or ["gfx950"] for layer in forecast(checkpoint, model, name, version)]
    compressors = [kind for name in target or ["gfx950"] for kind in forecast_compressors(checkpoint, name, version)]
    in_blocks = checkpoint.config.weight_block_size is not None
    scales = {name: predict_scales(name, version) if in_blocks else None for name in target or ["gfx950"]}
    nbytes = sum(header.file_size for header in checkpoint.shards.values())
    sidecar = SIDECAR_MANIFEST in checkpoint.other_files
    dtypes = Counter(ref.info.dtype for ref in checkpoint.tensors.values())
    if json:
        print_json(
            "inspect",
            {
                "path": str(src),
                "architecture": model.architecture,
                "recipe": model.recipe.name,
                "recipe_hash": model.recipe_hash,
                "engine": chosen.name,
                "engine_from": chosen.source,
                "engine_note": chosen.note,
                "quant_method": (checkpoint.config.quantization or {}).get("quant_method"),
                "shards": len(checkpoint.shards),
                "tensors": len(checkpoint.tensors),
                "bytes": nbytes,
                "dtypes": dict(sorted(dtypes.items())),
                "sidecar": sidecar,
                "nothing_to_convert": prospect.nothing_to_convert,
                "today_note": today_note,
                "passed": [{"module": name, "reason": why_unclaimed(model)} for name in unclaimed],
                "unmatched_excludes": list(prospect.unmatched_excludes),
                "layers": [_describe(layer) for layer in forecasts],
                "compressors": [_describe_compressors(kind) for kind in compressors],
                "group_scales": [
                    {"target": name, "today": _describe_path(pair[0]), "prepared": _describe_path(pair[1])}
                    for name, pair in scales.items()
                    if pair is not None
                ],
            },
        )
        return None
    print_lines(f"{src}: {model.architecture}, {len(checkpoint.tensors)} tensors in {len(checkpoint.shards)} shard(s)")
    print_lines(f"{nbytes / 1e9:.2f} GB; " + ", ".join(f"{count} {dtype}" for dtype, count in dtypes.most_common()))
    print_lines(f"recipe {model.recipe.name}, {chosen.name} ({chosen.source})", "")
    if model.recipe.nothing_to_convert is not None:
        print_lines(f"nothing to convert: {model.recipe.nothing_to_convert}")
    if compressors:
        print_lines("")
        _print_compressors(compressors)
    if model.recipe.nothing_to_convert is None:
        _print_table(forecasts)
        if today_note is not None:
            print_lines(today_note)
    for name in unclaimed:
        print_lines(f"{name}: {why_unclaimed(model)}")
    print_lines(*unmatched_lines(prospect.unmatched_excludes))
    for name, pair in scales.items():
        if pair is not None and not pair[0].fast:
            print_lines(
                "", f"{name}: activation scales: today {_path(pair[0])}, prepared {_path(pair[1])}: {pair[0].reason}"
            )
    if model.recipe.nothing_to_convert is not None:
        return None
    if prospect.nothing_to_convert is not None:
        print_lines("", f"nothing to convert: {prospect.nothing_to_convert}")
    if sidecar:
        say(
            f"a sidecar with converted weights is there already ({SIDECAR_MANIFEST}): --load-format weightprep reads it"
        )
    for name in target or ["gfx950"]:
        layers = [layer for layer in forecasts if layer.target == name]
        for prediction in dict.fromkeys(layer.prepared for layer in layers if not layer.prepared.fast):
            count = sum(layer.prepared == prediction for layer in layers)
            print_lines(
                "",
                f"{name}: {count} of {len(layers)} layer(s), prepared, take {_path(prediction)}: {prediction.reason}",
            )
        say(*_gains(name, layers, None if sidecar else prospect.layout, precision, supposed=today_note is not None))
    return None


def _gains(
    name: str, layers: Sequence[LayerForecast], layout: Layout | None, precision: str | None, *, supposed: bool
) -> list[str]:
    """What weightprep changes on the target `name`, and how to have it.

    :param layout: that of a conversion, None where there is nothing left to convert
    :param supposed: whether it is not known what sglang does today
    """
    today = "today (supposed)" if supposed else "today"
    switch = f" and {AITER_SWITCH}" if name.startswith("gfx") else ""
    how = f"serve with --load-format weightprep{switch}"
    if layout is not None:
        asked = "" if precision is None else f" --precision {precision}"
        beside = " --layout sidecar" if layout is Layout.SIDECAR else ""
        how += f", or `weightprep convert{asked}{beside}` first"
    mended = [layer for layer in layers if layer.prepared.fast and not layer.today.fast]
    lines = []
    for verdict in dict.fromkeys(_speed(layer.today) for layer in mended):
        count = sum(_speed(layer.today) == verdict for layer in mended)
        lines.append(f"{name}: {count} of {len(layers)} layer(s) are {verdict} {today} and fast once prepared: {how}")
    if layers and all(layer.today.fast for layer in layers):
        with_switch = f", with {AITER_SWITCH}" if switch else ""
        lines.append(f"{name}: all {len(layers)} layer(s) are fast {today}{with_switch}")
    return lines


def _today_note(architecture: str) -> str | None:
    """What is to be told of "today" for an architecture of which it is not known whether sglang has it."""
    from weightprep.recipe.load import shipped_architectures

    if architecture in shipped_architectures():
        return None
    return (
        f'"today" supposes that sglang loads {architecture} as it loads DeepSeek: no recipe of weightprep\'s own names '
        "this architecture, and whether sglang has it is not known here"
    )


def _describe_path(prediction: Any) -> dict[str, Any]:
    return {
        "path": prediction.path,
        "fast": prediction.fast,
        "sound": prediction.sound,
        "reason": prediction.reason,
    }


def _describe_compressors(kind: CompressorForecast) -> dict[str, Any]:
    return {
        "kind": kind.kind,
        "count": kind.count,
        "target": kind.target,
        "dtypes": dict(kind.dtypes),
        "today": _describe_path(kind.today),
        "prepared": _describe_path(kind.prepared),
        "hooks": list(kind.hooks),
    }


def _print_compressors(compressors: Sequence[CompressorForecast]) -> None:
    """A line per kind; what weightprep hooks once per target, and what that saves."""
    print_lines(f"{'target':8} {'compressors':32} {'wkv, wgate':20} {'today':26} {'prepared':26} why")
    for kind in compressors:
        gate = "/".join(sorted({kind.dtypes.get("wkv", "missing"), kind.dtypes.get("wgate", "missing")}))
        print_lines(
            f"{kind.target:8} {f'{kind.count} {kind.kind}':32} {gate:20} "
            f"{_path(kind.today):26} {_path(kind.prepared):26} {kind.prepared.reason}"
        )
    for name in dict.fromkeys(kind.target for kind in compressors):
        mended = [kind for kind in compressors if kind.target == name and kind.prepared.fast and not kind.today.fast]
        if mended:
            say(
                f"{name}: {sum(kind.count for kind in mended)} kernel(s) per step go away with --load-format "
                f"weightprep, where SGLANG_USE_AITER is on; it hooks {' and '.join(mended[0].hooks)}"
            )


def _describe(layer: LayerForecast) -> dict[str, Any]:
    return {
        "layer": layer.plan.layer,
        "group": layer.plan.group,
        "module": layer.plan.source,
        "target": layer.target,
        "encoding": layer.encoding,
        "loader": layer.why_today,
        "today": _describe_path(layer.today),
        "prepared": _describe_path(layer.prepared),
    }


def _print_table(forecasts: Sequence[LayerForecast]) -> None:
    """Neighbouring layers that fare alike share a line."""
    print_lines(f"{'target':8} {'layers':16} {'stored as':12} {'today':22} {'prepared':22} why today")
    runs: list[list[LayerForecast]] = []
    for layer in forecasts:
        key = _fate(layer)
        if runs and _fate(runs[-1][0]) == key:
            runs[-1].append(layer)
        else:
            runs.append([layer])
    for run in runs:
        first, last = run[0].plan, run[-1].plan
        layers = f"{first.layer}" if first is last else f"{first.layer}-{last.layer}"
        layer = run[0]
        print_lines(
            f"{layer.target:8} {layers + ' ' + first.group:16} {layer.encoding:12} "
            f"{_path(layer.today):22} {_path(layer.prepared):22} {layer.why_today}; {layer.today.reason}"
        )


def _fate(layer: LayerForecast) -> tuple[object, ...]:
    return (layer.target, layer.plan.group, layer.encoding, layer.today, layer.why_today, layer.prepared)


def _path(prediction: Any) -> str:
    return f"{prediction.path} ({_speed(prediction)})"


def _speed(prediction: Any) -> str:
    return "fast" if prediction.fast else "slow" if prediction.sound else "WRONG"
