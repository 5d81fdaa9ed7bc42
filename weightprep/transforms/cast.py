"""Step `cast`: numbers to the dtype that an unquantized matmul takes."""

from __future__ import annotations

from typing import Literal

from weightprep.deferred import torch
from weightprep.errors import CheckpointError
from weightprep.formats import EncodedShape, Encoding
from weightprep.transforms.bundle import FLOATS, Bundle, Form, StepContext
from weightprep.transforms.step import transform

__all__ = ["cast"]

Dtype = Literal["bf16"]


def _already(bundle: Bundle, context: StepContext, *, dtype: Dtype) -> Bundle | None:
    return bundle if bundle.encoded.encoding is Encoding(dtype) else None


@transform(
    requires=Form(False, FLOATS),
    ensures=lambda given, *, dtype: Form(False, frozenset({Encoding(dtype)})),
    already=_already,
)
def cast(bundle: Bundle, context: StepContext, *, dtype: Dtype) -> Bundle:
    """Round a weight [N, K] to bfloat16.

    :raises CheckpointError: a value that is not finite after rounding
    """
    weight = bundle["weight"].to(torch.bfloat16)
    if not bool(torch.isfinite(weight).all()):
        raise CheckpointError(
            context.name,
            found="a value that is NaN or infinite in bfloat16",
            wanted="finite weights",
            remedy="the checkpoint is damaged: download this shard again",
        )
    return Bundle({"weight": weight}, EncodedShape(Encoding(dtype), bundle.encoded.rows, bundle.encoded.cols))
