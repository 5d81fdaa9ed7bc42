"""A recipe's choice of scale rule and ties reaches the numbers: groups on which the rules differ, written out."""

from __future__ import annotations

import pytest
import torch

from weightprep.formats import EncodedShape, Encoding
from weightprep.transforms import Bundle, StepContext, make_step, run_steps

# Largest magnitudes of a group. log2 of the scale is floor(log2 amax) - 2 with "floor", and one more with "ceil" where
# amax is no power of two, with "rceil" where it is above 6 of the smaller scale, with "even" from 7/4 of one.
AMAX = (2.5, 3.25, 3.5)
SCALES = {
    "even": [126, 126, 127],
    "floor": [126, 126, 126],
    "ceil": [127, 127, 127],
    "rceil": [126, 127, 127],
}
# 2.5 is halfway between 2 (code 4) and 3 (code 5)
TIE = {"even": 4, "away": 5}


def rows() -> torch.Tensor:
    """[64, 96]: a group for each of AMAX along either axis, in the first 32 rows along the other one."""
    weight = torch.zeros(64, 96)
    for group, amax in enumerate(AMAX):
        weight[:, 32 * group] = amax
        weight[:, 32 * group + 1] = 2.5
    return weight


@pytest.mark.parametrize("rule", SCALES)
def test_a_whole_weight(rule: str) -> None:
    bundle = Bundle.source(rows(), None, EncodedShape(Encoding.FP32, 64, 96))
    made = run_steps([make_step("quantize_mxfp4", {"scale_rule": rule}, "test")], bundle, StepContext())
    assert made["scale"].tolist() == [SCALES[rule]] * 64


@pytest.mark.parametrize("rule", SCALES)
def test_absorbed_weights(rule: str) -> None:
    # one head: 96 rows of k contracted over nope, 64 rows of v over rank
    weight = torch.cat([rows().T, rows()[:, :64]], dim=0)
    bundle = Bundle.source(weight, None, EncodedShape(Encoding.FP32, 160, 64))
    dims = {"heads": 1, "nope": 96, "v": 64, "rank": 64}
    steps = [make_step("split_kv_b", {}, "test"), make_step("absorb_mxfp4", {"scale_rule": rule}, "test")]
    made = run_steps(steps, bundle, StepContext(dims=dims))
    assert made["w_scale_k"][0].T.tolist() == [SCALES[rule]] * 64
    assert made["w_scale_v"][0].T.tolist() == [SCALES[rule][:2]] * 64


@pytest.mark.parametrize("ties", TIE)
def test_ties(ties: str) -> None:
    bundle = Bundle.source(rows(), None, EncodedShape(Encoding.FP32, 64, 96))
    made = run_steps([make_step("quantize_mxfp4", {"ties": ties}, "test")], bundle, StepContext())
    # the second number of the third group, whose scale is 1: the high half of its first byte
    assert set((made["weight"][:, 32] >> 4).tolist()) == {TIE[ties]}
