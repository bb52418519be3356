"""Options of vLLM scripts that ask for nothing special."""

from __future__ import annotations

import pytest

from quire.config import EngineConfig
from quire.errors import ConfigError


def test_neutral_values_change_nothing_and_others_are_refused() -> None:
    given = EngineConfig.from_options(tensor_parallel_size=1, trust_remote_code=False)
    assert given == EngineConfig()
    with pytest.raises(ConfigError, match="tensor_parallel_size can only be 1 .* got 4"):
        EngineConfig.from_options(tensor_parallel_size=4)


def test_an_unknown_option_gets_the_nearest_name() -> None:
    with pytest.raises(ConfigError, match="'max_num_seq'; did you mean 'max_num_seqs'"):
        EngineConfig.from_options(max_num_seq=4)
