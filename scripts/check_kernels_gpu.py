"""Check every kernel of weightprep.runtime on the GPU of this machine; exit code 1 at the first wrong result.

    python3 scripts/check_kernels_gpu.py                       everything
    compute-sanitizer --tool memcheck python3 scripts/check_kernels_gpu.py --small
    compute-sanitizer --tool racecheck python3 scripts/check_kernels_gpu.py --small

Outputs lie between guard bands and are filled with two different poisons in two runs: a byte that nobody wrote differs
between them, a byte written outside shows in the bands. Oracles are NumPy and ml_dtypes (tests/runtime/absorb_oracle).
"""

from __future__ import annotations

import argparse
import functools
import itertools
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch

# The script runs from a checkout, with or without weightprep installed.
ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "runtime")]

from absorb_oracle import Weight, assert_close, assert_same_bytes, fp8_groups, mxfp4_groups, to_float64  # noqa: E402

from weightprep.runtime import cuda_absorb, dispatch, witness  # noqa: E402
from weightprep.runtime.absorb import absorb_q, absorb_v  # noqa: E402
from weightprep.runtime.choice import ActQuant, Backend, OutQuant, Quantized  # noqa: E402
from weightprep.runtime.flatten import flatten_quant_fp8, flatten_quant_mxfp4  # noqa: E402
from weightprep.runtime.scale_layout import GroupScaleLayout, behind_row_major_strides  # noqa: E402
from weightprep.runtime.tuning import CudaConfig, DecodeConfig, WgmmaConfig  # noqa: E402

GUARD = 4096
DIMS = {"glm v": (512, 256), "glm q": (192, 512), "deepseek v": (512, 128), "deepseek q": (128, 512)}


