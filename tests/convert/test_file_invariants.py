"""The invariants of the pipeline on files: checkpoints of random shapes and encodings, with tensors of no known kind.

I1 what is loaded from the result is what is loaded from the source, I2 converting again finds nothing to do, I3 every
tensor of the source has one fate and the files agree with it, I4 what the plan does not name keeps its bytes.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "transforms"))

from sources import ENCODINGS, source

from weightprep.checkpoint.reader import find_module, read_tensor
from weightprep.checkpoint.repository import Checkpoint
from weightprep.convert.execute import execute
from weightprep.convert.files import Unwatched
from weightprep.convert.options import ConvertOptions, Layout
from weightprep.convert.plan import ConversionPlan, Fate
from weightprep.convert.planner import make_plan
from weightprep.convert.verify import verify
from weightprep.errors import CheckpointError
from weightprep.formats import Encoding
from weightprep.recipe import ModulePlan
from weightprep.transforms import Bundle, StepContext, run_steps

SUFFIXES = {
    Encoding.FP8_BLOCK: (".weight_scale_inv", ".weight_scale", ".scale"),
    Encoding.INT8_BLOCK: (".weight_scale_inv",),
    Encoding.MXFP4: (".weight_scale",),
}
Tensors = dict[str, torch.Tensor]


@st.composite
def checkpoints(draw: st.DrawFn) -> tuple[dict[str, object], list[Tensors]]:
    """config.json and the tensors of each shard."""
    layers, nextn = draw(st.integers(1, 3)), draw(st.integers(0, 1))
    heads, nope, v = draw(st.integers(1, 3)), draw(st.sampled_from([32, 96])), draw(st.sampled_from([32, 64]))
    rank = draw(st.sampled_from([64, 160]))
    config: dict[str, object] = {
        "architectures": ["DeepseekV3ForCausalLM"],
        "num_hidden_layers": layers,
        "num_nextn_predict_layers": nextn,
        "num_attention_heads": heads,
        "qk_nope_head_dim": nope,
        "v_head_dim": v,
        "kv_lora_rank": rank,
    }
    if draw(st.booleans()):
        config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    tensors: Tensors = {}
    for layer in range(layers + nextn):
        encoding = draw(st.sampled_from(ENCODINGS))
        bundle = source(encoding, heads * (nope + v), rank, seed=draw(st.integers(0, 99)))
        module = f"model.layers.{layer}.self_attn.kv_b_proj"
        tensors[f"{module}.weight"] = bundle["weight"]
        if "scale" in bundle:
            scale = bundle["scale"]
            # a scale for each row is published as [N] and as [N, 1]
            if encoding.value.endswith("channel") and draw(st.booleans()):
                scale = scale[:, 0]
            tensors[module + draw(st.sampled_from(SUFFIXES.get(encoding, (".weight_scale",))))] = scale
    unknown = st.from_regex(r"[a-z]{1,5}(\.[0-9]{1,2})?\.(bias|weight|scale|weight_scale|qweight)", fullmatch=True)
    for name in draw(st.lists(unknown, max_size=5, unique=True)):
        shape = draw(st.lists(st.integers(1, 5), max_size=3))
        tensors[name] = torch.randn(shape).to(draw(st.sampled_from([torch.bfloat16, torch.float32])))
    count = draw(st.integers(1, 3))
    shards: list[Tensors] = [{} for _ in range(count)]
    for name, tensor in tensors.items():
        shards[draw(st.integers(0, count - 1))][name] = tensor
    return config, [shard for shard in shards if shard]


def write(root: Path, config: dict[str, object], shards: list[Tensors]) -> Tensors:
    root.mkdir()
    names = [f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))]
    for name, tensors in zip(names, shards, strict=True):
        save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, root / name)
    weight_map = {key: name for name, tensors in zip(names, shards, strict=True) for key in tensors}
    (root / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    (root / "config.json").write_text(json.dumps(config))
    return {key: tensor for tensors in shards for key, tensor in tensors.items()}


def read(root: Path) -> Tensors:
    return {name: tensor for path in sorted(root.glob("*.safetensors")) for name, tensor in load_file(path).items()}


def prepared(root: Path, module: ModulePlan, plan: ConversionPlan) -> Bundle:
    found = find_module(Checkpoint.open(root).tensors, module.source)
    assert found is not None
    scale = read_tensor(found.scale) if found.scale else None
    whole = Bundle.source(read_tensor(found.weight), scale, found.encoded)
    return run_steps(module.prepare, whole, StepContext(plan.model.dims, "gfx950", name=module.source))


def raw(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.contiguous().reshape(-1).view(torch.uint8).numpy())


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(given_checkpoint=checkpoints(), requantize=st.booleans(), nextn=st.sampled_from(["convert", "keep"]))
def test_invariants_of_a_conversion(
    given_checkpoint: tuple[dict[str, object], list[Tensors]], requantize: bool, nextn: str
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        src, dst = Path(folder, "src"), Path(folder, "dst")
        before = write(src, *given_checkpoint)
        options = ConvertOptions(
            src,
            dst,
            requantize=requantize,
            nextn=nextn,  # type: ignore[arg-type]
            allow_quality_loss=True,
            workers=1,
        )
        try:
            plan = make_plan(options)
        except CheckpointError as error:
            # inline may not add a config to one that is silent about quantized tensors that stay
            undeclared = "quantization_config" not in given_checkpoint[0]
            quantized = any(name.endswith(("scale", "scale_inv")) for name in before)
            if not (undeclared and quantized and "a quantized tensor beside it" in str(error)):
                raise
            return

        fates = {fate.name: fate.fate for fate in plan.fates}
        assert sorted(fate.name for fate in plan.fates) == sorted(before)
        named = {ref.name for job in plan.modules for ref in job.source_refs}
        assert named == {name for name, fate in fates.items() if fate is not Fate.PASSED}
        planned = {job.plan.source for job in plan.modules} | {module.plan.source for module in plan.passed}
        assert planned == {module.source for module in plan.model.modules}
        assert not planned & set(plan.model.kept)
        if not plan.modules:
            return
        execute(plan, Unwatched())
        assert verify(src, dst).findings == ()

        after = read(dst)
        made = {info.name for job in plan.modules for info in job.outputs.values()}
        dropped = {name for name, fate in fates.items() if fate is Fate.DROPPED}
        assert set(after) == (set(before) - dropped) | made
        for name, fate in fates.items():
            if fate is Fate.PASSED:
                assert (after[name].dtype, after[name].shape) == (before[name].dtype, before[name].shape)
                assert raw(after[name]) == raw(before[name]), name
        assert {name: raw(tensor) for name, tensor in read(src).items()} == {n: raw(t) for n, t in before.items()}

        for job in plan.modules:
            assert after[f"{job.plan.source}.weight"].dtype is torch.float8_e4m3fn
            online, offline = prepared(src, job.plan, plan), prepared(dst, job.plan, plan)
            assert online.keys() == offline.keys()
            for role, tensor in online.items():
                assert raw(tensor) == raw(offline[role]), f"{job.plan.source} {role}"
        again = make_plan(ConvertOptions(dst, Path(folder, "again"), nextn=nextn))  # type: ignore[arg-type]
        assert not again.modules


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(given_checkpoint=checkpoints(), precision=st.sampled_from(["fp8", "mxfp4", "bf16"]))
def test_a_sidecar_passes_every_tensor(
    given_checkpoint: tuple[dict[str, object], list[Tensors]], precision: str
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        src, dst = Path(folder, "src"), Path(folder, "dst")
        before = write(src, *given_checkpoint)
        asked = {"precision": precision, "requantize": True, "allow_quality_loss": True, "workers": 1}
        plan = make_plan(ConvertOptions(src, dst, layout=Layout.SIDECAR, **asked))  # type: ignore[arg-type]
        assert sorted(fate.name for fate in plan.fates) == sorted(before)
        assert {fate.fate for fate in plan.fates} == {Fate.PASSED}
        if plan.modules:
            execute(plan, Unwatched())
            assert {name: raw(tensor) for name, tensor in read(dst).items()} == {n: raw(t) for n, t in before.items()}
