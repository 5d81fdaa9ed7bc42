"""The form that a kernel path needs a tensor to have, as data that can be checked against a real tensor.

Strides are part of it: the batched fp8 kernels read B with the contraction axis contiguous, and a tensor of the right
shape and dtype in the other order is slower or wrong without an error.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from weightprep.contracts.violation import Violation
from weightprep.deferred import torch
from weightprep.formats.e4m3 import e4m3_dtype, has_nan

__all__ = ["Place", "TensorSpec"]


@dataclass(frozen=True, slots=True)
class Place:
    """Where a tensor stands and what depends on it: the parts of a Violation that the tensor itself cannot tell.

    :param consequence: what happens with a tensor of another form
    """

    layer: int
    group: str
    tensor: str
    path: str
    target: str
    consequence: str
    cause: str
    remedy: str

    def violation(self, found: str, wanted: str, figure: float | None = None) -> Violation:
        """That of the tensor here which is `found` where its path needs `wanted`."""
        return Violation(
            layer=f"layer {self.layer} ({self.group})",
            tensor=self.tensor,
            found=found,
            wanted=wanted,
            path=f"'{self.path}' on {self.target}",
            consequence=self.consequence,
            cause=self.cause,
            remedy=self.remedy,
            figure=figure,
        )


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Concrete form of one tensor.

    :param shape: exact shape
    :param strides: exact strides in elements, None where any will do
    :param finite: no NaN and no infinity; of uint8, which is read as e8m0, no byte 255. Packed e2m1 has no NaN.
    :param positive: every element > 0
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...] | None = None
    finite: bool = False
    positive: bool = False

    def on(self, target: str) -> TensorSpec:
        """The same spec as `target` needs it: e4m3fn is e4m3fnuz on gfx942."""
        return replace(self, dtype=e4m3_dtype(target)) if self.dtype is torch.float8_e4m3fn else self

    def check(self, tensor: torch.Tensor, where: Place) -> list[Violation]:
        """Every way in which `tensor` differs from this spec; values are looked at only if dtype and shape are
        right.
        """
        faults: list[tuple[str, str]] = []
        if tensor.dtype is not self.dtype:
            faults.append((f"dtype is {_dtype(tensor.dtype)}", _dtype(self.dtype)))
        if tuple(tensor.shape) != self.shape:
            faults.append((f"shape is {tuple(tensor.shape)}", f"shape {self.shape}"))
        elif not self._has_strides(tensor):
            faults.append((f"strides are {tuple(tensor.stride())}", f"strides {self.strides}"))
        if not faults and (self.finite or self.positive):
            faults.extend(self._value_faults(tensor))
        return [where.violation(found, wanted) for found, wanted in faults]

    def _has_strides(self, tensor: torch.Tensor) -> bool:
        if self.strides is None:
            return True
        # the stride of a dimension of size 1 addresses nothing
        return all(
            size == 1 or stride == wanted
            for size, stride, wanted in zip(self.shape, tensor.stride(), self.strides, strict=True)
        )

    def _value_faults(self, tensor: torch.Tensor) -> list[tuple[str, str]]:
        if tensor.dtype in (torch.float8_e4m3fn, torch.float8_e4m3fnuz):
            is_finite = not has_nan(tensor)
        elif tensor.dtype is torch.uint8:
            # the only value that an e8m0 code can have besides powers of two
            is_finite = not bool((tensor == 255).any())
        else:
            is_finite = bool(torch.isfinite(tensor).all())
        if self.finite and not is_finite:
            return [("a value is NaN or infinite", "finite values")]
        if self.positive and not bool((tensor > 0).all()):
            return [("a value is not positive", "values > 0")]
        return []


def _dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
