"""DeepSeek-V4's compressor over whole sequences in NumPy float64, and the plans that address a ring per request.

The oracle knows no plan and no state: it slices windows out of a request's full history. The plans are built here
record by record from the engine's C++ structs, so that a misread word in the package shows.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

DECODE = np.dtype([("seq_len", "<u4"), ("slot", "<i4"), ("page_0", "<i4"), ("page_1", "<i4")])
COMPRESS = np.dtype([("seq_len", "<u4"), ("row", "<u2"), ("held", "<u2"), ("page_0", "<i4"), ("page_1", "<i4")])
WRITE = np.dtype([("row", "<u4"), ("slot", "<i4")])


def compressed(history: np.ndarray, ape: np.ndarray, ratio: int, end: int) -> np.ndarray:
    """The compressed row of the window that ends before position `end`; history (tokens, width), any float dtype."""
    head_dim = ape.shape[1]
    rows = history.astype(np.float64)
    if ratio == 4:
        new = rows[end - 4 : end]
        kv, score = new[:, head_dim : 2 * head_dim], new[:, 3 * head_dim :]
        bias = ape[4:].astype(np.float64)
        if end > 4:
            old = rows[end - 8 : end - 4]
            kv = np.concatenate([old[:, :head_dim], kv])
            score = np.concatenate([old[:, 2 * head_dim : 3 * head_dim], score])
            bias = ape.astype(np.float64)
    else:
        window = rows[end - ratio : end]
        kv, score, bias = window[:, :head_dim], window[:, head_dim:], ape.astype(np.float64)
    logits = score + bias
    weight = np.exp(logits - logits.max(axis=0))
    return (weight * kv).sum(axis=0) / weight.sum(axis=0)


@dataclass(frozen=True)
class Ring:
    """Slots of requests in the state: two pages of four rows each at ratio 4, one page of 128 rows at ratio 128."""

    ratio: int

    @property
    def pages_per_request(self) -> int:
        return 2 if self.ratio == 4 else 1

    def page(self, request: int, position: int) -> int:
        position = max(position, 0)
        return request * self.pages_per_request + (position // self.ratio) % self.pages_per_request

    def slot(self, request: int, position: int) -> int:
        return self.page(request, position) * self.ratio + position % self.ratio

    def decode_plan(self, requests: list[int], seq_lens: list[int]) -> torch.Tensor:
        records = np.zeros(len(requests), DECODE)
        for record, request, seq_len in zip(records, requests, seq_lens, strict=True):
            last = seq_len - 1
            record["seq_len"], record["slot"] = seq_len, self.slot(request, last)
            record["page_0"], record["page_1"] = self.page(request, last - self.ratio), self.page(request, last)
        return _bytes(records)

    def prefill_plans(
        self, requests: list[int], prefixes: list[int], extends: list[int], padding: int, rng: np.random.Generator
    ) -> tuple[torch.Tensor, torch.Tensor, list[tuple[int, int]]]:
        """Shuffled plans with `padding` invalid records each, and per compress record (request, end) or (-1, -1)."""
        window = 2 * self.ratio if self.ratio == 4 else self.ratio
        compresses, writes, ends = [], [], []
        first_row = 0
        for request, prefix, extend in zip(requests, prefixes, extends, strict=True):
            total = prefix + extend
            keep_from = total // self.ratio * self.ratio - (self.ratio if self.ratio == 4 else 0)
            for j in range(extend):
                position = prefix + j
                if (position + 1) % self.ratio == 0:
                    held = window - min(j + 1, window)
                    pages = (
                        (self.page(request, position - self.ratio), self.page(request, position)) if held else (-1, 0)
                    )
                    compresses.append((position + 1, first_row + j, held, *pages))
                    ends.append((request, position + 1))
                if position >= keep_from:
                    writes.append((first_row + j, self.slot(request, position)))
            first_row += extend
        compresses += [(0xFFFFFFFF, 0, 0, -1, -1)] * padding
        ends += [(-1, -1)] * padding
        writes += [(0xFFFFFFFF, -1)] * padding
        order = rng.permutation(len(compresses))
        shuffled = np.array(compresses, COMPRESS)[order] if compresses else np.zeros(0, COMPRESS)
        kept = rng.permutation(np.array(writes, WRITE)) if writes else np.zeros(0, WRITE)
        return _bytes(shuffled), _bytes(kept), [ends[i] for i in order]


def _bytes(records: np.ndarray) -> torch.Tensor:
    raw = np.frombuffer(records.tobytes(), np.uint8).reshape(len(records), records.dtype.itemsize)
    return torch.from_numpy(raw.copy())
