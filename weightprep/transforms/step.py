"""What a step is: one pure function over bundles, with its parameters and with what it requires and ensures declared as
data.

A step is written as a function `(bundle, context, *, parameters) -> Bundle` under the `transform` decorator. Its
keyword-only parameters become a strict pydantic model, so a recipe with an unknown or ill-typed parameter is refused
before a weight is read.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, get_type_hints

from pydantic import BaseModel, ConfigDict, create_model

from weightprep.deferred import torch
from weightprep.transforms.bundle import Bundle, Form, StepContext

__all__ = ["Step", "Transform", "transform"]

Apply = Callable[..., Bundle]


@dataclass(frozen=True, slots=True)
class Transform:
    """A kind of step.

    :param requires: the form that a bundle must have
    :param ensures: the form of the result: a Form, or a function of the given form and the parameters
    :param already: returns the finished bundle if the given one already is what this step would make, possibly after a
        rewriting that changes no number; else None. Gets (bundle, context, **parameters).
    :param dims: the names of `StepContext.dims` that it reads; a recipe with this step must define them
    :param measure: what ranks must agree on before `apply`, as a float32 tensor to be reduced by elementwise MAX, or
        None where they need not; gets what `apply` gets
    """

    name: str
    doc: str
    requires: Form
    ensures: Form | Callable[..., Form]
    apply: Apply
    params: type[BaseModel]
    dims: frozenset[str]
    already: Callable[..., Bundle | None] | None = None
    measure: Callable[..., torch.Tensor | None] | None = None

    def __call__(self, bundle: Bundle, context: StepContext, **params: Any) -> Bundle:
        """Apply with the parameters given, unchecked."""
        return self.apply(bundle, context, **params)


@dataclass(frozen=True, slots=True)
class Step:
    """A transform with its parameters."""

    transform: Transform
    params: Mapping[str, Any]

    @property
    def name(self) -> str:
        return self.transform.name

    def result_form(self, given: Form) -> Form:
        """The form that this step makes of a bundle of form `given`."""
        ensures = self.transform.ensures
        return ensures if isinstance(ensures, Form) else ensures(given, **self.params)

    def already(self, bundle: Bundle, context: StepContext) -> Bundle | None:
        """The finished bundle if `bundle` needs nothing of this step, else None."""
        known = self.transform.already
        return known(bundle, context, **self.params) if known is not None else None

    def __call__(self, bundle: Bundle, context: StepContext) -> Bundle:
        return self.transform(bundle, context, **self.params)


def transform(
    *,
    requires: Form,
    ensures: Form | Callable[..., Form],
    dims: Iterable[str] = (),
    already: Callable[..., Bundle | None] | None = None,
    measure: Callable[..., torch.Tensor | None] | None = None,
) -> Callable[[Apply], Transform]:
    """Declare a function as a step; its name is the name in recipes, the first line of its docstring the
    description.
    """

    def declare(function: Apply) -> Transform:
        hints = get_type_hints(function)
        fields: dict[str, Any] = {}
        for parameter in inspect.signature(function).parameters.values():
            if parameter.kind is inspect.Parameter.KEYWORD_ONLY:
                default = ... if parameter.default is inspect.Parameter.empty else parameter.default
                fields[parameter.name] = (hints[parameter.name], default)
        params = create_model(
            function.__name__, __config__=ConfigDict(extra="forbid", frozen=True, strict=True), **fields
        )
        doc = (function.__doc__ or "").strip().splitlines()[0] if function.__doc__ else ""
        return Transform(function.__name__, doc, requires, ensures, function, params, frozenset(dims), already, measure)

    return declare
