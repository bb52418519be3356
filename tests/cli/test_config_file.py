"""One `--config` file for all commands: each reads its own keys, unknown ones are refused."""

from __future__ import annotations

import pytest

from quire.cli import chat, complete, inspect, profile, sampling_flags, serve
from quire.cli.target import Server, server_target
from quire.config.cli import engine_config
from quire.errors import ConfigError

SHARED = """
port: 9000
api-key: [first, second]
max-num-seqs: 3
temperature: 0.5
system-prompt: be brief
block_size: 32
"""


def test_one_file_serves_all_commands(tmp_path, monkeypatch):
    monkeypatch.delenv("QUIRE_API_KEY", raising=False)
    monkeypatch.delenv("QUIRE_ADMIN_API_KEY", raising=False)
    path = tmp_path / "quire.yaml"
    path.write_text(SHARED)
    served = serve.build_parser().parse(["--config", str(path)])
    assert (served.port, served.api_key, served.max_num_seqs) == (9000, ["first", "second"], 3)
    assert not hasattr(served, "temperature")
    for command in (chat, complete):
        here = command.build_parser().parse(["--config", str(path)])
        assert server_target(here) is None and not hasattr(here, "port")
        assert sampling_flags.given(here) == {"temperature": 0.5}
        assert engine_config(here).scheduler.max_num_seqs == 3
        there = command.build_parser().parse(["--config", str(path), "--url", "http://h"])
        assert server_target(there) == Server("http://h", "first", None)
        with pytest.raises(ConfigError, match="--block-size is for an engine"):
            server_target(command.build_parser().parse(["--url", "http://h", "--block-size", "16"]))


@pytest.mark.parametrize(
    ("line", "told"),
    [("prot: 1", "unknown key 'prot'; did you mean 'port'?"), ("zzzz: 1", "unknown key 'zzzz'$")],
)
def test_a_key_of_no_command_is_refused_by_all(tmp_path, line, told):
    path = tmp_path / "quire.yaml"
    path.write_text(SHARED + line)
    for command in (serve, chat, complete, inspect, profile):
        with pytest.raises(ConfigError, match=told):
            command.build_parser().parse(["--config", str(path)])
