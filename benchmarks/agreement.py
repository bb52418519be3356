"""`quire bench serve` and `vllm bench serve` on the same server and load: every common figure.

First, both compute their figures of the same 400 random records, which must be equal. Then they
measure, in turns. Requests come at equal distances, because each has random numbers of its own. The
server (tests/bench/fake_server.py) streams tokens after gaps of 50 to 150 ms that are the same in
every run, request by request, so that what differs is the two measurements, and not the server from
run to run. With `--quire` it is quire's own, with its scheduler, and a model that takes 100 ms for
every step (api_server.py): when a request comes within a step is chance, so the first tokens differ
more from run to run.

`max_concurrent_requests` is compared by the definition of vLLM 0.32 (`by_the_second`), made of
quire's records: quire itself counts the requests in flight at one moment, as later versions do.

    python benchmarks/agreement.py --peer-vllm PYTHON [--rounds 3] [--quire]
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import random
import statistics
import subprocess
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from importlib.resources import files
from pathlib import Path
from typing import Any

TESTS = Path(__file__).resolve().parents[1] / "tests"
sys.path[:0] = [str(TESTS / "bench"), str(TESTS / "support")]
TOKENS, GAP, SPREAD = 16, 0.1, 0.5
"""Of each reply, the seconds between them, and by which share these are longer or shorter."""
Forget = Callable[[], object]
"""Call before each measurement, so that the server does the same again."""


def options(url: str, model: str) -> list[str]:
    return [
        *("bench", "serve", "--backend", "openai", "--base-url", url, "--model", model),
        *("--tokenizer", str(files("quire.assets") / "quire-demo"), "--dataset-name", "random"),
        *("--random-input-len", "24", "--random-output-len", str(TOKENS), "--num-prompts", "80"),
        *("--request-rate", "7.7", "--burstiness", "inf", "--ignore-eos"),
        *("--percentile-metrics", "ttft,tpot,itl,e2el"),
        *("--metric-percentiles", "50,99", "--disable-tqdm", "--save-result"),
        "--save-detailed",
    ]


@contextlib.contextmanager
def paced_quire() -> Iterator[tuple[str, Forget]]:
    """The URL of a server of quire's whose steps take as long as the gaps of the other one."""
    from api_server import STEP_MS, free_port

    port, script = free_port(), Path(__file__).with_name("api_server.py")
    env = os.environ | {STEP_MS: str(1000 * GAP), "QUIRE_LOGGING_LEVEL": "ERROR"}
    command = [sys.executable, str(script), "--serve", str(port)]
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE) as server:
        assert server.stdout is not None
        if not server.stdout.readline():
            raise SystemExit("the server did not start")
        try:
            yield f"http://127.0.0.1:{port}", lambda: None
        finally:
            server.terminate()
            server.communicate()


@contextlib.contextmanager
def fixed_times() -> Iterator[tuple[str, Forget]]:
    """The URL of a server without a scheduler."""
    from fake_server import fake

    with fake(tokens=TOKENS, gap=GAP, spread=SPREAD) as server:
        yield server.url, server.bodies.clear


def measured(
    command: list[str], url: str, model: str, environment: dict[str, str]
) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(
            [*command, *options(url, model), "--result-filename", "r.json"],
            cwd=folder, env=environment, check=True, capture_output=True,
        )  # fmt: skip
        return dict(json.loads((Path(folder) / "r.json").read_text()))


def by_the_second(records: list[Any]) -> int:
    """Most requests that were in flight at any time within the same second of the run."""
    done = [record for record in records if record.ok]
    first = min(record.start for record in done)
    seconds = Counter(
        second
        for record in done
        for second in range(
            int(record.start - first), int(record.start + record.latency - first) + 1
        )
    )
    return max(seconds.values())


def same_records(peer: str, environment: dict[str, str]) -> None:
    """Print in which figures of the same records the two differ."""
    from quire.bench.result import detailed, summary
    from test_result import random_record

    rng = random.Random(5)
    records = [random_record(rng) for _ in range(400)]
    slos = {"ttft": 800.0, "tpot": 60.0, "e2el": 2500.0}
    given = detailed(records) | {"duration": 33.0, "goodput": slos}
    done = subprocess.run(
        [peer, str(Path(__file__).with_name("agreement_peer.py"))], input=json.dumps(given),
        env=environment, text=True, capture_output=True, check=True,
    )  # fmt: skip
    line = next(line for line in done.stdout.splitlines() if line.startswith("figures "))
    theirs = json.loads(line.removeprefix("figures "))
    ours = summary(records, 33.0, percentiles=(50, 90, 99), goodput=slos)
    ours["max_concurrent_requests"] = by_the_second(records)
    common = [name for name in theirs if name in ours]
    far = {n: (theirs[n], ours[n]) for n in common if not math.isclose(theirs[n], ours[n])}
    print(f"{len(common) - len(far)} of {len(common)} figures of the same records are equal")
    for name, (peer_value, own_value) in far.items():
        print(f"  {name}: vllm {peer_value:g}, quire {own_value:g}")


def main() -> None:
    from quire.bench.result import records_of

    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--peer-vllm", required=True, help="Python of an environment with vLLM")
    parser.add_argument("--rounds", type=int, default=3, help="of measuring; 0: none")
    parser.add_argument("--quire", action="store_true", help="measure a server of quire's")
    args = parser.parse_args()
    theirs = [str(Path(args.peer_vllm).with_name("vllm"))]
    bare = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    same_records(args.peer_vllm, bare | {"HF_HUB_OFFLINE": "1"})
    values: dict[str, list[tuple[float, float]]] = defaultdict(list)
    if not args.rounds:
        return
    model = "quire-demo" if args.quire else "m"
    with paced_quire() if args.quire else fixed_times() as (url, forget):
        for _ in range(args.rounds):
            forget()
            peer = measured(theirs, url, model, bare | {"HF_HUB_OFFLINE": "1"})
            forget()
            own = measured([sys.executable, "-m", "quire"], url, model, dict(os.environ))
            own["max_concurrent_requests"] = by_the_second(records_of(own))
            for name in own:
                if isinstance(own[name], int | float) and isinstance(peer.get(name), int | float):
                    values[name].append((peer[name], own[name]))
    print(f"{'medians of rounds':<28}{'vllm':>12}{'quire':>12}{'ratio':>9}")
    for name, pairs in values.items():
        peer_value, own_value = (statistics.median(side) for side in zip(*pairs, strict=True))
        ratio = f"{own_value / peer_value:9.3f}" if 0 < peer_value < math.inf else ""
        print(f"{name:<28}{peer_value:>12.3f}{own_value:>12.3f}{ratio}")


if __name__ == "__main__":
    main()
