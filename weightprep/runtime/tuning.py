"""Which kernel and configuration serve a call on a GPU: measured cells first, then a rule for all other shapes.

Nothing is searched at run time, so a call does the same work whether or not it is being captured in a CUDA graph.
docs/benchmarks has the measurements behind tuning_h200.py; `scripts/bench_runtime.py --search` repeats them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

__all__ = ["BmmConfig", "Cell", "DecodeConfig", "TritonConfig", "choose", "portable"]


@dataclass(frozen=True, slots=True)
class DecodeConfig:
    """absorb_decode.cu: columns of one block, warps along K and N, tiles of 16 rows that one block computes in turn.

    `prefetch` lets the kernel begin, and weights travel to L2, while the kernel before it drains.
    """

    columns: int
    warps_k: int
    warps_n: int
    row_tiles: int
    prefetch: bool = True

    def fits(self, k: int) -> bool:
        """Whether the blocks divide a contraction of length `k`."""
        return k % (64 * self.warps_k) == 0 and self.columns % (8 * self.warps_n) == 0


@dataclass(frozen=True, slots=True)
class TritonConfig:
    """Triton kernel: block sizes and launch shape; `swap` makes the weights the first operand of the product.

    `act_group` quantizes the activations per row and 128 of K for a product in fp8; block_k is then 128.
    """

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    swap: bool = False
    act_group: bool = False


@dataclass(frozen=True, slots=True)
class BmmConfig:
    """torch.bmm on a bf16 copy of the weight is the fastest way for this cell, where the caller has such a copy."""

    otherwise: DecodeConfig | TritonConfig


@dataclass(frozen=True, slots=True)
class Cell:
    """The best configuration measured for up to `rows` rows at `heads` heads."""

    heads: int
    rows: int
    config: DecodeConfig | TritonConfig | BmmConfig


def choose(
    heads: int, rows: int, k: int, columns: int, *, out_quant: int, mxfp4: bool
) -> DecodeConfig | TritonConfig | BmmConfig:
    """Configuration for x (rows, heads, k) times (heads, k, columns).

    Cells of the nearest measured number of heads are used for others too; more rows than measured take the rule.

    :param out_quant: 0 bf16, 1 fp8 groups of 128, 2 MXFP4 groups of 32
    """
    from weightprep.runtime.tuning_h200 import MEASURED

    cells = MEASURED.get((k, columns, out_quant, mxfp4), ())
    fitting = [cell for cell in cells if rows <= cell.rows]
    if fitting:
        nearest = min(fitting, key=lambda c: (abs(math.log2(c.heads / heads)), c.rows))
        return nearest.config
    if rows <= 64 and k % 64 == 0 and columns % 128 == 0:
        return DecodeConfig(columns=32, warps_k=2 if k % 128 == 0 else 1, warps_n=4, row_tiles=1)
    return portable(rows, k, out_quant=out_quant)


def portable(rows: int, k: int, *, out_quant: int) -> TritonConfig:
    """Triton configuration for any GPU and shape: enough columns for a quantization group, few rows for few tokens."""
    block_m = 16 if rows <= 16 else 32 if rows <= 128 else 128
    return TritonConfig(
        block_m=block_m,
        block_n=128 if out_quant else 64,
        block_k=64 if k % 128 else 128,
        num_warps=8 if block_m == 128 else 4,
        num_stages=3,
    )
