"""Puts absorbed weights into their kernel's form around the model's own post_load_weights.

Around, not after: upstream writes with copy_ into whatever w_kc and w_vc are bound to, so where our fp8 buffers are
bound it would cast unscaled bf16 into them without an error. The steps are: save the bindings, unbind, call upstream,
prepare, copy into the saved storage, rebind. Graphs captured earlier hold the addresses of that storage, w_scale's
included.

Every route that loads weights ends here, see post_load: the initial load, the NextN draft, dummy and sharded loads, and
updates from disk, tensors or other processes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import constants

from weightprep.checkpoint.hub_source import locate_cached
from weightprep.engines.sglang.agreement import agree_on_maxima
from weightprep.engines.sglang.dummy_weights import MadeUpWeights
from weightprep.engines.sglang.modules import LiveModule, live_modules
from weightprep.engines.sglang.options import Options
from weightprep.engines.sglang.quality_check import measure_noise, sqnr_db
from weightprep.engines.sglang.sidecar import Sidecar, open_sidecar
from weightprep.engines.sglang.stand_in import stand_ins
from weightprep.errors import EngineError
from weightprep.recipe import ModelPlan
from weightprep.transforms import Bundle, StepContext, measure_amax, run_steps

__all__ = ["Origin", "Preparation"]

# What an MLA attention of sglang has, with the values that it is built with.
_UNBOUND: Mapping[str, object] = {"w_kc": None, "w_vc": None, "w_scale": 1.0, "w_scale_k": None, "w_scale_v": None}


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a layer's prepared weights came from: "online" or "sidecar", and the encoding that they were in."""

    route: str
    encoding: str


@dataclass(slots=True)
class Preparation:
    """What one live model needs to be prepared again at every load.

    :param block: the checkpoint's weight_block_size
    :param folder: the directory of the last load's files; None where they are not here
    :param sidecar: the sidecar of the load in progress; updates from memory have none
    :param made_up: while weights are made up instead of read, what they may hold
    :param origins: checkpoint module -> where its present weights came from
    :param noise: checkpoint module -> what its present weights differ from its source by, see quality_check
    """

    plan: ModelPlan
    options: Options
    target: str
    block: tuple[int, int] | None
    folder: Path | None = None
    sidecar: Sidecar | None = None
    made_up: MadeUpWeights | None = None
    origins: dict[str, Origin] = field(default_factory=dict)
    noise: dict[str, torch.Tensor] = field(default_factory=dict)

    @contextmanager
    def reading(self, model: str, revision: str | None, cache_dir: str | None) -> Iterator[None]:
        """While the weights of `model`, a directory or a hub id, are read, its sidecar counts.

        :param revision: of the hub's repository
        :param cache_dir: sglang's --download-dir
        :raises EngineError: as `open_sidecar`, or a sidecar is named for a model that has no directory here
        """
        asked = self.options.sidecar
        # in sglang's order: --download-dir, then where HF_HOME and HF_HUB_CACHE say
        places = [place for place in (cache_dir, constants.HF_HUB_CACHE) if place]
        folder = _folder_of(model, revision, places)
        if folder is None and asked not in ("auto", "off"):
            at = f" --revision {revision}" if revision else ""
            raise EngineError(
                f'--model-loader-extra-config: {{"sidecar": {asked!r}}} for {model}',
                found=f"neither a directory of that name nor a snapshot with weights in {' or '.join(places)}",
                wanted="the model's files on this machine, which a sidecar is checked against",
                remedy=f"run `hf download {model}{at} --cache-dir {places[0]}` first, or serve a local directory",
            )
        self.folder = folder
        self.sidecar = None if folder is None else open_sidecar(folder, self.options, self.plan)
        try:
            yield
        finally:
            self.sidecar = None

    @contextmanager
    def making_up(self) -> Iterator[None]:
        """While weights are made up, as in a dummy load: no value of theirs stops the start."""
        self.made_up = MadeUpWeights()
        try:
            yield
        finally:
            self.made_up.warn()
            self.made_up = None

    def sqnr_db(self, module: str) -> float:
        """Of the present weights of checkpoint module `module`, see quality_check; infinite where none were made."""
        sums = self.noise.get(module)
        return math.inf if sums is None else sqnr_db(sums)

    def run(self, model: Any, load: Callable[[], None]) -> list[LiveModule]:
        """Call upstream's `load` (post_load_weights) and prepare the layers that it touched, which are returned."""
        modules = live_modules(model, self.plan)
        saved = [_bindings(module.owner) for module in modules]
        for module in modules:
            _bind(module.owner, _UNBOUND)
        try:
            with stand_ins(modules, _quantization(model)):
                load()
            touched = []
            for module, before in zip(modules, saved, strict=True):
                if module.owner.w_kc is None:
                    _bind(module.owner, before)
                # DeepGEMM's own block-scaled form needs nothing of us
                elif not getattr(module.owner, "use_deep_gemm_bmm", False):
                    touched.append((module, before))
            self._prepare(touched)
        except BaseException:
            for module, before in zip(modules, saved, strict=True):
                _bind(module.owner, before)
            raise
        return [module for module, _ in touched]

    @torch.no_grad()
    def _prepare(self, touched: list[tuple[LiveModule, Mapping[str, object]]]) -> None:
        modules = [module for module, _ in touched]
        self._refuse_wrong_sidecar(modules)
        rows_per_head = self.plan.dims["nope"] + self.plan.dims["v"]
        for (module, before), (prepared, origin) in zip(touched, self._made(modules), strict=True):
            name = module.plan.source
            self.noise[name] = measure_noise(self._loaded(module), prepared, rows_per_head, name)
            _bind(module.owner, _into_storage(prepared, before, module))
            self.origins[name] = origin

    @torch.no_grad()
    def stale(self, model: Any) -> list[str]:
        """Modules whose bound weights are not what their present kv_b_proj gives, as after a copy that nobody
        announced.

        Prepares every layer again and compares bits, so it takes as long as a load's preparation. All ranks must call
        it.
        """
        modules = [module for module in live_modules(model, self.plan) if module.plan.source in self.origins]
        return [
            module.plan.source
            for module, (prepared, _) in zip(modules, self._made(modules), strict=True)
            if not all(_same_bits(getattr(module.owner, role), tensor) for role, tensor in prepared.items())
        ]

    def _made(self, modules: list[LiveModule]) -> Iterator[tuple[Bundle, Origin]]:
        """What the plan makes of each module's present source."""
        contexts = [self._context(module) for module in modules]
        # what ranks agree on is a matter of all layers at once; sources that need no agreement are read one at a time
        agrees = [module.shards > 1 and self.options.scale_scope == "tensor" for module in modules]
        sources = [self._source(module) if needed else None for module, needed in zip(modules, agrees, strict=True)]
        maxima = [
            None if source is None else measure_amax(module.plan.prepare, source[0], context)
            for module, source, context in zip(modules, sources, contexts, strict=True)
        ]
        agreed = iter(agree_on_maxima([value for value in maxima if value is not None]))
        for module, source, context, measured in zip(modules, sources, contexts, maxima, strict=True):
            bundle, origin = source or self._source(module)
            amax = None if measured is None else next(agreed)
            yield run_steps(module.plan.prepare, bundle, replace(context, amax=amax)), origin

    def _context(self, module: LiveModule) -> StepContext:
        dims = self.plan.dims
        heads = module.local_heads(dims["nope"] + dims["v"])
        return StepContext({**dims, "heads": heads}, self.target, None, module.plan.source)

    def _source(self, module: LiveModule) -> tuple[Bundle, Origin]:
        if self.sidecar is not None and module.plan.source in self.sidecar:
            device = module.linear.weight.device
            bundle = self.sidecar.rows(module.plan.source, module.rank, module.shards, device)
            return bundle, Origin("sidecar", bundle.encoded.encoding.value)
        bundle = self._loaded(module)
        return bundle, Origin("online", bundle.encoded.encoding.value)

    def _loaded(self, module: LiveModule) -> Bundle:
        bundle = module.source(self.block)
        return bundle if self.made_up is None else self.made_up.usable(bundle, module.plan.source)

    def _refuse_wrong_sidecar(self, modules: list[LiveModule]) -> None:
        """Hash sources and sidecar once among the ranks that share them; all of them learn of a difference."""
        if self.sidecar is None:
            return
        shared = [module for module in modules if module.plan.source in self.sidecar]
        mine = [module.plan.source for i, module in enumerate(shared) if i % module.shards == module.rank]
        wrong = [self.sidecar.stale(mine), self.sidecar.damaged(mine)]
        flags = torch.tensor([[float(module.plan.source in names) for module in shared] for names in wrong])
        if any(module.shards > 1 for module in shared):
            flags = agree_on_maxima([flags.to(shared[0].linear.weight.device)])[0].cpu()
        stale, damaged = (
            [module.plan.source for module, flag in zip(shared, row, strict=True) if flag] for row in flags.tolist()
        )
        if stale:
            raise EngineError(
                f"sidecar of {self.sidecar.model}",
                found=f"{len(stale)} module(s) converted from other weights, first: {stale[0]}",
                wanted="a sidecar of the weights that are being served",
                remedy='run `weightprep convert --layout sidecar` again, or serve with {"sidecar": "off"}',
            )
        self.sidecar.refuse_damaged(damaged)


