"""Running a list of steps on one bundle.

Two rules live here so that no step has to know them. A pipeline starts behind the latest step whose result the bundle
already is, so running it on its own output changes nothing, bit for bit. And what a step declares is asserted around
its call.
"""

from __future__ import annotations

from collections.abc import Sequence

from weightprep.deferred import torch
from weightprep.errors import RecipeError
from weightprep.transforms.bundle import Bundle, Form, StepContext
from weightprep.transforms.step import Step

__all__ = ["check_composition", "measure_amax", "run_steps"]


def run_steps(steps: Sequence[Step], bundle: Bundle, context: StepContext) -> Bundle:
    """Apply `steps` in order; the input is never changed.

    :raises RecipeError: if a step is given, or makes, another form than it declares
    :raises CheckpointError: if the values cannot be converted (NaN, infinity, NaN scale)
    """
    start, bundle = _skip_done(steps, bundle, context)
    for step in steps[start:]:
        expected = _require(step, bundle.form, context.name)
        bundle = step(bundle, context)
        if bundle.absorbed != expected.absorbed or not bundle.form.encodings <= expected.encodings:
            raise RecipeError(
                f"{context.name}: step {step.name}",
                found=str(bundle.form),
                wanted=str(expected),
                remedy="the step does not do what it declares: correct its code or its `ensures`",
            )
    return bundle


def measure_amax(steps: Sequence[Step], bundle: Bundle, context: StepContext) -> torch.Tensor | None:
    """What ranks that hold different rows of one weight must agree on before `run_steps`, or None if nothing.

    :return: float32, what the measuring step declares (for `quantize_fp8` largest magnitude of the weight, largest
        scale, and minus the smallest scale), to be reduced by elementwise MAX and handed to run_steps as
        `context.amax`. A bundle with a NaN reports infinity, so that every rank sees the fault after the reduction and
        none is left waiting. Whether it is None depends on names and dtypes alone, so ranks agree on that without
        talking.
    """
    for position, step in enumerate(steps):
        if step.transform.measure is None:
            continue
        check_composition(steps[:position], bundle.form, context.name)
        return step.transform.measure(bundle, context, **step.params)
    return None


def check_composition(steps: Sequence[Step], given: Form, where: str) -> Form:
    """The form that `steps` make of `given`.

    :raises RecipeError: naming the step that cannot follow the one before it
    """
    for position, step in enumerate(steps):
        given = _require(step, given, f"{where}[{position}]")
    return given


def _skip_done(steps: Sequence[Step], bundle: Bundle, context: StepContext) -> tuple[int, Bundle]:
    for position in range(len(steps) - 1, -1, -1):
        done = steps[position].already(bundle, context)
        if done is not None:
            return position + 1, done
    return 0, bundle


def _require(step: Step, given: Form, where: str) -> Form:
    requires = step.transform.requires
    if given.absorbed != requires.absorbed or not given.encodings <= requires.encodings:
        raise RecipeError(
            f"{where}: step {step.name}",
            found=str(given),
            wanted=str(requires),
            remedy="insert the step that makes this form",
        )
    return step.result_form(given)
