"""Which kernel and configuration serve a call on a GPU: measured cells of its arch, then a rule for all other shapes.

An arch without a table takes the portable Triton kernel: which of the others is faster there was not measured, and
cells of another arch would be a guess.

Nothing is searched at run time, so a call does the same work whether or not it is being captured in a CUDA graph.
docs/benchmarks has the measurements behind tuning_h200.py; `scripts/bench_runtime.py --search` repeats them.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Final

from weightprep.runtime.choice import OutQuant

__all__ = [
    "BmmConfig",
    "Cell",
    "CudaConfig",
    "DecodeConfig",
    "TritonConfig",
    "WgmmaConfig",
    "choose",
    "portable",
    "tables",
]

# Dynamic shared memory that one block can have on compute capability 9.0.
_SHARED_BYTES: Final = 227 * 1024


@dataclass(frozen=True, slots=True)
class DecodeConfig:
    """absorb_decode.cu: columns of one block, warps along K and N, tiles of 16 rows that one block computes in turn.

    `prefetch` lets the kernel begin, and weights travel to L2, while the kernel before it drains. `loads_first` issues
    every load of a block before waiting for any.
    """

    columns: int
    warps_k: int
    warps_n: int
    row_tiles: int = 1
    prefetch: bool = True
    loads_first: bool = False

    @property
    def kernel(self) -> str:
        return "absorb_decode"

    @property
    def threads(self) -> int:
        return 32 * self.warps_k * self.warps_n

    @property
    def block_columns(self) -> int:
        return self.columns

    @property
    def block_rows(self) -> int:
        return 16 * self.row_tiles

    def fits(self, k: int, columns: int) -> bool:
        """Whether the blocks divide a contraction of length `k` and `columns` columns per head."""
        return k % (64 * self.warps_k) == 0 and self.columns % (8 * self.warps_n) == 0 == columns % self.columns

    def shared_bytes(self, k: int) -> int:
        """Dynamic shared memory of a block; this kernel has static shared memory alone."""
        return 0

    def macros(self) -> dict[str, int]:
        """The macros of the source, without their common prefix."""
        return {
            "COLS": self.columns,
            "WK": self.warps_k,
            "WN": self.warps_n,
            "LOOP": int(self.row_tiles > 1),
            "PREFETCH": int(self.prefetch),
            "LOADS_FIRST": int(self.loads_first),
        }


@dataclass(frozen=True, slots=True)
class WgmmaConfig:
    """absorb_tile.cu, or absorb_tiles.cu where a block computes more than one tile.

    Rows of a tile, warpgroups of 64 columns, tiles that one block computes in turn, chunks of 64 k in flight (of the
    weights, in absorb_tiles), blocks that must fit a multiprocessor; `prefetch` as in :class:`DecodeConfig`.
    """

    rows: int
    groups: int
    row_tiles: int
    depth: int
    min_blocks: int = 1
    prefetch: bool = True

    @property
    def kernel(self) -> str:
        return "absorb_tile" if self.row_tiles == 1 else "absorb_tiles"

    @property
    def threads(self) -> int:
        return 128 * self.groups

    @property
    def block_columns(self) -> int:
        return 64 * self.groups

    @property
    def block_rows(self) -> int:
        return self.rows * self.row_tiles

    def fits(self, k: int, columns: int) -> bool:
        """Whether the blocks divide the shape and fit shared memory."""
        divides = k % 64 == 0 and k <= 512 and columns % self.block_columns == 0 and self.depth <= k // 64
        return divides and self.shared_bytes(k) <= _SHARED_BYTES

    def shared_bytes(self, k: int) -> int:
        """Dynamic shared memory of a block.

        One tile of activations, and later the result in its place; or two tiles, the result, 1 KiB for each warp and 16
        barriers of 8 bytes.
        """
        activations, result = 2 * k * self.rows, self.rows * (2 * self.block_columns + 16)
        if self.row_tiles == 1:
            return max(activations, result)
        return 2 * activations + result + 32 * self.threads + 128

    def macros(self) -> dict[str, int]:
        """The macros of the source, without their common prefix."""
        return {
            "ROWS": self.rows,
            "GROUPS": self.groups,
            "DEPTH": self.depth,
            "MIN_BLOCKS": self.min_blocks,
            "PREFETCH": int(self.prefetch),
        }


CudaConfig = DecodeConfig | WgmmaConfig


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

    otherwise: CudaConfig | TritonConfig


@dataclass(frozen=True, slots=True)
class Cell:
    """The best configuration measured for up to `rows` rows at `heads` heads."""

    heads: int
    rows: int
    config: CudaConfig | TritonConfig | BmmConfig


# K, N, output quantization, MXFP4 weights
CellKey = tuple[int, int, OutQuant, bool]


@functools.cache
def tables() -> dict[str, dict[CellKey, tuple[Cell, ...]]]:
    """The measured cells of each arch, by the name that :func:`weightprep.runtime.arch.arch_of` gives it."""
    from weightprep.runtime import tuning_h200

    return {"sm90": tuning_h200.MEASURED}


def choose(
    heads: int, rows: int, k: int, columns: int, *, form: OutQuant, mxfp4: bool, arch: str
) -> CudaConfig | TritonConfig | BmmConfig:
    """Configuration for x (rows, heads, k) times (heads, k, columns) on a GPU of `arch`.

    Cells of the nearest measured number of heads are used for others too; more rows than measured take the rule.
    """
    table = tables().get(arch)
    if table is None:
        return portable(rows, k, form=form)
    cells = table.get((k, columns, form, mxfp4), ())
    fitting = [cell for cell in cells if rows <= cell.rows]
    if fitting:
        nearest = min(fitting, key=lambda c: (abs(math.log2(c.heads / heads)), c.rows))
        return nearest.config
    if rows <= 64 and k % 64 == 0 and columns % 128 == 0:
        return DecodeConfig(columns=32, warps_k=2 if k % 128 == 0 else 1, warps_n=4)
    many = WgmmaConfig(rows=64, groups=2, row_tiles=4, depth=min(k // 64, 8))
    return many if many.fits(k, columns) else portable(rows, k, form=form)


def portable(rows: int, k: int, *, form: OutQuant) -> TritonConfig:
    """Triton configuration for any GPU and shape: enough columns for a quantization group, few rows for few tokens."""
    block_m = 16 if rows <= 16 else 32 if rows <= 128 else 128
    return TritonConfig(
        block_m=block_m,
        block_n=64 if form is OutQuant.NONE else 128,
        block_k=64 if k % 128 else 128,
        num_warps=8 if block_m == 128 else 4,
        num_stages=3,
    )
