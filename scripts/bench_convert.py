"""Time and memory of `weightprep convert` against `cp -r` and the script that everyone writes, in one run on one disk.

    python scripts/bench_convert.py --size 4.2GB --rounds 5

Every run starts with a cold page cache (which takes root; --warm leaves it alone) and ends with a sync. The order of
the contenders turns round from one round to the next, because whoever runs second finds another disk. Before any time
is printed, the result of the conversion is verified. Printed are medians and ranges, the ratio to `cp -r`, CPU seconds,
peak resident memory, and the load of the machine, without which no figure here means anything.
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

NAIVE = """
import pathlib, shutil, sys, torch
from safetensors.torch import load_file, save_file
source, target = map(pathlib.Path, sys.argv[1:])
target.mkdir()
for path in sorted(source.iterdir()):
    if path.suffix != ".safetensors":
        shutil.copy(path, target)
        continue
    tensors = load_file(path)
    for name in [name for name in tensors if name.endswith("kv_b_proj.weight")]:
        weight = tensors[name].float()
        scale = weight.abs().max() / 448
        tensors[name] = (weight / scale).clamp(-448, 448).to(torch.float8_e4m3fn)
        tensors[name.replace(".weight", ".weight_scale")] = scale
    save_file(tensors, target / path.name, metadata={"format": "pt"})
"""


@dataclass(frozen=True, slots=True)
class Run:
    """One timed run: seconds until the sync returned, CPU seconds and peak resident MB of the process."""

    seconds: float
    cpu: float
    resident_mb: float


def timed(command: list[str], *, cold: bool) -> Run:
    """Run `command` and sync.

    :raises SystemExit: the command failed
    """
    os.sync()
    if cold:
        Path("/proc/sys/vm/drop_caches").write_text("3")
    began = time.monotonic()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    # wait4, because its usage is that of this process alone
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    os.sync()
    seconds = time.monotonic() - began
    if process.returncode:
        raise SystemExit(f"exit code {process.returncode}: {' '.join(command)}")
    return Run(seconds, usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024)


def main() -> None:
    """Run the comparison and print a Markdown table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="4.2GB", help="of the synthetic checkpoint")
    parser.add_argument("--shards", type=int, default=12)
    parser.add_argument("--layers", type=int, default=12, help="each has one kv_b_proj of 29 MB")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--warm", action="store_true", help="leave the page cache alone")
    parser.add_argument("--only", nargs="*", help="contenders to run besides cp -r")
    parser.add_argument("--directory", type=Path, help="where to work; default: the system's temporary directory")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.directory) as work:
        compare(options, Path(work))


def compare(options: argparse.Namespace, work: Path) -> None:
    """Make the checkpoint, run every contender in every round, and print."""
    ours = [sys.executable, "-m", "weightprep"]
    source = work / "source"
    shape = ["--full-dims", "--layers", str(options.layers), "--shards", str(options.shards), "--size", options.size]
    subprocess.run([*ours, "synth", str(source), *shape], check=True)
    script = work / "naive.py"
    script.write_text(NAIVE)
    convert = [*ours, "convert", str(source), "{out}", "--workers", str(options.workers), "--link"]
    contenders = {
        "cp -r": ["cp", "-r", str(source), "{out}"],
        "convert --link copy": [*convert, "copy"],
        "convert --link hard": [*convert, "hard"],
        "convert --layout sidecar --link hard": [*convert, "hard", "--layout", "sidecar"],
        "load_file / save_file": [sys.executable, str(script), str(source), "{out}"],
        "import torch": [sys.executable, "-c", "import torch"],
    }
    if options.only is not None:
        contenders = {name: command for name, command in contenders.items() if name in ("cp -r", *options.only)}
    runs: dict[str, list[Run]] = {name: [] for name in contenders}
    for number in range(options.rounds):
        for name in list(contenders) if number % 2 == 0 else list(reversed(contenders)):
            out = work / "out"
            runs[name].append(timed([part.format(out=out) for part in contenders[name]], cold=not options.warm))
            if name.startswith("convert") and number == 0:
                subprocess.run([*ours, "verify", str(source), str(out)], check=True)
            shutil.rmtree(out, ignore_errors=True)
    size = sum(path.stat().st_size for path in source.glob("*.safetensors"))
    print(
        f"\n{size / 1e9:.2f} GB in {options.shards} shards, {options.layers + 1} kv_b_proj, {options.workers} workers,"
    )
    print(f"{'warm' if options.warm else 'cold'}, {os.cpu_count()} cores, load {os.getloadavg()[1]:.1f},")
    print(f"{platform.platform()}, Python {platform.python_version()}, {options.rounds} rounds\n")
    print("| what | seconds, median [range] | ratio to cp -r | CPU s | peak RSS MB |\n|---|---|---|---|---|")
    base = statistics.median(run.seconds for run in runs["cp -r"])
    for name, done in runs.items():
        seconds = [run.seconds for run in done]
        middle = statistics.median(seconds)
        print(
            f"| {name} | {middle:.1f} [{min(seconds):.1f}-{max(seconds):.1f}] | {middle / base:.2f} "
            f"| {statistics.median(run.cpu for run in done):.1f} | {max(run.resident_mb for run in done):.0f} |"
        )


if __name__ == "__main__":
    main()
