"""lm-eval: a multiple-choice and a generation task over /v1/completions; scores are known."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

URL, MODEL, TOKENIZER = sys.argv[1], sys.argv[2], sys.argv[3]

CAPITALS = [("France", "Paris"), ("Italy", "Rome"), ("Spain", "Madrid"), ("Japan", "Tokyo")]
CHOICES = [capital for _, capital in CAPITALS]

Path("capitals.jsonl").write_text(
    "".join(
        json.dumps({"country": country, "choices": CHOICES, "label": i, "capital": capital}) + "\n"
        for i, (country, capital) in enumerate(CAPITALS)
    )
)
COMMON = """
dataset_path: json
dataset_kwargs: {data_files: {test: capitals.jsonl}}
test_split: test
doc_to_text: "The capital of {{country}} is"
"""
Path("choose.yaml").write_text(
    f"task: choose{COMMON}output_type: multiple_choice\ndoc_to_choice: '{{{{choices}}}}'\n"
    "doc_to_target: label\nmetric_list: [{metric: acc}]\n"
)
Path("generate.yaml").write_text(
    f"task: generate{COMMON}output_type: generate_until\ndoc_to_target: '{{{{capital}}}}'\n"
    "generation_kwargs: {until: ['.'], max_gen_toks: 6}\n"
    "metric_list: [{metric: exact_match, ignore_case: true}]\n"
    "filter_list: [{name: strip, filter:"
    " [{function: remove_whitespace}, {function: take_first}]}]\n"
)
command = [
    sys.executable,
    *("-m", "lm_eval", "run", "--model", "local-completions"),
    "--model_args",
    f"model={MODEL},base_url={URL}/v1/completions,tokenizer={TOKENIZER},num_concurrent=4,max_retries=1",
    *("--tasks", "choose,generate", "--include_path", ".", "--output_path", "out"),
]
subprocess.run(command, check=True)
results = json.loads(next(Path("out").rglob("results*.json")).read_text())["results"]
print(results)
assert results["choose"]["acc,none"] == 1.0
assert results["generate"]["exact_match,strip"] == 1.0