def _folder_of(model: str, revision: str | None, caches: list[str]) -> Path | None:
    """The directory `model`, or the first snapshot of it with weights: configs are cached before weights are."""
    if Path(model).is_dir():
        return Path(model)
    folders = (locate_cached(model, revision, cache) for cache in caches)
    return next((folder for folder in folders if folder is not None and any(folder.glob("*.safetensors"))), None)


def _quantization(model: Any) -> str | None:
    config = getattr(model, "quant_config", None)
    return str(config.get_name()) if config is not None else None


def _same_bits(left: object, right: torch.Tensor) -> bool:
    if not isinstance(left, torch.Tensor) or (left.dtype, left.shape) != (right.dtype, right.shape):
        return False
    return torch.equal(*(tensor.reshape(-1).view(torch.uint8) for tensor in (left, right)))


def _bindings(owner: Any) -> Mapping[str, object]:
    return {name: getattr(owner, name, default) for name, default in _UNBOUND.items()}


def _bind(owner: Any, values: Mapping[str, object]) -> None:
    for name, value in values.items():
        setattr(owner, name, value)


def _into_storage(prepared: Bundle, before: Mapping[str, object], module: LiveModule) -> dict[str, object]:
    """`prepared` as attributes, in the storage that was bound before where there was any.

    :raises EngineError: the new tensors do not fit the bound storage, whose addresses captured graphs hold
    """
    bound: dict[str, object] = dict(_UNBOUND)
    for role, tensor in prepared.items():
        old = before[role]
        if not isinstance(old, torch.Tensor):
            bound[role] = tensor
            continue
        if (old.dtype, old.shape, old.stride()) != (tensor.dtype, tensor.shape, tensor.stride()):
            raise EngineError(
                f"{module.plan.source}: {role}",
                found=f"{tensor.dtype} {list(tensor.shape)} {list(tensor.stride())} after a new load",
                wanted=f"{old.dtype} {list(old.shape)} {list(old.stride())}, the form that captured graphs hold",
                remedy="restart the server to load weights of another form",
            )
        bound[role] = old.copy_(tensor)
    return bound
