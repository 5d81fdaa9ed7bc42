"""The tuning table: every cell divides its shape, and shapes that no cell covers get a configuration that does."""

from __future__ import annotations

import pytest

from weightprep.runtime.choice import OutQuant
from weightprep.runtime.group_quant import FP8_GROUP
from weightprep.runtime.tuning import BmmConfig, TritonConfig, WgmmaConfig, choose
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
def test_every_shape_gets_a_configuration_that_fits(heads: int, rows: int, k: int, columns: int) -> None:
    config = choose(heads, rows, k, columns, form=OutQuant.NONE, mxfp4=False)
    if isinstance(config, BmmConfig):
        config = config.otherwise
    assert isinstance(config, TritonConfig) or config.fits(k, columns)


def test_a_tile_that_exceeds_shared_memory_does_not_fit() -> None:
    assert WgmmaConfig(64, 2, 4, 8).fits(512, 256)
    assert not WgmmaConfig(128, 2, 4, 8).fits(512, 256)
    assert not WgmmaConfig(64, 2, 1, 8).fits(1024, 256)
    assert not WgmmaConfig(64, 2, 1, 2).fits(512, 192)
