"""Absorbed MXFP4 matrices in a sidecar's form, and a rank's rows of a real sidecar against the same rank's online
result.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from sources import meaning, source
from typer.testing import CliRunner

from weightprep.checkpoint.config import read_config
from weightprep.checkpoint.reader import find_module, read_tensor
from weightprep.checkpoint.repository import Checkpoint
from weightprep.cli import app
from weightprep.engines.sglang.options import Options
from weightprep.engines.sglang.sidecar import open_sidecar
from weightprep.formats import Encoding, classify
from weightprep.recipe import load_recipe, resolve
from weightprep.synth import synthesize
from weightprep.transforms import Bundle, StepContext, make_step, run_steps
from weightprep.transforms.stored_absorbed import STORED_NAMES, from_linears, reassemble, stored_shapes, to_linears

DIMS = {"heads": 4, "nope": 96, "v": 64, "rank": 128}
STEPS = [make_step(name, {}, "test") for name in ("dequantize", "split_kv_b", "absorb_mxfp4", "layout")]


def absorbed() -> tuple[Bundle, Bundle]:
    bundle = source(Encoding.BF16, 4 * 160, 128)
    return bundle, run_steps(STEPS, bundle, StepContext(DIMS))


def test_each_matrix_is_an_ordinary_mxfp4_linear() -> None:
    linears = to_linears(absorbed()[1])
    assert {role: tuple(tensor.shape) for role, tensor in linears.items()} == stored_shapes(DIMS)
    assert set(linears) == set(STORED_NAMES)
    for weight, scale, shape in (("w_kc", "w_scale_k", (512, 96)), ("w_vc", "w_scale_v", (256, 128))):
        found = classify(
            STORED_NAMES[weight],
            linears[weight].dtype,
            tuple(linears[weight].shape),
            linears[scale].dtype,
            tuple(linears[scale].shape),
        )
        assert (found.encoding, found.rows, found.cols) == (Encoding.MXFP4, *shape)


def test_back_from_a_file_and_again_through_the_steps() -> None:
    _, made = absorbed()
    again = from_linears(to_linears(made), heads=4)
    assert again.encoded == made.encoded
    for role, tensor in run_steps(STEPS, again, StepContext(DIMS)).items():
        assert torch.equal(tensor, made[role]), role
        assert tensor.stride() == made[role].stride(), role


def test_reassembled_numbers_are_near_the_source_in_the_right_places() -> None:
    bundle, made = absorbed()
    values, original = reassemble(made).numpy(), meaning(bundle)
    assert values.shape == original.shape
    # half of e2m1's widest step (4 to 6) under a scale of 1, which the even rule gives to an amax in [3.5, 7)
    assert np.abs(original).max() < 7
    assert np.abs(values - original).max() <= 1.0
    assert np.linalg.norm(values - original) / np.linalg.norm(original) < 0.15


@pytest.mark.parametrize("encoding", ["bf16", "fp8_block"])
def test_a_rank_reads_the_heads_that_it_would_have_made_online(tmp_path: Path, encoding: str) -> None:
    model = synthesize(tmp_path / "m", arch="deepseek_v3", layers=1, encoding=encoding)
    arguments = ["convert", str(model), str(model), "--layout", "sidecar", "--recipe", "deepseek_v3_mxfp4"]
    assert CliRunner().invoke(app, arguments).exit_code == 0
    plan = resolve(load_recipe("deepseek_v3_mxfp4"), read_config(model).raw)
    module = plan.modules[0]
    found = find_module(Checkpoint.open(model).tensors, module.source)
    assert found is not None
    scale = read_tensor(found.scale) if found.scale else None
    whole = Bundle.source(read_tensor(found.weight), scale, found.encoded)
    online = run_steps(module.prepare, whole, StepContext(plan.dims))
    sidecar = open_sidecar(model, Options(recipe="deepseek_v3_mxfp4"), plan)
    assert sidecar is not None
    for ranks in (1, 2):
        heads = plan.dims["heads"] // ranks
        for rank in range(ranks):
            rows = sidecar.rows(module.source, rank, ranks, torch.device("cpu"))
            offline = run_steps(module.prepare, rows, StepContext({**plan.dims, "heads": heads}))
            assert set(offline) == set(online)
            for role, tensor in offline.items():
                assert torch.equal(tensor, online[role][rank * heads : (rank + 1) * heads]), role


def test_inline_mxfp4_is_refused_with_the_way_out(tmp_path: Path) -> None:
    model = synthesize(tmp_path / "m", arch="deepseek_v3", layers=1)
    result = CliRunner().invoke(app, ["convert", str(model), str(tmp_path / "out"), "--precision", "mxfp4"])
    assert result.exit_code == 2
    assert "--layout sidecar" in result.output + result.stderr
    assert not (tmp_path / "out").exists()
