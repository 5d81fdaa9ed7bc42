"""What of a prepared layer is not as its contract says, with the likely cause and the step that finds or mends it.

Which step that is depends on where the weights came from: a sidecar and an inline conversion can be compared with
their source, other checkpoints only be fetched again.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from weightprep.checkpoint.manifest import MANIFEST_NAME
from weightprep.contracts import Place, Prediction, Violation
from weightprep.engines.sglang.modules import LiveModule
from weightprep.engines.sglang.prepare import Preparation
from weightprep.engines.sglang.sidecar import find_manifest

__all__ = ["find_violations", "violation_on_rank"]

_ANYWAY = 'serve as it is with {"on_violation": "warn"}'


def find_violations(module: LiveModule, prediction: Prediction, preparation: Preparation) -> list[Violation]:
    """What breaks the contract of `module`: form, place and values of its tensors, and how near they are to their
    source.
    """
    plan = preparation.plan
    heads = module.local_heads(plan.dims["nope"] + plan.dims["v"])
    found: list[Violation] = []
    for role, spec in plan.contract(module.plan.contract, heads, preparation.target).items():
        form = _place(role, module, prediction, preparation, _remedy_of_form(module, preparation))
        tensor = getattr(module.owner, role)
        if not isinstance(tensor, torch.Tensor):
            found.append(form.violation(f"is {tensor!r}", f"a {str(spec.dtype).removeprefix('torch.')} tensor"))
            continue
        if faults := replace(spec, finite=False, positive=False).check(tensor, form):
            found.extend(faults)
        elif faults := spec.check(tensor, form):
            # which files there are to compare with is looked up for a wrong value alone
            remedy = _remedy_of_values(module, preparation)
            found.extend(replace(fault, remedy=remedy) for fault in faults)
        found.extend(_elsewhere(tensor, module, form))
    floor, sqnr = module.plan.min_sqnr_db, preparation.sqnr_db(module.plan.source)
    if floor is not None and sqnr < floor:
        remedy = _remedy_of_values(module, preparation)
        place = _place("w_kc and w_vc", module, prediction, preparation, remedy)
        found.append(place.violation(f"SQNR is {sqnr:.1f} dB against kv_b_proj", f"at least {floor:g} dB", sqnr))
    return found


def violation_on_rank(rank: int, module: LiveModule, prediction: Prediction, preparation: Preparation) -> Violation:
    """What a rank with sound rows says of a layer whose other rows break the contract."""
    remedy = f"the log of tensor parallel rank {rank} says what was found there, and what to do"
    place = _place("w_kc and w_vc", module, prediction, preparation, remedy)
    return place.violation(
        f"broken on tensor parallel rank {rank}, sound on this one", "its contract kept on every rank"
    )


def _elsewhere(tensor: torch.Tensor, module: LiveModule, place: Place) -> list[Violation]:
    wanted = module.linear.weight.device
    return [] if tensor.device == wanted else [place.violation(f"is on {tensor.device}", str(wanted))]


def _place(role: str, module: LiveModule, prediction: Prediction, preparation: Preparation, remedy: str) -> Place:
    return Place(
        layer=module.plan.layer,
        group=module.plan.group,
        tensor=f"self_attn.{role}",
        path=module.plan.contract,
        target=preparation.target,
        consequence=f"path '{prediction.path}' is taken: {prediction.reason}",
        cause=_cause(module, preparation),
        remedy=remedy,
    )


def _cause(module: LiveModule, preparation: Preparation) -> str:
    if module.plan.source not in preparation.origins:
        return "sglang's loader did not pass this layer through post_load_weights, or holds it in a form of its own"
    return f"recipe {preparation.plan.recipe.name} made this of {module.plan.source}"


def _remedy_of_form(module: LiveModule, preparation: Preparation) -> str:
    if module.plan.source not in preparation.origins:
        return f"use a sglang release that `weightprep doctor` knows, or {_ANYWAY}"
    name = preparation.plan.recipe.name
    return f'correct the load steps or the contract of recipe {name}, name another ({{"recipe": ...}}), or {_ANYWAY}'


def _remedy_of_values(module: LiveModule, preparation: Preparation) -> str:
    origin, folder = preparation.origins.get(module.plan.source), preparation.folder
    if origin is None:
        return _remedy_of_form(module, preparation)
    if origin.route == "sidecar" and folder is not None:
        made = find_manifest(folder, preparation.options.sidecar).parent.parent
        return (
            f"`weightprep verify {folder} {made}` says whether the sidecar is that of these weights; make it again "
            f'with `weightprep convert --layout sidecar`, leave it out with {{"sidecar": "off"}}, or {_ANYWAY}'
        )
    if folder is not None and (folder / MANIFEST_NAME).is_file():
        return (
            f"`weightprep verify SOURCE {folder}`, with the checkpoint that it was converted from, says what differs; "
            f"copy or convert it again, or {_ANYWAY}"
        )
    return (
        "the checkpoint's own weights are damaged, or do not fit this precision: download them again, choose another "
        f'{{"precision": ...}}, or {_ANYWAY}'
    )
