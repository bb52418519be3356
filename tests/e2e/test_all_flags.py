"""A server that was given every flag of vLLM at its own default starts and answers."""

from __future__ import annotations

import json

import httpx

import drop_in
from live_server import Server
from patience import PATIENCE


def test_all_flags_of_vllm_at_their_defaults_together(tmp_path) -> None:
    left_out = ("--model", "--port")  # a model of the hub; a port of our own
    rows = {drop_in.long_name(row): row for row in drop_in.SURFACE["flags"] if "default" in row}
    given = {name: row for name, row in rows.items() if name not in left_out}
    assert len(given) == 191
    # One half on the command line, the other in a file.
    line = dict(list(given.items())[::2])
    file = {n[2:]: row["default"] for n, row in given.items() if n not in line}
    path = tmp_path / "flags.yaml"
    path.write_text(json.dumps(file), "utf-8")
    tokens = [token for row in line.values() for token in drop_in.tokens(row)]
    server = Server(*tokens, "--config", str(path))
    try:
        body = {"model": "quire-demo", "prompt": "Hello", "max_tokens": 2}
        reply = httpx.post(f"{server.url}/v1/completions", json=body, timeout=PATIENCE)
        assert reply.status_code == 200, reply.text
        assert server.log.count("without effect here: ") == 1
    finally:
        server.stop()
