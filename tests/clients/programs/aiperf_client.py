"""aiperf: twenty streamed chats, four at a time, and the metrics that it scrapes itself."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

URL, MODEL, TOKENIZER = sys.argv[1], sys.argv[2], sys.argv[3]
command = [
    str(Path(sys.executable).with_name("aiperf")),
    "profile",
    *("-m", MODEL, "--url", URL, "--endpoint-type", "chat", "--streaming"),
    *("--tokenizer", TOKENIZER, "--concurrency", "4", "--request-count", "20"),
    *("--isl", "64", "--osl", "16"),
    *("--extra-inputs", "ignore_eos:true", "--extra-inputs", "min_tokens:16"),
    *("--ui", "none", "--artifact-dir", "out"),
]
# With this variable it takes the path of a local tokenizer for a name in a hub, and refuses it.
kept = {key: value for key, value in os.environ.items() if key != "HF_HUB_OFFLINE"}
subprocess.run(command, check=True, env=kept)
report = json.loads(Path("out/profile_export_aiperf.json").read_text())
assert report["request_count"]["avg"] == 20
assert not report.get("error_request_count"), report["error_summary"]
assert report["total_usage_completion_tokens"]["avg"] == 20 * 16
scraped = json.loads(Path("out/server_metrics_export.json").read_text())
assert scraped["summary"]["endpoints_successful"] == [f"{URL}/metrics"]
assert "vllm:generation_tokens" in json.dumps(scraped)
