"""The compress kernels against whole-sequence float64: prefill, chunked prefill, decode, every dtype combination."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from compress_oracle import Ring, compressed

from weightprep.errors import ContractError
from weightprep.runtime.choice import Backend
from weightprep.runtime.compress import compress_decode, compress_prefill, gate_score

BF16, F32 = torch.bfloat16, torch.float32
POISON = float("nan")
# float32 softmax over at most 128 terms: exp is good to 2 ulp, each sum adds at most log2(128) roundings in a tree, and
# the quotient two more. 2^-24 * 2 * (2 + 7 + 2) < 2e-6; what cancels is bounded by sum w |kv|, of order one.
F32_TOLERANCE = 4e-6
# Half an ulp of bf16 (8 bits of significand), relative.
BF16_ROUNDING = 2.0**-8


class Scene:
    """Some requests with their full histories, a state ring, and a positional bias."""

    def __init__(
        self, ratio: int, head_dim: int, lengths: list[int], dtypes: tuple[torch.dtype, ...], device: str, seed: int = 0
    ) -> None:
        score, state, ape, out = dtypes
        generator = torch.Generator().manual_seed(seed)
        self.ratio, self.head_dim, self.device, self.out_dtype = ratio, head_dim, device, out
        self.window = 8 if ratio == 4 else ratio
        self.width = 2 * head_dim * (self.window // ratio)
        self.ring = Ring(ratio)
        self.histories = [torch.randn(n, self.width, generator=generator).to(score) for n in lengths]
        self.ape = torch.randn(self.window, head_dim, generator=generator).to(ape).to(device)
        pages = len(lengths) * self.ring.pages_per_request + 1
        self.state = torch.full((pages, ratio, self.width), POISON, dtype=state, device=device)
        self.done = [0] * len(lengths)
        self.seen: list[tuple[int, int]] = []

    def stored(self, request: int) -> np.ndarray:
        """A history as the state holds it; windows that reach into the state see these values."""
        return self.histories[request].to(self.state.dtype).double().numpy()

    def check(self, out: torch.Tensor, expected: list[tuple[int, int]], inputs_from: dict[int, int]) -> None:
        out = out.cpu()
        for row, (request, end) in zip(out, expected, strict=True):
            if end < 0:
                assert row.isnan().all(), "a row of padding was written"
                continue
            fresh = inputs_from[request]
            history = self.histories[request].double().numpy().copy()
            history[:fresh] = self.stored(request)[:fresh]
            want = compressed(history, self.ape.double().cpu().numpy(), self.ratio, end)
            slack = F32_TOLERANCE + (BF16_ROUNDING * np.abs(want) if self.out_dtype is BF16 else 0.0)
            assert np.all(np.abs(row.double().numpy() - want) <= slack * (1 + np.abs(want)))
            self.seen.append((request, end))

    def prefill(self, requests: list[int], extends: list[int], backend: Backend, padding: int = 0) -> None:
        prefixes = [self.done[r] for r in requests]
        plans = self.ring.prefill_plans(requests, prefixes, extends, padding, np.random.default_rng(1))
        rows = [self.histories[r][p : p + e] for r, p, e in zip(requests, prefixes, extends, strict=True)]
        out = torch.full((len(plans[0]), self.head_dim), POISON, dtype=self.out_dtype, device=self.device)
        result = compress_prefill(
            self.state,
            torch.cat(rows).to(self.device),
            self.ape,
            plans[0].to(self.device),
            plans[1].to(self.device),
            ratio=self.ratio,
            out=out,
            backend=backend,
        )
        assert result is out
        self.check(out, plans[2], dict(zip(requests, prefixes, strict=True)))
        for request, extend in zip(requests, extends, strict=True):
            self.done[request] += extend

    def decode(self, requests: list[int], backend: Backend) -> None:
        for request in requests:
            self.done[request] += 1
        seq_lens = [self.done[r] for r in requests]
        rows = torch.stack([self.histories[r][n - 1] for r, n in zip(requests, seq_lens, strict=True)])
        out = torch.full((len(requests), self.head_dim), POISON, dtype=self.out_dtype, device=self.device)
        plan = self.ring.decode_plan(requests, seq_lens).to(self.device)
        compress_decode(self.state, rows.to(self.device), self.ape, plan, ratio=self.ratio, out=out, backend=backend)
        pairs = zip(requests, seq_lens, strict=True)
        expected = [(r, n) if n % self.ratio == 0 else (-1, -1) for r, n in pairs]
        self.check(out, expected, {r: n - 1 for r, n in zip(requests, seq_lens, strict=True)})


BACKENDS = [Backend.TRITON, Backend.TORCH]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("head_dim", [64, 96])
def test_ratio_4_decodes_across_windows_and_requests(head_dim: int, backend: Backend, device: str) -> None:
    scene = Scene(4, head_dim, [17, 17, 17], (BF16, F32, F32, F32), device)
    scene.decode([1], backend)
    for _ in range(16):
        scene.decode([2, 0, 1], backend)
    assert set(scene.seen) == {(r, end) for r in range(3) for end in (4, 8, 12, 16)}


@pytest.mark.parametrize("backend", BACKENDS)
def test_ratio_4_prefill_in_chunks_then_decode(backend: Backend, device: str) -> None:
    scene = Scene(4, 64, [40, 40, 40], (BF16, F32, F32, F32), device)
    scene.prefill([0, 1, 2], [3, 8, 13], backend, padding=2)
    scene.prefill([2, 0], [5, 2], backend)
    scene.prefill([1, 0], [1, 1], backend, padding=1)
    for _ in range(12):
        scene.decode([0, 1, 2], backend)
    ends = {0: 18, 1: 21, 2: 30}
    assert set(scene.seen) == {(r, end) for r, n in ends.items() for end in range(4, n + 1, 4)}


@pytest.mark.parametrize("backend", BACKENDS)
def test_ratio_128_prefill_in_chunks_then_decode(backend: Backend, device: str) -> None:
    scene = Scene(128, 48, [300, 300], (BF16, F32, F32, F32), device)
    scene.prefill([0, 1], [130, 125], backend, padding=1)
    scene.prefill([0], [100], backend)
    for _ in range(4):
        scene.decode([1, 0], backend)
    scene.prefill([0], [30], backend)
    assert set(scene.seen) == {(0, 128), (1, 128), (0, 256)}


@pytest.mark.parametrize(
    "dtypes", itertools.product((BF16, F32), repeat=4), ids=lambda d: "-".join(str(x)[6:] for x in d)
)
@pytest.mark.parametrize("ratio", [4, 128])
def test_every_dtype_combination_of_score_state_ape_and_output(
    ratio: int, dtypes: tuple[torch.dtype, ...], device: str
) -> None:
    """Triton refuses operands of unlike dtypes, so a forgotten cast shows as an error in one of these."""
    scene = Scene(ratio, 32, [ratio + 8], dtypes, device)
    scene.prefill([0], [ratio - 1], "triton")
    scene.decode([0], "triton")
    scene.prefill([0], [4], "triton")
    expected = {(0, 4), (0, 8)} if ratio == 4 else {(0, 128)}
    assert set(scene.seen) == expected


@pytest.mark.parametrize("ratio", [4, 128])
def test_bf16_scores_and_the_same_scores_widened_give_the_same_result(ratio: int, device: str) -> None:
    """The widening pass costs time alone: bf16 widened before the store or after the load is the same float32.

    So the state has the same bits. The outputs may differ in the order in which the compiled kernels add up a window.
    """
    window, head_dim, tokens = (8, 64, 24) if ratio == 4 else (128, 64, 256)
    width = 2 * head_dim * (window // ratio)
    generator = torch.Generator().manual_seed(3)
    score = torch.randn(tokens, width, generator=generator).to(BF16).to(device)
    ape = torch.randn(window, head_dim, generator=generator).to(device)
    ring = Ring(ratio)
    plan_c, plan_w, _ = ring.prefill_plans([0], [0], [tokens], 0, np.random.default_rng(0))
    outs, states = [], []
    for rows in (score, score.float()):
        state = torch.full((ring.pages_per_request, ratio, width), POISON, dtype=F32, device=device)
        outs.append(compress_prefill(state, rows, ape, plan_c.to(device), plan_w.to(device), ratio=ratio))
        states.append(state)
    assert outs[0].dtype == F32
    assert not outs[0].isnan().any()
    assert torch.allclose(outs[0], outs[1], rtol=F32_TOLERANCE, atol=F32_TOLERANCE)
    assert torch.equal(states[0].view(torch.int32), states[1].view(torch.int32))


@pytest.mark.parametrize("ratio", [4, 128])
def test_difference_from_scores_that_were_never_rounded_is_bounded(ratio: int, device: str) -> None:
    """A gate GEMM with float32 output, as on CUDA, keeps what bf16 drops.

    Rounding moves each kv and each score by at most u = 2^-8 of itself. Scores moved by at most d move a softmax weight
    by a factor of at most exp(2 d), so a channel moves by at most (u + exp(2 u max|score|) - 1) (1 + u) * sum w |kv|.
    """
    window, head_dim, tokens = (8, 128, 64) if ratio == 4 else (128, 128, 512)
    width = 2 * head_dim * (window // ratio)
    generator = torch.Generator().manual_seed(5)
    exact = torch.randn(tokens, width, generator=generator)
    ape = torch.randn(window, head_dim, generator=generator)
    ring = Ring(ratio)
    plan_c, plan_w, ends = ring.prefill_plans([0], [0], [tokens], 0, np.random.default_rng(0))
    state = torch.zeros((ring.pages_per_request, ratio, width), device=device)
    out = compress_prefill(
        state, exact.to(BF16).to(device), ape.to(device), plan_c.to(device), plan_w.to(device), ratio=ratio
    )

    want = np.stack([compressed(exact.numpy(), ape.numpy(), ratio, end) for _, end in ends])
    kv_is_absolute = exact.numpy().copy()
    kv_is_absolute[:, : width // 2] = np.abs(kv_is_absolute[:, : width // 2])
    spread = np.stack([compressed(kv_is_absolute, ape.numpy(), ratio, end) for _, end in ends])
    u, top = BF16_ROUNDING, float(exact[:, width // 2 :].abs().max())
    bound = (u + np.expm1(2 * u * top)) * (1 + u) * spread + F32_TOLERANCE
    difference = out.double().cpu().numpy() - want
    assert np.all(np.abs(difference) <= bound)
    relative = np.linalg.norm(difference) / np.linalg.norm(want)
    # Seen with these normal scores and kv: 0.0021 at ratio 4, 0.0033 at ratio 128.
    assert 5e-4 < relative < 5e-3


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("ratio", [4, 128])
def test_no_rows_is_an_empty_result(ratio: int, backend: Backend, device: str) -> None:
    width = 64 * (4 if ratio == 4 else 2)
    state = torch.zeros((2, ratio, width), device=device)
    rows = torch.empty((0, width), dtype=BF16, device=device)
    ape = torch.zeros((8 if ratio == 4 else 128, 64), device=device)
    plan, writes = (torch.empty((0, n), dtype=torch.uint8, device=device) for n in (16, 8))
    assert compress_decode(state, rows, ape, plan, ratio=ratio, backend=backend).shape == (0, 64)
    assert compress_prefill(state, rows, ape, plan, writes, ratio=ratio, backend=backend).shape == (0, 64)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_padded_decode_row_touches_nothing(backend: Backend, device: str) -> None:
    state = torch.full((2, 4, 256), 7.0, device=device)
    plan = torch.zeros((1, 16), dtype=torch.uint8)
    plan[0, 4:8] = 255
    out = torch.full((1, 64), POISON, device=device)
    rows = torch.ones((1, 256), dtype=BF16, device=device)
    compress_decode(
        state, rows, torch.zeros((8, 64), device=device), plan.to(device), ratio=4, out=out, backend=backend
    )
    assert out.isnan().all()
    assert (state == 7.0).all()


def test_the_gate_score_is_the_gemm_and_nothing_else() -> None:
    x, weight = torch.randn(5, 32).to(BF16), torch.randn(16, 32).to(BF16)
    score = gate_score(x, weight)
    assert score.dtype == BF16
    assert torch.equal(score, torch.nn.functional.linear(x, weight))
    with pytest.raises(ContractError, match=r"wkv_gate.weight: found torch.float32"):
        gate_score(x, weight.float())


def wrong(**changes: object) -> dict[str, object]:
    good: dict[str, object] = {
        "state": torch.zeros(2, 4, 256),
        "kv_score": torch.zeros(3, 256, dtype=BF16),
        "ape": torch.zeros(8, 64),
        "plan": torch.zeros(3, 16, dtype=torch.uint8),
        "ratio": 4,
    }
    return good | changes


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ratio": 2}, "compress ratio"),
        ({"kv_score": torch.zeros(3, 256, dtype=torch.float16)}, "kv_score: found torch.float16"),
        ({"kv_score": torch.zeros(256, 3, dtype=BF16).t()}, "kv_score"),
        ({"kv_score": torch.zeros(3, 128, dtype=BF16)}, "kv_score rows of 128"),
        ({"state": torch.zeros(2, 128, 256)}, "state and kv_score"),
        ({"ape": torch.zeros(128, 64)}, "ape: found 128 rows"),
        ({"plan": torch.zeros(3, 4, dtype=torch.int32)}, "decode plan"),
        ({"plan": torch.zeros(2, 16, dtype=torch.uint8)}, "decode plan: found 2 rows"),
        ({"out": torch.zeros(3, 32)}, "out"),
        ({"out": torch.zeros(3, 64, dtype=torch.float16)}, "out"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ContractError, match=message):
        compress_decode(**wrong(**changes))  # type: ignore[arg-type]


def test_both_operators_trace_under_fake_tensors() -> None:
    torch.library.opcheck(
        torch.ops.weightprep.compress_decode.default,
        (
            torch.zeros(2, 4, 256),
            torch.zeros(1, 256, dtype=BF16),
            torch.zeros(8, 64),
            Ring(4).decode_plan([0], [4]),
            torch.zeros(1, 64),
            4,
            False,
        ),
        test_utils=("test_schema", "test_faketensor"),
    )
    plans = Ring(4).prefill_plans([0], [0], [4], 0, np.random.default_rng(0))
    torch.library.opcheck(
        torch.ops.weightprep.compress_prefill.default,
        (
            torch.zeros(2, 4, 256),
            torch.zeros(4, 256, dtype=BF16),
            torch.zeros(8, 64),
            plans[0],
            plans[1],
            torch.zeros(1, 64),
            4,
            False,
        ),
        test_utils=("test_schema", "test_faketensor"),
    )
