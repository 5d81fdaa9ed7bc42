"""The conversion by table is the recipe's steps: the same bytes and the same record, whatever the weight."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weightprep.checkpoint.manifest import ModuleRecord
from weightprep.checkpoint.reader import SourceModule
from weightprep.checkpoint.writer import as_bytes
from weightprep.convert.by_table import convert_by_table, has_table
from weightprep.convert.module import convert_module
from weightprep.convert.options import ConvertOptions, Layout
from weightprep.convert.plan import ModuleJob
from weightprep.convert.planner import make_plan
from weightprep.errors import CheckpointError
from weightprep.formats.e4m3_table import encode_table
from weightprep.synth import synthesize


def jobs_of(source: Path, destination: Path, **changes: object) -> tuple[ModuleJob, ...]:
    return make_plan(ConvertOptions(source, destination, **changes)).modules  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> ModuleJob:
    """A job whose source file the tests write."""
    root = tmp_path_factory.mktemp("by-table")
    return jobs_of(synthesize(root / "src"), root / "dst")[0]


def with_source(job: ModuleJob, codes: np.ndarray) -> ModuleJob:
    """`job` with a weight of `codes`, repeated or cut to its size."""
    weight = job.source.weight
    path = weight.path.with_name("codes")
    path.write_bytes(np.resize(codes, weight.nbytes // 2).astype("<u2").tobytes())
    moved = dataclasses.replace(weight, path=path, offset=0)
    return dataclasses.replace(job, source=SourceModule(job.source.module, job.source.encoded, moved, None))


Outcome = tuple[dict[str, bytes], ModuleRecord] | str


def by_table(job: ModuleJob) -> Outcome:
    """Bytes and record, or the refusal."""
    written: dict[str, bytes] = {}

    def write(name: str, slices: Iterable[np.ndarray]) -> None:
        written[name] = b"".join(part.tobytes() for part in slices)

    try:
        record = convert_by_table(job, {"heads": 8}, "model.safetensors", write)
    except CheckpointError as error:
        return str(error)
    return written, record


def by_steps(job: ModuleJob) -> Outcome:
    try:
        converted = convert_module(job, {"heads": 8}, "model.safetensors")
    except CheckpointError as error:
        return str(error)
    named = {job.outputs[role].name: bytes(as_bytes(tensor)) for role, tensor in converted.tensors.items()}
    return named, converted.record


def bf16(values: np.ndarray) -> np.ndarray:
    """The codes of float32 values, cut off."""
    return (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)


LARGEST_FINITE = 0x7F7F
WEIGHTS = {
    "every finite code": np.array([c for c in range(1 << 16) if c & 0x7FFF <= LARGEST_FINITE], dtype=np.uint16),
    "zeros of both signs": np.array([0, 0x8000], dtype=np.uint16),
    "one value": np.array([0xBC23], dtype=np.uint16),
    "subnormals": np.arange(0x80, dtype=np.uint16),
    "amax at the floor of 1e-12": bf16(np.array([1e-12, 5e-13, -1e-12, 1e-20])),
    "an empty head": np.repeat(np.array([0x3C00, 0, 0x3D10], dtype=np.uint16), 448 * 512),
    "an amax with a sign": bf16(np.array([0.5, -2.0, 1.5, -0.25])),
    "an amax without": bf16(np.array([0.5, -1.5, 2.0, -0.25])),
    "NaN": np.array([0x3C00, 0x7FC0], dtype=np.uint16),
    "infinity": np.array([0x3C00, 0xFF80], dtype=np.uint16),
}


@pytest.mark.parametrize("codes", WEIGHTS.values(), ids=WEIGHTS)
def test_same_as_the_steps(job: ModuleJob, codes: np.ndarray) -> None:
    changed = with_source(job, codes)
    assert by_table(changed) == by_steps(changed)


@given(exponent=st.integers(-130, 127), seed=st.integers(0, 2**32 - 1))
@settings(max_examples=30, deadline=None)
def test_same_as_the_steps_at_every_magnitude(job: ModuleJob, exponent: int, seed: int) -> None:
    normal = np.random.default_rng(seed).standard_normal(50_021)
    largest = float(np.finfo(np.float32).max)
    codes = bf16(np.clip(normal * 2.0**exponent, -largest, largest))
    codes = np.where(codes & 0x7FFF > LARGEST_FINITE, codes & 0x8000 | LARGEST_FINITE, codes)
    changed = with_source(job, codes)
    assert by_table(changed) == by_steps(changed)


def test_figures_are_those_of_numpy(job: ModuleJob) -> None:
    """Head by head in float64, with the e4m3fn of ml_dtypes; the second of the eight heads is 2^-12 of the others."""
    rows, cols = job.source.encoded.rows, job.source.encoded.cols
    values = np.random.default_rng(3).standard_normal((8, rows // 8, cols))
    values[1] *= 2.0**-12
    codes = bf16(values).reshape(-1)
    weight = (codes.astype(np.uint32) << 16).view(np.float32).reshape(8, -1)
    outcome = by_table(with_source(job, codes))
    assert not isinstance(outcome, str)
    quality = outcome[1].quality

    # scale and product are each rounded to float32 by the conversion; the figures have four digits
    m = np.float32(1) / np.abs(weight).max() * np.float32(448)
    stored = (weight * m).astype(ml_dtypes.float8_e4m3fn).astype(np.float32) * (np.float32(1) / m)
    signal = np.square(weight, dtype=np.float64).sum(axis=1)
    noise = np.square(stored - weight, dtype=np.float64).sum(axis=1)
    db = 10 * np.log10(signal / noise)
    assert db.argmin() == 1
    assert quality.worst_head_sqnr_db == pytest.approx(db.min(), rel=1e-3)
    assert quality.sqnr_db == pytest.approx(10 * np.log10(signal.sum() / noise.sum()), rel=1e-3)
    assert quality.relative_error == pytest.approx(np.sqrt(noise.sum() / signal.sum()), rel=1e-3)
    assert quality.max_error == pytest.approx(np.abs(stored - weight).max(), rel=1e-6)
    assert quality.amax == np.abs(weight).max()
    amax = np.abs(weight).max(axis=1)
    assert quality.head_amax_ratio == pytest.approx(amax.max() / amax.min(), rel=1e-3)


def test_rows_that_only_divide_are_no_heads(job: ModuleJob) -> None:
    """Of a module that is never split its eighths are not heads, so none of them is judged or compared."""
    unsplit = dataclasses.replace(job, plan=dataclasses.replace(job.plan, load=()))
    changed = with_source(unsplit, WEIGHTS["an empty head"])
    outcome = by_table(changed)
    assert outcome == by_steps(changed)
    assert not isinstance(outcome, str)
    quality = outcome[1].quality
    assert (quality.worst_head_sqnr_db, quality.head_amax_ratio) == (None, None)
    assert quality.sqnr_db is not None


def test_refuses_what_the_steps_refuse(job: ModuleJob) -> None:
    for kind in ("NaN", "infinity"):
        refusal = by_table(with_source(job, WEIGHTS[kind]))
        assert isinstance(refusal, str)
        assert "a NaN or an infinity in the weight" in refusal


@pytest.mark.parametrize(("code", "found"), [(0x7FC0, "larger"), (0xFF80, "larger"), (0xBC22, "smaller")])
def test_refuses_a_weight_that_changed_between_the_two_passes(
    job: ModuleJob, monkeypatch: pytest.MonkeyPatch, code: int, found: str
) -> None:
    changed = with_source(job, WEIGHTS["one value"])

    def swap(*arguments: object) -> object:
        with_source(job, np.array([code], dtype=np.uint16))
        return encode_table(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr("weightprep.convert.by_table.encode_table", swap)
    assert f"{found} numbers in {changed.source.weight.name!r} than a moment before" in str(by_table(changed))


def test_is_for_bf16_to_fp8_under_one_scale_only(tmp_path: Path) -> None:
    bf16_source = synthesize(tmp_path / "bf16")
    blocks = synthesize(tmp_path / "blocks", encoding="fp8_block")
    sidecar = {"layout": Layout.SIDECAR}

    assert all(map(has_table, jobs_of(bf16_source, tmp_path / "dst")))
    assert not any(
        map(
            has_table,
            jobs_of(bf16_source, tmp_path / "dst", precision={"decoder": "mxfp4", "nextn": "mxfp4"}, **sidecar),
        )
    )
    assert not any(map(has_table, jobs_of(blocks, tmp_path / "dst", requantize=True)))
    channel = jobs_of(bf16_source, tmp_path / "dst")[0]
    (dequantize, quantize) = channel.plan.store
    per_channel = dataclasses.replace(quantize, params={**quantize.params, "granularity": "channel"})
    plan = dataclasses.replace(channel.plan, store=(dequantize, per_channel))
    assert not has_table(dataclasses.replace(channel, plan=plan))


def test_needs_no_torch(tmp_path: Path) -> None:
    synthesize(tmp_path / "src")
    code = f"""
import sys
from weightprep.cli import app
app(["convert", {str(tmp_path / "src")!r}, {str(tmp_path / "dst")!r}], standalone_mode=False)
print("torch" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "False"
    assert (tmp_path / "dst" / "weightprep.json").exists()
