"""What other keys notice of one key that offers ten times what it may: their time to first token.

One server, with a key file: `guest` has limits, `ann` has none. Streams of `ann` start at a fixed
rate, whether or not earlier ones have ended. In every second window a process of its own sends
requests of `guest` at ten times the rate that its limits allow; in the others, at just that rate,
so that the work which the engine does for `guest` is the same. Windows alternate (A B B A), so that
a machine which changes its speed changes both. Reported are the 50th and 99th percentiles of ann's
times to first token over all windows of a kind, their ratio, and how many of each key's requests
were refused.

    python benchmarks/key_limits.py [--model DIR] [--rate 4] [--times 10] [--json]

The exit code is 1 if the ratio of the 99th percentiles is above `--most` (1.2), if a request of ann
was refused, or if nothing was refused of guest's. Run it on an idle machine.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import hashlib
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import one_server

ANN, GUEST = "key-of-ann", "key-of-guest"
REQUEST: Final = {"max_tokens": 16, "temperature": 0, "stream": True, "ignore_eos": True}
WORDS: Final = "The quick brown fox jumps over the lazy dog. "


@contextlib.contextmanager
def serving(arguments: Sequence[str], options: argparse.Namespace) -> Iterator[int]:
    """The port of a `quire serve` with both keys."""
    per_minute = max(1, round(options.rate * 60))
    limits = f"requests_per_minute={per_minute},queue_share=0.5"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "keys")
        lines = [
            f"{name}:{hashlib.sha256(key.encode()).hexdigest()}:user:{told}\n"
            for name, key, told in (("ann", ANN, ""), ("guest", GUEST, limits))
        ]
        path.write_text("".join(lines))
        path.chmod(0o600)
        flags = [*arguments]
        flags += ["--api-key-file", str(path), "--max-num-queued-reqs", "64"]
        with one_server.serving(*flags) as port:
            yield port


async def ask(port: int, key: str, number: int) -> tuple[int, float]:
    """Status, and seconds to the first token, of one request."""
    prompt = f"{number}: " + WORDS * 8
    body = json.dumps(REQUEST | {"prompt": prompt}).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\nx-api-key: {key}\r\n"
        f"content-type: application/json\r\ncontent-length: {len(body)}\r\n"
        "connection: close\r\n\r\n"
    )
    begun = time.perf_counter()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(head.encode() + body)
        status = int((await reader.readuntil(b"\r\n\r\n")).split(b" ", 2)[1])
        if status == 200:
            await reader.readuntil(b"data: ")
        first = time.perf_counter() - begun
        await reader.read()
        return status, first
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


async def offer(port: int, key: str, rate: float, seconds: float) -> list[tuple[int, float]]:
    """Start requests at a rate, and wait for all."""
    loop = asyncio.get_running_loop()
    begun, tasks = loop.time(), []
    for number in range(max(1, round(rate * seconds))):
        await asyncio.sleep(max(0.0, begun + number / rate - loop.time()))
        tasks.append(asyncio.create_task(ask(port, key, number)))
    return list(await asyncio.gather(*tasks))


async def use_up(port: int) -> None:
    """A minute's requests may come at once: have guest do so, up to the first refusal."""
    number = 0
    while (await ask(port, GUEST, number))[0] == 200:
        number += 1


async def window(port: int, times: float, options: argparse.Namespace) -> dict[str, Any]:
    """One window, in which guest offers so many times what it may."""
    command = [sys.executable, __file__, "--offer", str(port), str(options.rate * times)]
    guest = await asyncio.create_subprocess_exec(
        *command, "--seconds", str(options.seconds), stdout=asyncio.subprocess.PIPE
    )
    mine = await offer(port, ANN, options.rate, options.seconds)
    told, _ = await guest.communicate()
    return {"ann": mine, "guest": json.loads(told)}


def percentile(values: Sequence[float], share: float) -> float:
    """In milliseconds."""
    return 1000 * statistics.quantiles(values, n=1000, method="inclusive")[round(1000 * share) - 1]


def report(windows: dict[str, list[dict[str, Any]]], most: float) -> dict[str, Any]:
    """The figures."""
    found: dict[str, Any] = {}
    for kind, some in windows.items():
        mine = [answer for one in some for answer in one["ann"]]
        guests = [status for one in some for status in one["guest"]]
        firsts = [first for status, first in mine if status == 200]
        found[kind] = {
            "ann": {
                "requests": len(mine),
                "refused": sum(status != 200 for status, _ in mine),
                "ttft_p50_ms": round(percentile(firsts, 0.5), 2),
                "ttft_p99_ms": round(percentile(firsts, 0.99), 2),
            },
            "guest": {"requests": len(guests), "refused": sum(s == 429 for s in guests)},
        }
    fair, greedy = found["fair"], found["greedy"]
    ratio = greedy["ann"]["ttft_p99_ms"] / fair["ann"]["ttft_p99_ms"]
    refused = fair["ann"]["refused"] + greedy["ann"]["refused"]
    holds = ratio <= most and not refused and greedy["guest"]["refused"] > 0
    return {**found, "p99_ratio": round(ratio, 3), "holds": holds}


async def measure(port: int, options: argparse.Namespace) -> dict[str, Any]:
    """All windows."""
    await offer(port, ANN, options.rate, 2)
    await asyncio.gather(*(use_up(port) for _ in range(8)))
    windows: dict[str, list[dict[str, Any]]] = {"fair": [], "greedy": []}
    for turn in range(options.pairs):
        kinds = ("fair", "greedy") if turn % 2 == 0 else ("greedy", "fair")
        for kind in kinds:
            times = options.times if kind == "greedy" else 1.0
            windows[kind].append(await window(port, times, options))
    return report(windows, options.most)


def main() -> int:
    """Measure, or be the other process."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--model", default="", help="A model's folder; the embedded one if empty.")
    parser.add_argument(
        "--rate", type=float, default=4.0, help="Requests a second of ann; guest's limit."
    )
    parser.add_argument("--times", type=float, default=10.0, help="How much too much guest offers.")
    parser.add_argument("--seconds", type=float, default=20.0, help="Of one window.")
    parser.add_argument("--pairs", type=int, default=4, help="Windows of each kind.")
    parser.add_argument("--most", type=float, default=1.2, help="Largest ratio of the p99.")
    parser.add_argument("--json", action="store_true", help="Print JSON.")
    parser.add_argument("--offer", nargs=2, metavar=("PORT", "RATE"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.offer:
        port, rate = int(options.offer[0]), float(options.offer[1])
        answers = asyncio.run(offer(port, GUEST, rate, options.seconds))
        print(json.dumps([status for status, _ in answers]))
        return 0
    arguments = [options.model] if options.model else []
    with serving(arguments, options) as port:
        found = asyncio.run(measure(port, options))
    if options.json:
        print(json.dumps(found, indent=2))
    else:
        for kind in ("fair", "greedy"):
            ann, guest = found[kind]["ann"], found[kind]["guest"]
            print(
                f"{kind:<7} ann: {ann['requests']} requests, {ann['refused']} refused, first token "
                f"p50 {ann['ttft_p50_ms']} ms, p99 {ann['ttft_p99_ms']} ms; guest: "
                f"{guest['requests']} requests, {guest['refused']} refused"
            )
        print(f"p99 {found['p99_ratio']} times (at most {options.most}): {found['holds']}")
    return 0 if found["holds"] else 1


if __name__ == "__main__":
    sys.exit(main())
