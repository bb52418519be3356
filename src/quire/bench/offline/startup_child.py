"""One start of an engine, in a process of its own: see `startup.py`.

Reads a job as JSON from stdin, and prints the seconds of each part as one line of JSON.
"""

from __future__ import annotations

import json
import os
import sys
import time


def main() -> int:
    """Start, generate one token, tell."""
    job = json.load(sys.stdin)
    answers = os.dup(1)
    os.dup2(2, 1)  # whatever logs to stdout must not disturb the answer
    before = time.monotonic()
    from quire.engine.llm import LLM
    from quire.errors import QuireError, told
    from quire.params import SamplingParams

    imported = time.monotonic()
    try:
        llm = LLM(**job["engine"])
    except QuireError as error:
        print(told(error), file=sys.stderr)
        return 1
    ready = time.monotonic()
    llm.generate(
        {"prompt_token_ids": [11, 12, 13]},
        SamplingParams(max_tokens=1, ignore_eos=True),
        use_tqdm=False,
    )
    first = time.monotonic()
    parts = {
        "startup_time": ready - job["begun"],
        "compilation_time": 0.0,
        "import_time": imported - before,
        "load_time": ready - imported,
        "first_token_time": first - job["begun"],
    }
    os.write(answers, (json.dumps(parts) + "\n").encode())
    return 0


if __name__ == "__main__":
    sys.exit(main())
