"""Generate with a real sglang.Engine:  python generate.py MODEL OUT.json LOAD_FORMAT EXTRA_CONFIG_JSON

OUT holds the greedy tokens and the log-probabilities of the whole vocabulary at every position of three prompts.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

PROMPTS = [[(7 * i * i + 3 * i + 5) % 512 for i in range(40)], [5, 17, 33, 91, 200, 301], [7, 8, 9]]
ENGINE = {
    "device": "cpu",
    "attention_backend": "torch_native",
    "skip_tokenizer_init": True,
    "dtype": "bfloat16",
    "mem_fraction_static": 0.3,
    "max_total_tokens": 2048,
    "max_running_requests": 8,
    "disable_overlap_schedule": True,
    "disable_radix_cache": True,
    "log_level": "info",
    "random_seed": 0,
}


def rows(positions: Any) -> list[list[float]]:
    by_token = (sorted((token, value) for value, token, *_ in position) for position in positions if position)
    return [[value for _, value in row] for row in by_token]


def main() -> None:
    import sglang

    model, out, load_format, extra = sys.argv[1:]
    engine = sglang.Engine(model_path=model, load_format=load_format, model_loader_extra_config=extra, **ENGINE)
    results = []
    for prompt in PROMPTS:
        answer = engine.generate(
            input_ids=prompt,
            sampling_params={"temperature": 0, "max_new_tokens": 16, "ignore_eos": True},
            return_logprob=True,
            logprob_start_len=0,
            top_logprobs_num=512,
        )
        meta = answer["meta_info"]
        results.append(
            {
                "tokens": answer["output_ids"],
                "prefill": rows(meta["input_top_logprobs"]),
                "decode": rows(meta["output_top_logprobs"]),
            }
        )
    Path(out).write_text(json.dumps(results))
    engine.shutdown()


if __name__ == "__main__":
    main()
