"""The tuning table: every cell divides its shape, and shapes that no cell covers get a configuration that does."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from weightprep.runtime.arch import arch_of
from weightprep.runtime.choice import OutQuant
from weightprep.runtime.group_quant import FP8_GROUP
from weightprep.runtime.tuning import BmmConfig, DecodeConfig, TritonConfig, WgmmaConfig, choose, portable
from weightprep.runtime.tuning_h200 import MEASURED

SHARED_BYTES_OF_A_BLOCK = 232448  # compute capability 9.0, CUDA programming guide


@pytest.mark.parametrize("key", list(MEASURED), ids=str)
def test_every_cell_divides_its_shape(key: tuple[int, int, OutQuant, bool]) -> None:
    k, columns, form, _ = key
    for cell in MEASURED[key]:
        config = cell.config.otherwise if isinstance(cell.config, BmmConfig) else cell.config
        if isinstance(config, TritonConfig):
            continue
        assert config.fits(k, columns), cell
        assert config.shared_bytes(k) <= SHARED_BYTES_OF_A_BLOCK
        if isinstance(config, WgmmaConfig) and form is OutQuant.FP8_GROUP:
            assert config.block_columns % FP8_GROUP == 0, "a group would be split between blocks"


@pytest.mark.parametrize("heads", [1, 3, 24, 128])
@pytest.mark.parametrize("rows", [1, 5, 100, 257, 4096])
@pytest.mark.parametrize(("k", "columns"), [(512, 256), (192, 512), (512, 384), (1024, 128), (96, 128)])
@pytest.mark.parametrize("arch", ["sm90", "sm100", "gfx950"])
def test_every_shape_gets_a_configuration_that_fits(heads: int, rows: int, k: int, columns: int, arch: str) -> None:
    config = choose(heads, rows, k, columns, form=OutQuant.NONE, mxfp4=False, arch=arch)
    if isinstance(config, BmmConfig):
        config = config.otherwise
    assert isinstance(config, TritonConfig) or config.fits(k, columns)


@pytest.mark.parametrize("key", list(MEASURED), ids=str)
def test_cells_are_for_the_arch_that_they_were_measured_on(key: tuple[int, int, OutQuant, bool]) -> None:
    k, columns, form, mxfp4 = key
    for cell in MEASURED[key]:
        assert choose(cell.heads, cell.rows, k, columns, form=form, mxfp4=mxfp4, arch="sm90") == cell.config
        for arch in ("sm89", "sm100", "sm120", "gfx942", "gfx950"):
            other = choose(cell.heads, cell.rows, k, columns, form=form, mxfp4=mxfp4, arch=arch)
            assert other == portable(cell.rows, k, form=form)


def test_shapes_without_a_cell_take_the_rule_on_that_arch_alone() -> None:
    wanted = {8: DecodeConfig(columns=32, warps_k=2, warps_n=4), 1000: WgmmaConfig(64, 2, 4, 4)}
    for rows, config in wanted.items():
        assert choose(8, rows, 256, 384, form=OutQuant.NONE, mxfp4=False, arch="sm90") == config
        assert isinstance(choose(8, rows, 256, 384, form=OutQuant.NONE, mxfp4=False, arch="sm100"), TritonConfig)


def test_an_arch_is_named_after_its_instruction_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (10, 3))
    properties = SimpleNamespace(gcnArchName="gfx950:sramecc+:xnack-")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    ask = arch_of.__wrapped__
    monkeypatch.setattr(torch.version, "hip", None)
    assert ask(torch.device("cuda:0")) == "sm103"
    monkeypatch.setattr(torch.version, "hip", "7.2")
    assert ask(torch.device("cuda:0")) == "gfx950"
    assert ask(torch.device("cpu")) == "cpu"


def test_a_tile_that_exceeds_shared_memory_does_not_fit() -> None:
    assert WgmmaConfig(64, 2, 4, 8).fits(512, 256)
    assert not WgmmaConfig(128, 2, 4, 8).fits(512, 256)
    assert not WgmmaConfig(64, 2, 1, 8).fits(1024, 256)
    assert not WgmmaConfig(64, 2, 1, 2).fits(512, 192)
