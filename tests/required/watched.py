"""One server, watched in every way that vLLM guides describe, under a load that shows it all."""

from __future__ import annotations

import re
import threading
import time
from dataclasses import dataclass, field

import httpx
from prometheus_client.parser import text_string_to_metric_families

from live_server import Server, serving
from patience import PATIENCE, wait_for

ENV = {
    "VLLM_LOGGING_LEVEL": "DEBUG",
    "VLLM_LOG_STATS_INTERVAL": "1",
    "VLLM_LOG_BATCHSIZE_INTERVAL": "1",
    "VLLM_LOG_MODEL_INSPECTION": "true",
    "VLLM_USE_V1": "1",
}
FOREIGN = {
    "NCCL_DEBUG": "INFO",
    "NCCL_DEBUG_SUBSYS": "INIT,NET",
    "NCCL_BLOCKING_WAIT": "1",
    "TORCH_NCCL_BLOCKING_WAIT": "1",
    "NCCL_TIMEOUT": "600",
    "NCCL_IB_DISABLE": "1",
    "NCCL_SOCKET_IFNAME": "lo",
    "CUDA_LAUNCH_BLOCKING": "1",
    "PYTORCH_NO_CUDA_MEMORY_CACHING": "1",
    "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
}
"""Variables of NCCL and CUDA that vLLM guides tell their readers to set."""
FLAGS = (
    *("--no-disable-log-stats", "--enable-log-requests", "--enable-logging-iteration-details"),
    *("--num-gpu-blocks-override", "24", "--max-model-len", "256", "--max-num-seqs", "4"),
    *("--block-size", "16"),
)
PROMPT = "The capital of France is Paris. The capital of Italy is Rome. The capital of Spain is"
TOKENS = 100

Values = dict[tuple[str, frozenset[tuple[str, str]]], float]


@dataclass
class Watched:
    """What was seen."""

    log: str = ""
    text: str = ""
    """The last exposition."""
    peaks: Values = field(default_factory=dict)
    """Largest value of each sample while the load ran."""
    last: Values = field(default_factory=dict)
    statuses: dict[str, int] = field(default_factory=dict)
    doors: dict[str, int] = field(default_factory=dict)
    """Status of what one asks after the metrics, by path."""
    titles: list[str] = field(default_factory=list)
    """Command lines of the server's processes."""
    environment: dict[str, str] = field(default_factory=dict)
    """Variables of the engine's process."""
    completed: list[str] = field(default_factory=list)
    """Requests that ran to their end; one more was given up."""

    def value(self, name: str, peak: bool = False, **labels: str) -> float:
        """Sum of the samples of this name with at least these labels."""
        values = self.peaks if peak else self.last
        found = [v for (n, own), v in values.items() if n == name and labels.items() <= own]
        assert found, f"no sample {name} {labels}"
        return sum(found)

    def mean(self, name: str) -> float:
        """Mean observation of a histogram."""
        count = self.value(f"{name}_count")
        assert count > 0, f"{name} has no observation"
        return self.value(f"{name}_sum") / count


def read(text: str) -> Values:
    """Samples by name and labels."""
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def watch() -> Watched:
    """Start the server, load it, and return what was seen."""
    watched = Watched()
    with serving(*FLAGS, env=ENV | FOREIGN) as server:
        _run(server, watched)
        server.wait_idle()
        _wait_for_an_idle_line(server)
        with httpx.Client(base_url=server.url, timeout=PATIENCE) as client:
            watched.text = client.get("/metrics").text
            head = client.head("/metrics")
            _look_around(client, server, watched)
            watched.statuses = {"HEAD": head.status_code, "HEAD bytes": len(head.content)}
        watched.last = read(watched.text)
    watched.log = server.log
    return watched


def _run(server: Server, watched: Watched) -> None:
    """Six clients on four seats, with more than the KV cache holds, until everything has shown;
    then one request is given up."""
    body = {"model": "quire-demo", "prompt": PROMPT, "ignore_eos": True}
    enough = threading.Event()
    threads = [
        threading.Thread(
            target=_ask_again,
            args=(server.url, {**body, "max_tokens": TOKENS, "temperature": 1}, enough, watched),
        )
        for _ in range(6)
    ]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + PATIENCE
    while any(thread.is_alive() for thread in threads):
        _peak(server.url, watched)
        if _all_shown(watched, server.log) or time.monotonic() > deadline:
            enough.set()
        time.sleep(0.05)
    for thread in threads:
        thread.join()
    with (
        httpx.Client(timeout=PATIENCE) as client,
        client.stream(
            "POST",
            f"{server.url}/v1/completions",
            json={**body, "max_tokens": 200, "stream": True},
        ) as reply,
    ):
        next(reply.iter_lines())  # and then the client is gone


def _look_around(client: httpx.Client, server: Server, watched: Watched) -> None:
    """What else one can ask, and what the processes look like from outside."""
    known = client.get("/v1/requests/unknown/explain").json()["error"]["message"]
    name = re.search(r"there are: ([\w-]+)", known)
    assert name is not None, known
    for path in (f"/v1/requests/{name[1]}/explain", "/v1/timeline", "/v1/diagnosis"):
        watched.doors[path] = client.get(path).status_code
    watched.doors["/start_profile"] = client.post("/start_profile").status_code
    for process in server.family():
        title = " ".join(process.cmdline())
        watched.titles.append(title)
        if "EngineCore" in title:
            watched.environment = process.environ()


def _all_shown(watched: Watched, log: str) -> bool:
    """Whether the load has lasted for what the rows look for, however fast the machine is."""
    return (
        watched.value("vllm:num_requests_running", peak=True) >= 4
        and watched.value("vllm:num_requests_waiting", peak=True) >= 1
        and watched.value("vllm:kv_cache_usage_perc", peak=True) > 0.8
        and watched.value("vllm:num_preemptions_total", peak=True) >= 1
        and len(re.findall(r"INFO .*Engine 000: .*Running: [1-4] reqs", log)) >= 2
    )


def _wait_for_an_idle_line(server: Server) -> None:
    """The interval after the last busy one, which is shown, is the first at DEBUG."""
    wait_for(lambda: re.search(r"DEBUG .*Engine 000", server.log), lambda: server.log[-2000:])


def _ask_again(
    url: str, body: dict[str, object], enough: threading.Event, watched: Watched
) -> None:
    with httpx.Client(timeout=PATIENCE) as client:
        while True:
            reply = client.post(f"{url}/v1/completions", json=body)
            assert reply.status_code == 200, reply.text
            watched.completed.append(reply.json()["id"])
            if enough.is_set():
                return


def _peak(url: str, watched: Watched) -> None:
    for key, value in read(httpx.get(f"{url}/metrics", timeout=PATIENCE).text).items():
        watched.peaks[key] = max(value, watched.peaks.get(key, 0.0))
