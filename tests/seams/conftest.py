"""What tests of seams share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from distributions import Distributions


@pytest.fixture
def distributions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Distributions]:
    made = Distributions(tmp_path, monkeypatch)
    yield made
    made.remove()
