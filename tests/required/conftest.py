"""The watched server runs once for all rows."""

from __future__ import annotations

import pytest

from watched import Watched, watch


@pytest.fixture(scope="session")
def seen() -> Watched:
    return watch()
