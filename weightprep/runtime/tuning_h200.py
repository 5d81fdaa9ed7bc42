"""Best measured configurations on an NVIDIA H200; written by `scripts/bench_runtime.py --search`."""

from __future__ import annotations

from typing import Final

from weightprep.runtime.choice import OutQuant
from weightprep.runtime.tuning import BmmConfig, Cell, DecodeConfig, TritonConfig

__all__ = ["MEASURED"]

# (K, N, output quantization, MXFP4 weights) -> cells
MEASURED: Final[dict[tuple[int, int, OutQuant, bool], tuple[Cell, ...]]] = {
    (512, 256, OutQuant.FP8_GROUP, False): (
        Cell(8, 1, DecodeConfig(columns=32, warps_k=2, warps_n=4, row_tiles=1, prefetch=True)),
        Cell(8, 4, DecodeConfig(columns=32, warps_k=2, warps_n=4, row_tiles=1, prefetch=True)),
        Cell(8, 16, DecodeConfig(columns=32, warps_k=2, warps_n=4, row_tiles=1, prefetch=True)),
        Cell(8, 64, DecodeConfig(columns=64, warps_k=4, warps_n=4, row_tiles=1, prefetch=True)),
        Cell(8, 256, DecodeConfig(columns=128, warps_k=2, warps_n=4, row_tiles=1, prefetch=True)),
        Cell(16, 1, DecodeConfig(columns=64, warps_k=4, warps_n=4, row_tiles=1, prefetch=True)),
        Cell(16, 4, DecodeConfig(columns=64, warps_k=4, warps_n=4, row_tiles=1, prefetch=True)),
        Cell(16, 16, DecodeConfig(columns=64, warps_k=4, warps_n=4, row_tiles=1, prefetch=True)),
        Cell(16, 64, DecodeConfig(columns=64, warps_k=4, warps_n=2, row_tiles=1, prefetch=True)),
        Cell(
            16,
            256,
            TritonConfig(block_m=64, block_n=128, block_k=128, num_warps=8, num_stages=4, swap=False, act_group=True),
        ),
        Cell(64, 1, DecodeConfig(columns=64, warps_k=2, warps_n=4, row_tiles=1, prefetch=True)),
        Cell(64, 4, DecodeConfig(columns=64, warps_k=2, warps_n=4, row_tiles=1, prefetch=True)),
        Cell(64, 16, DecodeConfig(columns=64, warps_k=2, warps_n=4, row_tiles=1, prefetch=True)),
        Cell(
            64,
            64,
            TritonConfig(block_m=64, block_n=128, block_k=128, num_warps=8, num_stages=3, swap=False, act_group=True),
        ),
        Cell(
            64,
            256,
            TritonConfig(block_m=128, block_n=128, block_k=64, num_warps=8, num_stages=3, swap=False, act_group=False),
        ),
    ),
    (192, 512, OutQuant.NONE, False): (
        Cell(8, 1, DecodeConfig(columns=64, warps_k=1, warps_n=8, row_tiles=1, prefetch=True)),
        Cell(8, 4, DecodeConfig(columns=32, warps_k=1, warps_n=4, row_tiles=1, prefetch=True)),
        Cell(8, 16, DecodeConfig(columns=16, warps_k=1, warps_n=1, row_tiles=1, prefetch=True)),
        Cell(8, 64, DecodeConfig(columns=128, warps_k=3, warps_n=8, row_tiles=1, prefetch=True)),
        Cell(
            8,
            256,
            BmmConfig(
                TritonConfig(block_m=64, block_n=64, block_k=64, num_warps=4, num_stages=3, swap=True, act_group=False)
            ),
        ),
        Cell(16, 1, DecodeConfig(columns=16, warps_k=1, warps_n=1, row_tiles=1, prefetch=True)),
        Cell(16, 4, DecodeConfig(columns=64, warps_k=1, warps_n=8, row_tiles=1, prefetch=True)),
        Cell(16, 16, DecodeConfig(columns=32, warps_k=1, warps_n=4, row_tiles=1, prefetch=True)),
        Cell(16, 64, DecodeConfig(columns=128, warps_k=1, warps_n=8, row_tiles=1, prefetch=True)),
        Cell(
            16,
            256,
            BmmConfig(
                TritonConfig(
                    block_m=128, block_n=128, block_k=64, num_warps=8, num_stages=3, swap=True, act_group=False
                )
            ),
        ),
        Cell(64, 1, DecodeConfig(columns=128, warps_k=1, warps_n=8, row_tiles=1, prefetch=True)),
        Cell(64, 4, DecodeConfig(columns=128, warps_k=1, warps_n=8, row_tiles=1, prefetch=True)),
        Cell(64, 16, DecodeConfig(columns=128, warps_k=1, warps_n=8, row_tiles=1, prefetch=True)),
        Cell(64, 64, BmmConfig(DecodeConfig(columns=64, warps_k=1, warps_n=2, row_tiles=4, prefetch=True))),
        Cell(
            64,
            256,
            BmmConfig(
                TritonConfig(
                    block_m=256, block_n=128, block_k=64, num_warps=8, num_stages=3, swap=True, act_group=False
                )
            ),
        ),
    ),
    (512, 128, OutQuant.FP8_GROUP, False): (
        Cell(16, 1, DecodeConfig(columns=32, warps_k=2, warps_n=4, row_tiles=1, prefetch=True)),
        Cell(16, 16, DecodeConfig(columns=32, warps_k=2, warps_n=4, row_tiles=1, prefetch=True)),
        Cell(16, 64, DecodeConfig(columns=64, warps_k=4, warps_n=4, row_tiles=1, prefetch=True)),
        Cell(16, 256, DecodeConfig(columns=128, warps_k=2, warps_n=4, row_tiles=1, prefetch=True)),
        Cell(128, 1, DecodeConfig(columns=64, warps_k=2, warps_n=4, row_tiles=1, prefetch=True)),
        Cell(128, 16, DecodeConfig(columns=64, warps_k=2, warps_n=4, row_tiles=1, prefetch=True)),
        Cell(
            128,
            64,
            TritonConfig(block_m=64, block_n=128, block_k=128, num_warps=8, num_stages=3, swap=False, act_group=True),
        ),
        Cell(
            128,
            256,
            TritonConfig(block_m=128, block_n=128, block_k=64, num_warps=8, num_stages=3, swap=False, act_group=False),
        ),
    ),
    (128, 512, OutQuant.NONE, False): (
        Cell(16, 1, DecodeConfig(columns=16, warps_k=1, warps_n=1, row_tiles=1, prefetch=True)),
        Cell(16, 16, DecodeConfig(columns=16, warps_k=1, warps_n=1, row_tiles=1, prefetch=True)),
        Cell(16, 64, DecodeConfig(columns=64, warps_k=1, warps_n=2, row_tiles=1, prefetch=True)),
        Cell(
            16,
            256,
            BmmConfig(
                TritonConfig(
                    block_m=128, block_n=64, block_k=128, num_warps=8, num_stages=3, swap=False, act_group=False
                )
            ),
        ),
        Cell(128, 1, DecodeConfig(columns=128, warps_k=2, warps_n=4, row_tiles=1, prefetch=True)),
        Cell(128, 16, DecodeConfig(columns=128, warps_k=2, warps_n=4, row_tiles=1, prefetch=True)),
        Cell(128, 64, BmmConfig(DecodeConfig(columns=64, warps_k=1, warps_n=2, row_tiles=4, prefetch=True))),
        Cell(
            128,
            256,
            BmmConfig(
                TritonConfig(
                    block_m=64, block_n=128, block_k=128, num_warps=4, num_stages=3, swap=False, act_group=True
                )
            ),
        ),
    ),
    (512, 256, OutQuant.NONE, False): (
        Cell(8, 1, DecodeConfig(columns=32, warps_k=2, warps_n=4, row_tiles=1, prefetch=True)),
        Cell(8, 16, DecodeConfig(columns=32, warps_k=2, warps_n=4, row_tiles=1, prefetch=True)),
        Cell(8, 64, DecodeConfig(columns=64, warps_k=4, warps_n=4, row_tiles=1, prefetch=True)),
        Cell(8, 256, BmmConfig(DecodeConfig(columns=64, warps_k=4, warps_n=1, row_tiles=2, prefetch=True))),
        Cell(64, 1, DecodeConfig(columns=64, warps_k=2, warps_n=4, row_tiles=1, prefetch=True)),
        Cell(64, 16, DecodeConfig(columns=64, warps_k=2, warps_n=4, row_tiles=1, prefetch=True)),
        Cell(64, 64, BmmConfig(DecodeConfig(columns=32, warps_k=2, warps_n=1, row_tiles=4, prefetch=True))),
        Cell(
            64,
            256,
            BmmConfig(
                TritonConfig(
                    block_m=256, block_n=128, block_k=64, num_warps=8, num_stages=3, swap=True, act_group=False
                )
            ),
        ),
    ),
    (512, 256, OutQuant.FP8_GROUP, True): (
        Cell(8, 1, DecodeConfig(columns=32, warps_k=2, warps_n=4, row_tiles=1, prefetch=True)),
        Cell(8, 16, DecodeConfig(columns=32, warps_k=2, warps_n=4, row_tiles=1, prefetch=True)),
        Cell(8, 64, DecodeConfig(columns=64, warps_k=4, warps_n=4, row_tiles=1, prefetch=True)),
        Cell(8, 256, DecodeConfig(columns=128, warps_k=2, warps_n=4, row_tiles=2, prefetch=True)),
        Cell(64, 1, DecodeConfig(columns=128, warps_k=4, warps_n=2, row_tiles=1, prefetch=True)),
        Cell(64, 16, DecodeConfig(columns=64, warps_k=4, warps_n=2, row_tiles=1, prefetch=True)),
        Cell(64, 64, DecodeConfig(columns=64, warps_k=4, warps_n=1, row_tiles=4, prefetch=True)),
        Cell(64, 256, DecodeConfig(columns=64, warps_k=4, warps_n=1, row_tiles=16, prefetch=True)),
    ),
    (512, 256, OutQuant.MXFP4, True): (
        Cell(8, 1, DecodeConfig(columns=32, warps_k=4, warps_n=4, row_tiles=1, prefetch=True)),
        Cell(8, 16, DecodeConfig(columns=32, warps_k=4, warps_n=4, row_tiles=1, prefetch=True)),
        Cell(8, 64, DecodeConfig(columns=64, warps_k=4, warps_n=4, row_tiles=1, prefetch=True)),
        Cell(8, 256, DecodeConfig(columns=64, warps_k=4, warps_n=1, row_tiles=2, prefetch=True)),
        Cell(64, 1, DecodeConfig(columns=64, warps_k=8, warps_n=2, row_tiles=1, prefetch=True)),
        Cell(64, 16, DecodeConfig(columns=64, warps_k=8, warps_n=2, row_tiles=1, prefetch=True)),
        Cell(64, 64, DecodeConfig(columns=64, warps_k=4, warps_n=1, row_tiles=4, prefetch=True)),
        Cell(64, 256, DecodeConfig(columns=32, warps_k=2, warps_n=1, row_tiles=16, prefetch=True)),
    ),
    (192, 512, OutQuant.NONE, True): (
        Cell(8, 1, DecodeConfig(columns=64, warps_k=3, warps_n=8, row_tiles=1, prefetch=True)),
        Cell(8, 16, DecodeConfig(columns=64, warps_k=3, warps_n=4, row_tiles=1, prefetch=True)),
        Cell(8, 64, DecodeConfig(columns=16, warps_k=1, warps_n=1, row_tiles=1, prefetch=True)),
        Cell(8, 256, BmmConfig(DecodeConfig(columns=64, warps_k=1, warps_n=2, row_tiles=2, prefetch=True))),
        Cell(64, 1, DecodeConfig(columns=128, warps_k=1, warps_n=8, row_tiles=1, prefetch=True)),
        Cell(64, 16, DecodeConfig(columns=128, warps_k=3, warps_n=4, row_tiles=1, prefetch=True)),
        Cell(64, 64, BmmConfig(DecodeConfig(columns=64, warps_k=1, warps_n=2, row_tiles=4, prefetch=True))),
        Cell(64, 256, BmmConfig(DecodeConfig(columns=128, warps_k=1, warps_n=4, row_tiles=16, prefetch=True))),
    ),
}
