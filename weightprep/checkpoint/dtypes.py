"""One table of the safetensors element types: every reader of a header must agree on how many bytes it means.

Sub-byte types (F4, F6) have a logical shape in the header: a row of 64 F4 values is [.., 64] there and 32 bytes in
the file. Torch sees F4 as the packed bytes (uint8, last axis halved): torch before 2.8 has no fp4 type, and the
packed bytes are what the number formats of this package take.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from weightprep.deferred import torch

__all__ = ["DTYPES", "ElementType", "name_of"]


@dataclass(frozen=True, slots=True)
class ElementType:
    """One safetensors dtype.

    :param name: the string in the header
    :param bits: bits of one element as the header counts elements
    :param torch_name: the torch dtype that holds it, None where torch has no such type (the bytes can still be copied)
    """

    name: str
    bits: int
    torch_name: str | None

    @property
    def torch(self) -> torch.dtype | None:
        """How torch holds it; e8m0 as its bytes where this torch does not know it."""
        # Torch before 2.7.
        instead = torch.uint8 if self.name == "F8_E8M0" else None
        return None if self.torch_name is None else getattr(torch, self.torch_name, instead)

    @property
    def alignment(self) -> int:
        """Bytes on a multiple of which a tensor must start so that loaders can view it in place."""
        return max(1, self.bits // 8)


# Source: the Dtype enumeration of safetensors 0.8.
DTYPES: Mapping[str, ElementType] = MappingProxyType(
    {
        element.name: element
        for element in (
            ElementType("BOOL", 8, "bool"),
            ElementType("F4", 4, "uint8"),
            ElementType("F6_E2M3", 6, None),
            ElementType("F6_E3M2", 6, None),
            ElementType("U8", 8, "uint8"),
            ElementType("I8", 8, "int8"),
            ElementType("F8_E5M2", 8, "float8_e5m2"),
            ElementType("F8_E4M3", 8, "float8_e4m3fn"),
            ElementType("F8_E5M2FNUZ", 8, "float8_e5m2fnuz"),
            ElementType("F8_E4M3FNUZ", 8, "float8_e4m3fnuz"),
            ElementType("F8_E8M0", 8, "float8_e8m0fnu"),
            ElementType("I16", 16, "int16"),
            ElementType("U16", 16, "uint16"),
            ElementType("F16", 16, "float16"),
            ElementType("BF16", 16, "bfloat16"),
            ElementType("I32", 32, "int32"),
            ElementType("U32", 32, "uint32"),
            ElementType("F32", 32, "float32"),
            ElementType("I64", 64, "int64"),
            ElementType("U64", 64, "uint64"),
            ElementType("F64", 64, "float64"),
            ElementType("C64", 64, "complex64"),
        )
    }
)

# U8 last, so that plain bytes are U8 and never F4.
_NAMES: Mapping[str, str] = MappingProxyType(
    {element.torch_name: element.name for element in (*DTYPES.values(), DTYPES["U8"]) if element.torch_name is not None}
)


def name_of(dtype: torch.dtype | str) -> str:
    """The safetensors name under which a tensor of `dtype` is written.

    :param dtype: a torch dtype, or its name without "torch."
    :raises KeyError: `dtype` has no safetensors form (a programming error: no such tensor is ever made here)
    """
    return _NAMES[str(dtype).removeprefix("torch.")]
