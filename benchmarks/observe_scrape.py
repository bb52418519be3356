"""What scraping costs: throughput of a server with and without ten scrapes of /metrics a second.

Eight clients that stream keep a server with the embedded model busy. Windows with and without a
scraper alternate, so that a machine that slows down slows both; the figure is the median of the
changes from each window without to its neighbour with. It needs a quiet machine: believe it only
if the middle half is narrow.

    python benchmarks/observe_scrape.py [--pairs 8] [--seconds 4]
"""

from __future__ import annotations

import argparse
import http.client
import json
import re
import signal
import statistics
import subprocess
import sys
import threading
import time

CLIENTS, SCRAPES_PER_SECOND = 8, 10.0
BODY = json.dumps(
    {
        "model": "quire-demo",
        "prompt": "Tell me a story.",
        "max_tokens": 256,
        "ignore_eos": True,
        "stream": True,
    }
)


class Load:
    """Clients that send one request after the other, and count tokens."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.tokens = 0
        self.stop = threading.Event()
        self.scrape = threading.Event()
        self.scrapes = 0
        self._lock = threading.Lock()
        jobs = [self._client] * CLIENTS + [self._scraper]
        self._threads = [threading.Thread(target=job) for job in jobs]
        for thread in self._threads:
            thread.start()

    def _client(self) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        while not self.stop.is_set():
            headers = {"Content-Type": "application/json"}
            connection.request("POST", "/v1/completions", BODY, headers)
            for line in connection.getresponse():
                if line.startswith(b"data: {"):
                    with self._lock:
                        self.tokens += 1

    def _scraper(self) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        while not self.stop.is_set():
            if not self.scrape.wait(0.1):
                continue
            started = time.monotonic()
            connection.request("GET", "/metrics")
            assert b"vllm:generation_tokens_total" in connection.getresponse().read()
            self.scrapes += 1
            time.sleep(max(0.0, 1 / SCRAPES_PER_SECOND - (time.monotonic() - started)))

    def window(self, seconds: float, scrape: bool) -> float:
        """Tokens per second."""
        (self.scrape.set if scrape else self.scrape.clear)()
        before, started = self.tokens, time.monotonic()
        time.sleep(seconds)
        return (self.tokens - before) / (time.monotonic() - started)

    def end(self) -> None:
        """Let all threads finish."""
        self.stop.set()
        for thread in self._threads:
            thread.join()


def measure(port: int, pairs: int, seconds: float) -> None:
    load = Load(port)
    try:
        load.window(seconds, scrape=False)  # warm-up
        rows = []
        for number in range(pairs):
            order = (False, True) if number % 2 == 0 else (True, False)
            rates = {scrape: load.window(seconds, scrape) for scrape in order}
            rows.append((rates[False], rates[True]))
            print(f"without {rates[False]:8.1f} tokens/s   with {rates[True]:8.1f} tokens/s")
    finally:
        load.end()
    changes = [with_ / without - 1 for without, with_ in rows]
    spread = statistics.quantiles(changes, n=4) if pairs > 1 else [changes[0]] * 3
    print(f"{load.scrapes / (pairs * seconds):.1f} scrapes a second while scraping")
    print(
        f"throughput with scrapes: {100 * statistics.median(changes):+.2f} % "
        f"(middle half {100 * spread[0]:+.2f} to {100 * spread[2]:+.2f} %)"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=4.0)
    options = parser.parse_args()
    command = [sys.executable, "-m", "quire", "serve", "--port", "0"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        assert server.stdout is not None
        line = next(line for line in server.stdout if "quire is ready at" in line)
        found = re.search(r":(\d+)", line.partition("//")[2])
        assert found is not None, line
        measure(int(found.group(1)), options.pairs, options.seconds)
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait(20)
    return 0


if __name__ == "__main__":
    sys.exit(main())
