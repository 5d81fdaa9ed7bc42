"""Small checkpoints with published names, dtypes and sizes, to try and test everything on."""

from weightprep.synth.architectures import ARCHITECTURES
from weightprep.synth.schemes import ENCODINGS
from weightprep.synth.synthesize import synthesize

__all__ = ["ARCHITECTURES", "ENCODINGS", "synthesize"]