class Guarded:
    """A tensor of the given shape and strides between two bands, all of it filled with one byte."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, poison: int, *, column: bool = False) -> None:
        size = int(np.prod(shape)) * torch.empty(0, dtype=dtype).element_size()
        self.poison = poison
        self.memory = torch.full((2 * GUARD + size,), poison, dtype=torch.uint8, device="cuda")
        self.size = size
        flat = self.memory[GUARD : GUARD + size].view(dtype)
        self.tensor = flat.view(shape[::-1]).t() if column else flat.view(shape)

    def check(self) -> None:
        bands = torch.cat((self.memory[:GUARD], self.memory[GUARD + self.size :]))
        if not bool((bands == self.poison).all()):
            raise AssertionError("a byte outside the output was written")


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="cuda").copy_(tensor).view(torch.uint8)


Kernel = Callable[[torch.Tensor, Weight, torch.Tensor, torch.Tensor], None]


def triton_kernel(x: torch.Tensor, weight: Weight, out: torch.Tensor, scales: torch.Tensor) -> None:
    dispatch.absorb(x, weight.w, weight.scale, weight.mx_scale, None, out, scales, ActQuant.NONE, Backend.TRITON)


def cuda_kernel(config: CudaConfig) -> Kernel:
    """One configuration of the CUDA kernels, whatever the tuning table would take."""

    def launch(x: torch.Tensor, weight: Weight, out: torch.Tensor, scales: torch.Tensor) -> None:
        reason = cuda_absorb.unsupported(x, weight.w, weight.mx_scale, out, config)
        if reason is not None:
            raise AssertionError(reason)
        some = scales if scales.numel() else None
        cuda_absorb.launch_cuda(x, weight.w, weight.scale, weight.mx_scale, out, some, config)

    return launch


def configs_for(k: int, n: int) -> list[CudaConfig]:
    """Of each CUDA kernel the configurations that take its different paths."""
    warps_k = 1 if k % 128 else 2
    return [
        DecodeConfig(32, warps_k, 4),
        DecodeConfig(64, k // 64 if k < 256 else 4, 2, loads_first=True),
        DecodeConfig(128, warps_k, 8, 2, loads_first=True),
        DecodeConfig(64, warps_k, 2, 4, prefetch=False),
        WgmmaConfig(8, 2, 1, 1),
        WgmmaConfig(32, 2 if n % 256 else 4, 1, k // 64, prefetch=False),
        WgmmaConfig(64, 2, 1, k // 64),
        WgmmaConfig(128, 2, 1, 1),
        WgmmaConfig(16, 2, 4, 2),
        WgmmaConfig(64, 2, 3, k // 64),
    ]


def kernels_for(k: int, n: int) -> dict[str, Kernel]:
    """Triton and all of :func:`configs_for`."""
    return {"triton": triton_kernel, **{repr(config): cuda_kernel(config) for config in configs_for(k, n)}}


def compile_all(names: tuple[str, ...]) -> None:
    """Compile on all cores what the checks of `names` will launch."""
    variants = [
        (config, *DIMS[name], mxfp4, form)
        for name, mxfp4, form in itertools.product(names, (False, True), OutQuant)
        for config in configs_for(*DIMS[name])
        if form is OutQuant.NONE or name.endswith("v")
    ]
    with ThreadPoolExecutor(16, initializer=lambda: torch.cuda.set_device(0)) as pool:
        list(pool.map(lambda variant: cuda_absorb.compile_variant(*variant), variants))


def run_guarded(
    x: torch.Tensor, weight: Weight, form: OutQuant, column: bool, kernel: Kernel
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The outputs of one call, the same under two poisons, nothing written outside."""
    (m, heads, _), n = x.shape, weight.w.shape[2]
    results = []
    for poison in (0xA5, 0xFF):
        scales: Guarded | None
        if form is OutQuant.NONE:
            out, scales = Guarded((m, heads, n), torch.bfloat16, poison), None
        elif form is OutQuant.FP8_GROUP:
            out = Guarded((m, heads * n), torch.float8_e4m3fn, poison)
            scales = Guarded((m, heads * n // 128), torch.float32, poison, column=column)
        else:
            out = Guarded((m, heads * n // 2), torch.uint8, poison)
            scales = Guarded((m, heads * n // 32), torch.uint8, poison, column=column)
        kernel(x, weight, out.tensor, torch.empty((0, 0), device="cuda") if scales is None else scales.tensor)
        torch.cuda.synchronize()
        for guarded in (out, scales):
            if guarded is not None:
                guarded.check()
        results.append((out.tensor, None if scales is None else scales.tensor))
    for first, second in zip(*results, strict=True):
        if first is not None and not torch.equal(as_bytes(first), as_bytes(second)):
            raise AssertionError("a byte of the output was not written, or two runs differ")
    return results[0]


def check_cell(name: str, kind: str, heads: int, m: int, kernels: dict[str, Kernel]) -> list[str]:
    """One product in all its output forms, bit for bit where bits are defined; returns what failed."""
    k, n = DIMS[name]
    weight = Weight.make(kind, heads, k, n, "cuda")
    wide = torch.full((heads, m, k + 64), float("nan"), device="cuda", dtype=torch.bfloat16)
    x = wide.transpose(0, 1)[:, :, 64:]
    x.copy_(torch.randn((m, heads, k)))
    failed = []
    for label, kernel in kernels.items():
        if kind == "bf16" and kernel is not triton_kernel:
            continue
        try:
            plain, _ = run_guarded(x, weight, OutQuant.NONE, False, kernel)
            assert_close(plain, x, weight)
            if name.endswith("q"):
                continue
            flat = to_float64(plain).astype(np.float32).reshape(m, -1)
            oracles = {OutQuant.FP8_GROUP: fp8_groups(flat), OutQuant.MXFP4: mxfp4_groups(flat)}
            for column, (form, (wanted_values, wanted_scales)) in itertools.product((False, True), oracles.items()):
                values, scales = run_guarded(x, weight, form, column, kernel)
                assert_same_bytes(values, wanted_values)
                assert_same_bytes(scales, wanted_scales)
        except Exception as error:
            failed.append(f"{name} {kind} M = {m} {label}: {type(error).__name__}: {str(error)[:300]}")
    return failed


def check_all_cells() -> None:
    check_cells(tuple(DIMS), (1, 2, 3, 17, 257), 3)
    check_flatten()


def check_all_cells_small() -> None:
    check_cells(("glm v", "deepseek q"), (3, 17), 2)
    check_flatten()


def check_cells(names: tuple[str, ...], rows: tuple[int, ...], heads: int) -> None:
    compile_all(names)
    failed = [
        line
        for name, kind, m in itertools.product(names, ("e4m3fn", "mxfp4", "bf16"), rows)
        for line in check_cell(name, kind, heads, m, kernels_for(*DIMS[name]))
    ]
    if failed:
        raise AssertionError("\n  ".join(["", *failed]))


def check_flatten() -> None:
    for quantize, oracle in ((flatten_quant_fp8, fp8_groups), (flatten_quant_mxfp4, mxfp4_groups)):
        x = torch.randn((17, 3, 256), device="cuda").bfloat16()
        values, scales = quantize(x, scale_layout=GroupScaleLayout.COLUMN)
        wanted = oracle(x.float().flatten(1).cpu().numpy())
        assert_same_bytes(values, wanted[0])
        assert_same_bytes(scales, wanted[1])


def check_every_amax() -> None:
    """Every normal bf16 as the largest of its group, whose scale the kernels divide by means of their own."""
    exact = np.eye(128, dtype=np.float64)[None]
    w = torch.eye(128, device="cuda").to(torch.float8_e4m3fn)[None].transpose(1, 2)
    weight = Weight(w, torch.ones(1, device="cuda"), None, exact)
    largest = torch.arange(0x0080, 0x7F80, dtype=torch.int16).view(torch.bfloat16)
    x = torch.zeros((len(largest), 1, 128), dtype=torch.bfloat16, device="cuda")
    x[:, 0, 5] = largest.cuda()
    # Weights are the identity. A second value, where it is normal too.
    x[:, 0, 6] = torch.where(x[:, 0, 5] > 1e-37, -0.3 * x[:, 0, 5], 0)
    wanted_values, wanted_scales = fp8_groups(x.float().flatten(1).cpu().numpy())
    for config in (DecodeConfig(32, 2, 4), WgmmaConfig(64, 2, 1, 2), WgmmaConfig(64, 2, 4, 2)):
        values, scales = run_guarded(x, weight, OutQuant.FP8_GROUP, False, cuda_kernel(config))
        assert_same_bytes(values, wanted_values)
        assert_same_bytes(scales, wanted_scales)


def check_many_rows_and_no_rows() -> None:
    weight = Weight.make("e4m3fn", 8, 512, 256, "cuda")
    for m in (0, 1, 4096):
        x = torch.randn((m, 8, 512), device="cuda").bfloat16()
        result = absorb_v(x, weight.w, weight.scale, out_quant=OutQuant.FP8_GROUP, act_quant=ActQuant.NONE)
        plain = absorb_v(x, weight.w, weight.scale, act_quant=ActQuant.NONE, backend=Backend.TRITON)
        assert isinstance(result, Quantized)
        if m:
            assert_close(plain[-1:], x[-1:], weight)
            widened = (result.values.float().view(m, -1, 128) * result.scales[..., None]).view(m, -1)
            difference = (widened - plain.flatten(1).float()).norm() / plain.float().norm()
            if not difference < 0.03:
                raise AssertionError(f"M = {m}: quantized differs by {difference}")


def check_offsets_beyond_31_bits() -> None:
    """Rows 2^30 elements apart, in the input and in the output."""
    weight = Weight.make("e4m3fn", 2, 512, 256, "cuda")
    apart = 2**30
    memory = torch.empty(2 * apart + 4096, dtype=torch.bfloat16, device="cuda")
    x = memory.as_strided((3, 2, 512), (apart, 512, 1))
    x.copy_(torch.randn((3, 2, 512)))
    target = torch.empty(2 * apart + 4096, dtype=torch.bfloat16, device="cuda")
    for kernel in kernels_for(512, 256).values():
        out = target.as_strided((3, 2, 256), (apart, 256, 1))
        out.fill_(float("nan"))
        kernel(x, weight, out, torch.empty((0, 0), device="cuda"))
        assert_close(out, x, weight)


def check_capture() -> None:
    """A captured call follows its inputs, and a first call inside a capture is an error that says so."""
    weight = Weight.make("e4m3fn", 8, 512, 256, "cuda")
    for m, layout in itertools.product((1, 17, 64, 256), GroupScaleLayout):
        x = torch.randn((m, 8, 512), device="cuda").bfloat16()

        def call(x: torch.Tensor = x, layout: GroupScaleLayout = layout) -> Quantized:
            result = absorb_v(x, weight.w, weight.scale, out_quant=OutQuant.FP8_GROUP, scale_layout=layout)
            assert isinstance(result, Quantized)
            return result

        call()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = call()
        for _ in range(3):
            x.copy_(torch.randn_like(x))
            graph.replay()
            eager = call()
            if not torch.equal(captured.values.view(torch.uint8), eager.values.view(torch.uint8)):
                raise AssertionError(f"M = {m}: a replay differs from the eager call")
            if not torch.equal(captured.scales, eager.scales):
                raise AssertionError(f"M = {m}: the scales of a replay differ")


def check_stream_order() -> None:
    """The kernels may begin early, but see what the one before them wrote: inputs and weights rewritten each time."""
    weight = Weight.make("e4m3fn", 8, 512, 256, "cuda")
    sources = [torch.randn((4, 8, 512), device="cuda").bfloat16() for _ in range(8)]
    stored = weight.w.transpose(1, 2).view(torch.uint8)
    weights = [stored.roll(i, 1).view(weight.w.dtype).transpose(1, 2) for i in range(8)]
    for config in (DecodeConfig(32, 2, 4), WgmmaConfig(16, 2, 1, 8)):

        def run(x: torch.Tensor, w: torch.Tensor, config: CudaConfig = config) -> torch.Tensor:
            out = torch.empty((4, 8, 256), device="cuda", dtype=torch.bfloat16)
            cuda_absorb.launch_cuda(x, w, weight.scale, None, out, None, config)
            return out

        wanted = [run(x, w) for x, w in zip(sources, weights, strict=True)]
        torch.cuda.synchronize()
        x, w = torch.empty_like(sources[0]), torch.empty_like(weight.w)
        for repeat in range(200):
            i = repeat % 8
            x.copy_(sources[i])
            w.view(torch.uint8).copy_(weights[i].view(torch.uint8))
            got, again = run(x, w), run(x, w)
            if not (torch.equal(got, wanted[i]) and torch.equal(again, wanted[i])):
                raise AssertionError(f"{config} repeat {repeat}: stale input or weight")


def check_compile() -> None:
    weight = Weight.make("e4m3fn", 8, 512, 256, "cuda")

    def layer(x: torch.Tensor) -> torch.Tensor:
        values, scales = absorb_v(x + 1, weight.w, weight.scale, out_quant=OutQuant.FP8_GROUP)
        return values.float().view(x.shape[0], -1, 128) * scales[..., None]

    compiled = torch.compile(layer, fullgraph=True)
    for m in (2, 16, 33):
        x = torch.randn((m, 8, 512), device="cuda").bfloat16()
        if not torch.equal(compiled(x), layer(x)):
            raise AssertionError(f"M = {m}: compiled and eager differ")


def kernels_of(call: Callable[[], object]) -> list[str]:
    from torch.profiler import ProfilerActivity, profile

    call()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        call()
        torch.cuda.synchronize()
    return [event.name for event in profiler.events() if event.device_type == torch.autograd.DeviceType.CUDA]


def o_proj_input(x: torch.Tensor, weight: Weight, out_quant: OutQuant, layout: GroupScaleLayout) -> object:
    """What a GEMM that wants flat rows, and scales behind row-major strides, is handed."""
    result = absorb_v(x, weight.w, weight.scale, mx_scale=weight.mx_scale, out_quant=out_quant, scale_layout=layout)
    if isinstance(result, Quantized):
        return result.values, behind_row_major_strides(result.scales)
    return result.flatten(1, 2)


def check_no_copy_kernel() -> None:
    """Between the product and the GEMM's input there is exactly one kernel, for every o_proj and scale layout."""
    heads = 8
    for kind, m in itertools.product(("e4m3fn", "mxfp4"), (1, 16, 256)):
        weight = Weight.make(kind, heads, 512, 256, "cuda")
        x = torch.randn((m, heads, 512), device="cuda").bfloat16()
        for out_quant, layout in itertools.product(OutQuant, GroupScaleLayout):
            names = kernels_of(functools.partial(o_proj_input, x, weight, out_quant, layout))
            if len(names) != 1 or "absorb" not in names[0]:
                raise AssertionError(f"{kind} M = {m} {out_quant.value} {layout.value}: kernels {names}")
    weight = Weight.make("e4m3fn", heads, 192, 512, "cuda")
    x = torch.randn((4, heads, 192), device="cuda").bfloat16()
    names = kernels_of(lambda: absorb_q(x, weight.w, weight.scale))
    if len(names) != 1:
        raise AssertionError(f"absorb_q: kernels {names}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="a grid small enough for compute-sanitizer")
    args = parser.parse_args()
    torch.manual_seed(0)
    checks: list[Callable[[], None]] = [
        check_every_amax,
        check_many_rows_and_no_rows,
        check_offsets_beyond_31_bits,
        check_capture,
        check_stream_order,
        check_compile,
        check_no_copy_kernel,
    ]
    checks = [check_all_cells_small] if args.small else [*checks, check_all_cells]
    failed = 0
    for check in checks:
        try:
            check()
        except Exception as error:
            failed += 1
            print(f"FAILED {check.__name__}: {type(error).__name__}: {error}", flush=True)
        else:
            print(f"ok {check.__name__}", flush=True)
    print(witness.counts(), witness.passed_over(), flush=True)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
