"""`vllm bench serve`: twenty streamed requests; each has the tokens that were asked for."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

URL, MODEL, TOKENIZER = sys.argv[1], sys.argv[2], sys.argv[3]
for backend, endpoint in (
    ("openai-chat", "/v1/chat/completions"),
    ("openai", "/v1/completions"),
):
    command = [
        str(Path(sys.executable).with_name("vllm")),
        *("bench", "serve", "--backend", backend, "--base-url", URL, "--endpoint", endpoint),
        *("--model", MODEL, "--tokenizer", TOKENIZER, "--dataset-name", "random"),
        *("--random-input-len", "64", "--random-output-len", "16", "--num-prompts", "20"),
        *("--ignore-eos", "--save-result", "--result-filename", f"{backend}.json"),
    ]
    subprocess.run(command, check=True)
    result = json.loads(Path(f"{backend}.json").read_text())
    assert result["completed"] == 20, result
    assert result["total_output_tokens"] == 20 * 16, result
