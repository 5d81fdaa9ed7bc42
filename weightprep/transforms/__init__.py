"""The steps of recipes: pure functions over bundles of tensors, run by `run_steps`."""

from weightprep.transforms.bundle import Bundle, Form, StepContext
from weightprep.transforms.registry import make_step, transforms
from weightprep.transforms.run import check_composition, measure_amax, run_steps
from weightprep.transforms.step import Step, Transform, transform

__all__ = [
    "Bundle",
    "Form",
    "Step",
    "StepContext",
    "Transform",
    "check_composition",
    "make_step",
    "measure_amax",
    "run_steps",
    "transform",
    "transforms",
]
