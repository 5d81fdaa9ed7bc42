"""The AROUND hook on post_load_weights, through which every route that loads weights passes.

The first load of a model is checked as a whole by its loader, with the table. Every later one is an update, of which
nothing but this hook knows on most routes: the layers that it touched are checked here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from weightprep.engines.sglang.agreement import is_so_on_any_rank
from weightprep.engines.sglang.contract_check import check_layers, judge
from weightprep.engines.sglang.modules import live_modules
from weightprep.engines.sglang.prepare import Preparation
from weightprep.errors import EngineError

__all__ = ["around_post_load_weights", "preparation_of", "preparing"]

_STATE = "_weightprep_preparation"

_first_load: ContextVar[Preparation | None] = ContextVar("weightprep_preparation", default=None)


@contextmanager
def preparing(preparation: Preparation) -> Iterator[None]:
    """Models whose post_load_weights runs inside are prepared by `preparation`, now and at every later load."""
    token = _first_load.set(preparation)
    try:
        yield
    finally:
        _first_load.reset(token)


def preparation_of(model: Any) -> list[tuple[Any, Preparation]]:
    """The prepared models inside `model` (itself, or the language model of a wrapper), with what prepares them."""
    return [(module, vars(module)[_STATE]) for module in model.modules() if _STATE in vars(module)]


def around_post_load_weights(original: Callable[..., None], model: Any, *args: Any, **kwargs: Any) -> None:
    """AROUND hook on DeepseekV2WeightLoaderMixin.post_load_weights.

    :raises WeightprepError: weights that cannot be converted; of an update also a broken contract
    """

    def load() -> None:
        original(model, *args, **kwargs)

    if (first := _first_load.get()) is not None:
        vars(model).setdefault(_STATE, first).run(model, load)
    elif (known := vars(model).get(_STATE)) is not None:
        _update(known, model, load)
    else:
        load()


def _update(preparation: Preparation, model: Any, load: Callable[[], None]) -> None:
    is_spread = any(module.shards > 1 for module in live_modules(model, preparation.plan))
    try:
        touched = preparation.run(model, load)
    except Exception:
        if is_spread:
            is_so_on_any_rank(True)
        raise
    if is_spread and is_so_on_any_rank(False):
        raise EngineError(
            "weight update",
            found="weights that another tensor parallel rank could not prepare",
            wanted="the same update on every rank",
            remedy="the log of that rank says why",
        )
    judge(check_layers(touched, preparation), is_lenient=preparation.options.on_violation == "warn")
