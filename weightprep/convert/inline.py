"""The inline layout: a standard checkpoint in which converted tensors stand where the source's stood.

A shard that holds a tensor to convert, or to drop, is rewritten under its own name; the index only ever points at
tensors, it never hides one. Shards without such a tensor are linked or copied whole.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from weightprep.checkpoint.config import CONFIG_NAME, HF_QUANT_CONFIG_NAME
from weightprep.checkpoint.header import encode_header, place
from weightprep.checkpoint.json_file import read_object
from weightprep.checkpoint.repository import INDEX_NAME, MAX_INDEX_BYTES, Checkpoint
from weightprep.convert.plan import ModuleJob, OutputTensor, ShardJob
from weightprep.convert.quant_config import Modules, edit_config, edit_hf_quant_config

__all__ = ["inline_jobs", "inline_texts", "shard_header", "shard_size"]


def inline_jobs(checkpoint: Checkpoint, modules: Sequence[ModuleJob]) -> tuple[ShardJob, ...]:
    """One job per source shard, except one that keeps nothing. The scale of a converted weight stands right behind it,
    wherever the source had it.
    """
    by_weight = {module.source.weight.name: module for module in modules}
    consumed = {ref.name for module in modules for ref in module.source_refs}
    jobs = []
    for shard, header in checkpoint.shards.items():
        if consumed.isdisjoint(header.tensors):
            jobs.append(ShardJob(shard, header.path, header.file_size))
            continue
        tensors: list[OutputTensor] = []
        for name, info in header.tensors.items():
            if name in by_weight:
                module = by_weight[name]
                tensors += [
                    OutputTensor(output, module=module.source.module, role=role)
                    for role, output in module.outputs.items()
                ]
            elif name not in consumed:
                tensors.append(OutputTensor(info, copied=checkpoint.tensors[name]))
        if not tensors:
            # it held scales alone, and those now stand beside their weights
            continue
        here = tuple(by_weight[name] for name in header.tensors if name in by_weight)
        size = shard_size(tensors, header.metadata)
        jobs.append(ShardJob(shard, header.path, size, tuple(tensors), header.metadata, here))
    return tuple(jobs)


def shard_size(tensors: Sequence[OutputTensor], metadata: Mapping[str, str]) -> int:
    """Bytes of the file that holds `tensors`."""
    return len(shard_header(tensors, metadata)) + sum(tensor.info.nbytes for tensor in tensors)


def shard_header(tensors: Sequence[OutputTensor], metadata: Mapping[str, str]) -> bytes:
    """What the file that holds `tensors` begins with."""
    return encode_header(place(tensor.info for tensor in tensors), metadata)


def inline_texts(checkpoint: Checkpoint, jobs: Sequence[ShardJob], names: Modules) -> dict[Path, bytes]:
    """The index, where the source has one, config.json, and hf_quant_config.json where there is one."""
    texts: dict[Path, bytes] = {}
    if checkpoint.index_path is not None:
        index = read_object(checkpoint.index_path, max_bytes=MAX_INDEX_BYTES)
        texts[Path(INDEX_NAME)] = to_json(_edit_index(index, checkpoint, jobs))
    texts[Path(CONFIG_NAME)] = to_json(edit_config(checkpoint.config, names))
    quant = edit_hf_quant_config(checkpoint.config, names)
    if quant is not None:
        texts[Path(HF_QUANT_CONFIG_NAME)] = to_json(quant)
    return texts


def to_json(data: Mapping[str, Any]) -> bytes:
    """The way transformers writes its configs, except that the key order is the given one."""
    return (json.dumps(data, indent=2, ensure_ascii=False) + "\n").encode()


def _edit_index(raw: dict[str, Any], checkpoint: Checkpoint, jobs: Sequence[ShardJob]) -> dict[str, Any]:
    replaced = {
        module.source.weight.name: (job.name, [info.name for info in module.outputs.values()])
        for job in jobs
        for module in job.modules
    }
    consumed = {ref.name for job in jobs for module in job.modules for ref in module.source_refs}
    weight_map: dict[str, str] = {}
    for name, shard in raw["weight_map"].items():
        if name in replaced:
            shard, outputs = replaced[name]
            weight_map.update(dict.fromkeys(outputs, shard))
        elif name not in consumed:
            weight_map[name] = shard
    raw["weight_map"] = weight_map
    metadata = raw.get("metadata")
    if isinstance(metadata, dict) and "total_size" in metadata:
        metadata["total_size"] = sum(
            sum(tensor.info.nbytes for tensor in job.tensors)
            if job.rewritten
            else sum(info.nbytes for info in checkpoint.shards[job.name].tensors.values())
            for job in jobs
        )
    return raw
