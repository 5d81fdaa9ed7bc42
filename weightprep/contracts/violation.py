"""What a broken contract says, and how all of a model's violations are raised at once.

A gate that misses raises nothing at run time, so its report has to carry everything that a reader needs: which tensor
of which layer, what it is, what the kernel path compares with, what runs instead, why, and what to do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from weightprep.errors import ContractError

__all__ = ["ModelContractError", "Violation", "raise_violations"]


@dataclass(frozen=True, slots=True)
class Violation:
    """One tensor that does not have the form which a kernel path needs.

    :param layer: "layer 78 (nextn)"
    :param tensor: "self_attn.w_kc"
    :param found: "dtype is bfloat16"
    :param wanted: "float8_e4m3fn"
    :param path: "'fp8_absorbed' on gfx950"
    :param consequence: what happens instead: "runs torch.bmm (slow path)"
    :param figure: what `found` measured, of which less is worse; None where it measured nothing
    """

    layer: str
    tensor: str
    found: str
    wanted: str
    path: str
    consequence: str
    cause: str
    remedy: str
    figure: float | None = None

    @property
    def kind(self) -> tuple[str, str, str]:
        """Equal for violations that differ in their layer and their figure alone."""
        return self.tensor, self.wanted, self.found if self.figure is None else ""

    def __str__(self) -> str:
        return (
            f"{self.layer} {self.tensor}: {self.found}, path {self.path} needs {self.wanted}\n"
            f"  -> {self.consequence}. Cause: {self.cause}.\n"
            f"  -> {self.remedy}"
        )


class ModelContractError(ContractError):
    """All violations of a model, in the order in which they were found; `violations` holds them."""

    def __init__(self, violations: Sequence[Violation]) -> None:
        self.violations = tuple(violations)
        first = self.violations[0]
        super().__init__(
            f"{first.layer} {first.tensor}",
            found=f"{len(self.violations)} contract violation(s), first: {first.found}",
            wanted=first.wanted,
            remedy=first.remedy,
        )

    def __reduce__(self) -> tuple[type[ModelContractError], tuple[tuple[Violation, ...]]]:
        """Exceptions that cross processes are made again from these arguments; the base class's are others."""
        return type(self), (self.violations,)

    def __str__(self) -> str:
        count = len(self.violations)
        head = f"{count} contract violation{'s' if count > 1 else ''}"
        return "\n".join([head, *(str(violation) for violation in self.violations)])


def raise_violations(violations: Sequence[Violation]) -> None:
    """Raise one ModelContractError that carries all of `violations`; do nothing if there are none."""
    if violations:
        raise ModelContractError(violations)
