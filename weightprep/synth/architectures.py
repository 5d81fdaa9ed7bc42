"""The model families that `synth` can write, by name.

Sizes come in two sets. The small ones keep what kernels and splits depend on (nope, rope, v and rank as published, so
that scale blocks straddle heads where the real ones do) and shrink everything else; the full ones put the attention's
published sizes back.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from weightprep.synth.deepseek import DEEPSEEK_V2, DEEPSEEK_V2_LITE, DEEPSEEK_V3, DEEPSEEK_V32
from weightprep.synth.deepseek_v4 import DEEPSEEK_V4
from weightprep.synth.glm import GLM4_MOE_LITE, GLM_MOE_DSA
from weightprep.synth.kimi import KIMI_K2, KIMI_K25
from weightprep.synth.layout import Architecture

__all__ = ["ARCHITECTURES"]

_ALL = (
    GLM_MOE_DSA,
    DEEPSEEK_V2,
    DEEPSEEK_V2_LITE,
    DEEPSEEK_V3,
    DEEPSEEK_V32,
    KIMI_K2,
    KIMI_K25,
    GLM4_MOE_LITE,
    DEEPSEEK_V4,
)

ARCHITECTURES: Mapping[str, Architecture] = MappingProxyType({architecture.name: architecture for architecture in _ALL})
