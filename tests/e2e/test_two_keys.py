"""What one key has sent, another finds in no cache, unless the keys share it. How long requests
take: `benchmarks/key_timing.py`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest

from live_server import Server, serving
from patience import PATIENCE
from quire.config.key_file import digest_of

PROMPT = [10 + i % 400 for i in range(500)]


def cached(server: Server, key: str, **more: Any) -> int:
    body = {"prompt": PROMPT, "max_tokens": 1, "temperature": 0, **more}
    headers = {"x-api-key": key}
    reply = httpx.post(f"{server.url}/v1/completions", json=body, headers=headers, timeout=PATIENCE)
    assert reply.status_code == 200, reply.text
    return int(reply.json()["usage"]["prompt_tokens_details"]["cached_tokens"])


@pytest.mark.parametrize("shared", [False, True])
def test_another_keys_prompt_is_computed_anew(tmp_path: Path, shared: bool) -> None:
    path = tmp_path / "keys"
    path.write_text("\n".join(f"{n}:{digest_of(n.encode()).hex()}:user" for n in ("ann", "eve")))
    path.chmod(0o600)
    options = ["--api-key-file", str(path), *(["--shared-prefix-cache"] if shared else [])]
    with serving(*options) as server:
        assert cached(server, "ann") == 0
        for guess in ("ann", "eve", "", "ann\0eve"):  # a salt of eve's choice does not help
            assert cached(server, "eve", cache_salt=f"x{guess}") == 0
        assert (cached(server, "eve") > 400) is shared
        assert cached(server, "ann") > 400, "its own"
