"""A real Prometheus for tests, if this machine has one: `make test` tries to fetch it."""

from __future__ import annotations

import contextlib
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import yaml

from patience import PATIENCE, wait_for

_FETCHED = Path(sys.prefix) / "prometheus" / "usr" / "bin"


def _program(name: str) -> Path | None:
    fetched = _FETCHED / name
    found = str(fetched) if fetched.exists() else shutil.which(name)
    return Path(found) if found else None


PROMETHEUS, PROMTOOL = _program("prometheus"), _program("promtool")


class Prometheus:
    """A running one."""

    def __init__(self, url: str) -> None:
        self.url = url

    def query(self, expr: str) -> list[dict[str, Any]]:
        """The vector an expression gives now."""
        reply = httpx.get(f"{self.url}/api/v1/query", params={"query": expr}, timeout=PATIENCE)
        assert reply.status_code == 200, f"{expr}: {reply.text}"
        result: list[dict[str, Any]] = reply.json()["data"]["result"]
        return result

    def rules(self) -> list[dict[str, Any]]:
        """Alert rules with their health."""
        groups = httpx.get(f"{self.url}/api/v1/rules", timeout=PATIENCE).json()["data"]["groups"]
        return [rule for group in groups for rule in group["rules"]]

    def wait_for(self, expr: str) -> list[dict[str, Any]]:
        """The vector, once it is not empty."""
        found: list[dict[str, Any]] = wait_for(lambda: self.query(expr), expr)
        return found


@contextlib.contextmanager
def scraping(target: str, rules: Path, folder: Path) -> Iterator[Prometheus]:
    """Prometheus with a scrape a second of `target` (`host:port`)."""
    config = {
        "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
        "rule_files": [str(rules)],
        "scrape_configs": [{"job_name": "quire", "static_configs": [{"targets": [target]}]}],
    }
    path = folder / "prometheus.yml"
    path.write_text(yaml.safe_dump(config), "utf-8")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    log = folder / "prometheus.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [
                str(PROMETHEUS),
                f"--config.file={path}",
                f"--storage.tsdb.path={folder / 'data'}",
                f"--web.listen-address=127.0.0.1:{port}",
            ],
            stdout=output,
            stderr=output,
        )
    try:
        _wait_ready(process, f"http://127.0.0.1:{port}", log)
        yield Prometheus(f"http://127.0.0.1:{port}")
    finally:
        process.terminate()
        process.wait(PATIENCE)


def _wait_ready(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    def answers() -> bool:
        assert process.poll() is None, log.read_text()
        with contextlib.suppress(httpx.HTTPError):
            return httpx.get(f"{url}/-/ready", timeout=PATIENCE).status_code == 200
        return False

    wait_for(answers, lambda: f"Prometheus\n{log.read_text()}")
