"""A server looks for garbage by the clock (`quire.utils.collector`), not when Python would."""

from __future__ import annotations

import re

import httpx

from live_server import Server
from patience import wait_for


def test_a_third_of_the_looks_go_further_than_what_is_new(server: Server) -> None:
    def looks() -> list[int]:
        text = httpx.get(f"{server.url}/metrics").text
        found = re.findall(r'python_gc_collections_total\{generation="[01]"\} (\S+)', text)
        return [int(float(number)) for number in found]

    before = looks()
    after = wait_for(lambda: now if (now := looks())[1] >= before[1] + 10 else None)
    new, middle = (b - a for a, b in zip(before, after, strict=True))
    assert new < 5 * middle, "in Python's own way it is a tenth"
