#!/usr/bin/env bash
# The main job in one go, without a GPU and without a download of weights: makes .venv, writes a small GLM-5.2-shaped checkpoint
# with synth (real tensor names and real attention dims), inspects it, converts it, verifies it and says what to look at.
# Everything it writes is in .quickstart/ (or the folder named as the first argument).
set -euo pipefail
cd "$(dirname "$0")/.."
work="${1:-.quickstart}"

if ! .venv/bin/weightprep --version >/dev/null 2>&1; then
  .venv/bin/python -c '' 2>/dev/null || "${PYTHON:-python3}" -m venv .venv
  echo "installing weightprep with torch into .venv: about 5.5 GB, some minutes" >&2
  .venv/bin/python -m pip install --quiet --disable-pip-version-check -e .
fi
weightprep=.venv/bin/weightprep

rm -rf "$work/bf16" "$work/fp8" "$work/fp8.partial"
mkdir -p "$work"
say() { printf '\n== %s\n' "$*"; }

say "a checkpoint: 3 decoder layers and the NextN layer, kv_b_proj in bf16 [28672, 512] as published"
"$weightprep" synth "$work/bf16" --arch glm_moe_dsa --layers 3 --full-dims --encoding bf16

say "what sglang would do with it on an MI355X, today and with weightprep"
"$weightprep" inspect "$work/bf16" --target gfx950

say "convert: kv_b_proj to per-tensor float8_e4m3fn, everything else untouched"
"$weightprep" convert "$work/bf16" "$work/fp8"

say "verify: every tensor read again and judged"
"$weightprep" verify "$work/bf16" "$work/fp8"

say "the converted checkpoint needs no conversion any more"
"$weightprep" inspect "$work/fp8" --target gfx950

cat <<END

Look at:
  $work/fp8/weightprep.json   scale, amax, SQNR and hashes of each converted tensor
  $work/fp8/config.json       the quantization_config that makes plain sglang apply the scales, NextN included
Next:
  sglang serve --model-path $work/fp8 --load-format weightprep     (on a machine with sglang and a GPU; docs/serving.md)
END
