"""Number formats and storage encodings: the bottom of the package, on torch and NumPy alone."""

from weightprep.formats.encoding import (
    FOREIGN_SUFFIXES,
    SCALE_SUFFIXES,
    WEIGHT_SUFFIXES,
    EncodedShape,
    Encoding,
    RowSlice,
    classify,
)

__all__ = [
    "FOREIGN_SUFFIXES",
    "SCALE_SUFFIXES",
    "WEIGHT_SUFFIXES",
    "EncodedShape",
    "Encoding",
    "RowSlice",
    "classify",
]
