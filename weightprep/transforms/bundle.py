"""The tensors of one module on their way from a checkpoint to a kernel, and the form that they have at a point of that
way.

Steps exchange bundles, and a recipe is checked by exchanging forms: a form says what a step may be given and what it
leaves behind, without any tensor.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from weightprep.deferred import torch
from weightprep.errors import CheckpointError
from weightprep.formats import EncodedShape, Encoding

__all__ = ["ANY_ENCODING", "FLOATS", "FP8", "ROLES", "Bundle", "Form", "StepContext"]

FLOATS = frozenset({Encoding.BF16, Encoding.FP16, Encoding.FP32})
FP8 = frozenset({Encoding.FP8_BLOCK, Encoding.FP8_CHANNEL, Encoding.FP8_TENSOR})
ANY_ENCODING = frozenset(Encoding)

# The names that tensors have inside a bundle: as a checkpoint stores them, and as MLA's absorbed matmuls take them.
STORED_ROLES = ("weight", "scale")
ABSORBED_ROLES = ("w_kc", "w_vc", "w_scale", "w_scale_k", "w_scale_v")
ROLES = (*STORED_ROLES, *ABSORBED_ROLES)


@dataclass(frozen=True, slots=True)
class Form:
    """What can be known about a bundle from names and dtypes: absorbed or not, and the encodings that it may have."""

    absorbed: bool
    encodings: frozenset[Encoding]

    def __str__(self) -> str:
        names = ", ".join(sorted(encoding.value for encoding in self.encodings))
        return f"{'w_kc and w_vc' if self.absorbed else 'a whole weight'} in {names}"


@dataclass(frozen=True, slots=True)
class Bundle(Mapping[str, "torch.Tensor"]):
    """A frozen mapping from role to tensor, with the encoding of the weight.

    Roles on the checkpoint's side: "weight" [N, K] (fp4 packed [N, K/2]) and "scale"; `encoded` says how to read them.
    Roles on the kernel's side: "w_kc" (heads, nope, rank), "w_vc" (heads, rank, v) and "w_scale" (0-dim float32), or
    "w_scale_k" and "w_scale_v" (uint8 e8m0). `encoded` then still has the shape of the whole weight.
    """

    tensors: Mapping[str, torch.Tensor]
    encoded: EncodedShape

    def __post_init__(self) -> None:
        unknown = sorted(set(self.tensors) - set(ROLES))
        if unknown:
            raise CheckpointError(
                f"bundle role {unknown[0]}",
                found="an unknown role",
                wanted=", ".join(ROLES),
                remedy="use one of these names",
            )
        object.__setattr__(self, "tensors", MappingProxyType(dict(self.tensors)))

    @classmethod
    def source(cls, weight: torch.Tensor, scale: torch.Tensor | None, encoded: EncodedShape) -> Bundle:
        """The bundle of a checkpoint's weight and, unless it is unquantized, its scale."""
        return cls({"weight": weight} if scale is None else {"weight": weight, "scale": scale}, encoded)

    def __getitem__(self, role: str) -> torch.Tensor:
        return self.tensors[role]

    def __iter__(self) -> Iterator[str]:
        return iter(self.tensors)

    def __len__(self) -> int:
        return len(self.tensors)

    @property
    def absorbed(self) -> bool:
        """Whether the weight has been split into w_kc and w_vc."""
        return "w_kc" in self.tensors

    @property
    def form(self) -> Form:
        return Form(self.absorbed, frozenset({self.encoded.encoding}))


@dataclass(frozen=True, slots=True)
class StepContext:
    """What a step must know besides the bundle.

    :param dims: "heads" (heads present in the tensor), "nope", "v", "rank"
    :param target: gfx950, gfx942, sm90, sm100 or cpu
    :param amax: what `measure_amax` returned, reduced over the ranks that hold the other rows of the same weight by an
        elementwise MAX; None where this bundle holds the whole weight
    :param name: the tensor's name in the checkpoint, for error messages
    """

    dims: Mapping[str, int] = field(default_factory=dict)
    target: str = "cpu"
    amax: torch.Tensor | None = None
    name: str = "weight"
