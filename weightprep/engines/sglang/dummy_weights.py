"""What made-up weights hold that cannot be converted: NaN where memory was left as it was, scales below zero.

Nobody serves such weights, so none of it is worth a server that does not start. The zeros and ones in its place are
seen by the conversion alone; the model's own parameters stay as they are.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

import torch

from weightprep.transforms import Bundle

__all__ = ["MadeUpWeights"]

logger = logging.getLogger(__name__)

# one, in e8m0
_ONE = 127
# Times the largest number of any format this is still finite in float32.
_LARGEST_POWER = 110


@dataclass(frozen=True, slots=True)
class MadeUpWeights:
    """The weights of one load that were made up.

    :param changed: modules that were not usable as they were
    """

    changed: set[str] = field(default_factory=set)

    def usable(self, bundle: Bundle, name: str) -> Bundle:
        """`bundle` with 0 for weights and 1 for scales that are no numbers, or not those of a scale."""
        usable = Bundle(
            {role: (_scale if role == "scale" else _weight)(tensor) for role, tensor in bundle.items()}, bundle.encoded
        )
        if any(usable[role] is not bundle[role] for role in bundle):
            self.changed.add(name)
        return usable

    def warn(self) -> None:
        """Say once what was changed, if anything."""
        if self.changed:
            first = min(self.changed)
            more = f" and {len(self.changed) - 1} more" if len(self.changed) > 1 else ""
            logger.warning(
                "weightprep: %s%s: made-up weights that are no numbers, converted as 0 and their scales as 1",
                first,
                more,
            )


def _weight(weight: torch.Tensor) -> torch.Tensor:
    if not weight.is_floating_point():
        return weight
    faulty = ~torch.isfinite(weight.to(torch.float32))
    if not bool(faulty.any()):
        return weight
    if weight.element_size() > 1:
        return weight.masked_fill(faulty, 0)
    # fp8 knows few operations; zero is the byte 0 in all its forms
    return weight.view(torch.uint8).masked_fill(faulty, 0).view(weight.dtype)


def _scale(scale: torch.Tensor) -> torch.Tensor:
    if scale.element_size() == 1:
        codes = scale.view(torch.uint8)
        faulty = codes > _ONE + _LARGEST_POWER
        return codes.masked_fill(faulty, _ONE).view(scale.dtype) if bool(faulty.any()) else scale
    faulty = ~((scale <= 2.0**_LARGEST_POWER) & (scale >= 0))
    return scale.masked_fill(faulty, 1) if bool(faulty.any()) else scale
