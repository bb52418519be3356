"""Whether the time to the first token tells one key what another has sent.

One server, with a key file of two keys. In each trial `ann` sends a prompt of 500 random tokens,
and `eve` one after it: by a coin the same, or another. What is reported is the area under the ROC
curve (AUC) of eve's times to first token as a test of which it was: 0.5 is a guess, 1 is certainty.
With `--shared-prefix-cache` the keys share the prefix cache: then the AUC is high, which shows that
the measurement would find a difference. The tokens that eve's requests found in the cache are
counted, too.

    python benchmarks/key_timing.py [--model DIR] [--trials 2000] [--shared-prefix-cache] [--json]

The exit code is 1 if the AUC is above `--most` (0.55), or below 0.9 with `--shared-prefix-cache`.
Other load on the machine hides differences: run it on an idle one.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import http.client
import json
import random
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import one_server

ANN, EVE = "key-of-ann", "key-of-eve"
FEWEST: Final = 10
"""Ids below this one are often special tokens."""
CERTAIN: Final = 0.9


@contextlib.contextmanager
def serving(arguments: Sequence[str]) -> Iterator[int]:
    """The port of a `quire serve` with both keys."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "keys")
        path.write_text(
            "".join(
                f"{name}:{hashlib.sha256(key.encode()).hexdigest()}:user\n"
                for name, key in (("ann", ANN), ("eve", EVE))
            )
        )
        path.chmod(0o600)
        flags = [*arguments]
        flags += ["--api-key-file", str(path), "--disable-uvicorn-access-log"]
        with one_server.serving(*flags) as port:
            yield port


class Caller:
    """A connection with a key."""

    def __init__(self, port: int, key: str) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=600)
        self._headers = {"content-type": "application/json", "x-api-key": key}

    def ask(self, prompt: Sequence[int]) -> tuple[float, int]:
        """Seconds to the first token, and the tokens of the prompt that were in the cache."""
        body = json.dumps(
            {
                "prompt": prompt,
                "max_tokens": 1,
                "temperature": 0,
                "stream": True,
                "stream_options": {"include_usage": True},
            }
        )
        begun = time.perf_counter()
        self._connection.request("POST", "/v1/completions", body, self._headers)
        reply = self._connection.getresponse()
        first = reply.readline()
        passed = time.perf_counter() - begun
        rest = reply.read()
        assert reply.status == 200 and first.startswith(b"data: "), (reply.status, first)
        (usage,) = re.findall(rb'"usage":(\{.*\})\}', rest)
        return passed, int(json.loads(usage)["prompt_tokens_details"]["cached_tokens"])


def auc(slower: Sequence[float], faster: Sequence[float]) -> float:
    """How often one of `slower` is above one of `faster`; ties count half."""
    ranked = sorted([(value, True) for value in slower] + [(value, False) for value in faster])
    wins, below, i = 0.0, 0, 0
    while i < len(ranked):
        j = i
        while j < len(ranked) and ranked[j][0] == ranked[i][0]:
            j += 1
        here = sum(is_slower for _, is_slower in ranked[i:j])
        others = j - i - here
        wins += here * (below + others / 2)
        below += others
        i = j
    return wins / (len(slower) * len(faster))


def measure(port: int, options: argparse.Namespace) -> dict[str, Any]:
    """All trials."""
    source = random.Random(options.seed)
    ann, eve = Caller(port, ANN), Caller(port, EVE)

    def prompt() -> list[int]:
        return [source.randrange(FEWEST, options.vocabulary) for _ in range(options.tokens)]

    times: dict[bool, list[float]] = {True: [], False: []}
    cached = 0
    for trial in range(-options.warm, options.trials):
        secret, same = prompt(), source.random() < 0.5
        ann.ask(secret)
        passed, found = eve.ask(secret if same else prompt())
        if trial >= 0:
            times[same].append(passed)
            cached += found
    area = auc(times[False], times[True])
    shared = options.shared_prefix_cache
    return {
        "trials": options.trials,
        "tokens": options.tokens,
        "shared_prefix_cache": shared,
        "ttft_same_p50_ms": round(1000 * statistics.median(times[True]), 3),
        "ttft_other_p50_ms": round(1000 * statistics.median(times[False]), 3),
        "cached_tokens": cached,
        "auc": round(area, 4),
        "holds": area >= CERTAIN if shared else area <= options.most and not cached,
    }


def main() -> int:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--model", default="", help="A model's folder; the embedded one if empty.")
    parser.add_argument("--trials", type=int, default=2000)
    parser.add_argument("--tokens", type=int, default=500, help="Of each prompt.")
    parser.add_argument("--vocabulary", type=int, default=500, help="Ids are drawn below this.")
    parser.add_argument("--warm", type=int, default=20, help="Trials before, which do not count.")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--most", type=float, default=0.55, help="Largest AUC.")
    parser.add_argument("--shared-prefix-cache", action="store_true")
    parser.add_argument("--json", action="store_true", help="Print JSON.")
    options = parser.parse_args()
    arguments = [options.model] if options.model else []
    if options.shared_prefix_cache:
        arguments.append("--shared-prefix-cache")
    with serving(arguments) as port:
        found = measure(port, options)
    if options.json:
        print(json.dumps(found, indent=2))
    else:
        print(
            f"first token after {found['ttft_same_p50_ms']} ms (the same prompt) and "
            f"{found['ttft_other_p50_ms']} ms (another), {found['cached_tokens']} cached tokens, "
            f"AUC {found['auc']} in {found['trials']} trials: {found['holds']}"
        )
    return 0 if found["holds"] else 1


if __name__ == "__main__":
    sys.exit(main())
