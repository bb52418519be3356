"""schemathesis: requests made from /openapi.json; no 5xx, no status or type it does not name."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

URL = sys.argv[1]
CHECKS = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_schema_conformance",
)
command = [
    str(Path(sys.executable).with_name("schemathesis")),
    *("run", f"{URL}/openapi.json", "-c", ",".join(CHECKS), "-n", "30", "--seed", "1"),
    *("--phases", "examples,coverage,fuzzing", "--warnings", "off", "--no-color"),
]
subprocess.run(command, check=True)
