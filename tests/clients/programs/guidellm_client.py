"""guidellm: twenty requests, four at a time; each has exactly the tokens that were asked for."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

URL, MODEL, TOKENIZER = sys.argv[1], sys.argv[2], sys.argv[3]
command = [
    str(Path(sys.executable).with_name("guidellm")),
    "run",
    *("--backend", f"kind=openai_http,target={URL},model={MODEL}"),
    *("--profile", "kind=concurrent,streams=4"),
    *("--constraint", "kind=max_requests,count=20"),
    *("--tokenizer", f"kind=hf_auto,model={TOKENIZER}"),
    *("--data", "kind=synthetic_text,prompt_tokens=64,output_tokens=32"),
    *("--output", "kind=json,path=out.json"),
    "--disable-console",
]
subprocess.run(command, check=True)
metrics = json.loads(Path("out.json").read_text())["benchmarks"][0]["metrics"]
totals = metrics["request_totals"]
print(totals)
assert totals["successful"] == 20
assert totals["errored"] == totals["incomplete"] == 0
counted = metrics["output_token_count"]["successful"]
assert counted["min"] == counted["max"] == 32, counted
