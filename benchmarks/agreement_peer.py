"""Runs in an environment with vLLM: its own figures of records that `agreement.py` passes on stdin.

Prints a JSON object with the names that results have.
"""

from __future__ import annotations

import json
import sys

PERCENTILES = [50, 90, 99]
NAMES = {"total_input": "total_input_tokens", "total_output": "total_output_tokens"}


def main() -> None:
    from vllm.benchmarks.lib.endpoint_request_func import RequestFuncOutput
    from vllm.benchmarks.serve import calculate_metrics

    given = json.load(sys.stdin)
    outputs = []
    for record in zip(*(given[name] for name in FIELDS), strict=True):
        output = RequestFuncOutput()
        for name, value in zip(FIELDS.values(), record, strict=True):
            setattr(output, name, value)
        output.success = not output.error
        outputs.append(output)
    figures, _ = calculate_metrics(
        [], outputs, given["duration"], None, PERCENTILES, given["goodput"]
    )
    found = {}
    for name, value in vars(figures).items():
        if name.startswith("percentiles_"):
            kind = name.removeprefix("percentiles_")
            found |= {f"p{percent:g}_{kind}": float(number) for percent, number in value}
        else:
            found[NAMES.get(name, name)] = float(value)
    print("figures", json.dumps(found))


FIELDS = {
    "ttfts": "ttft",
    "latencies": "latency",
    "itls": "itl",
    "start_times": "start_time",
    "input_lens": "prompt_len",
    "output_lens": "output_tokens",
    "errors": "error",
}
"""Lists of a detailed result, and vLLM's names of their entries."""

if __name__ == "__main__":
    main()
