"""What may import what, and what importing costs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import quire
from work import work_of

ROOT = Path(__file__).resolve().parents[2]
PUBLIC = [
    "AsyncLLM",
    "BeamSearchOutput",
    "BeamSearchParams",
    "ClassificationOutput",
    "ClassificationRequestOutput",
    "CompletionOutput",
    "EmbeddingOutput",
    "EmbeddingRequestOutput",
    "EngineConfig",
    "LLM",
    "Logprob",
    "PoolingOutput",
    "PoolingParams",
    "PoolingRequestOutput",
    "QuireError",
    "RequestOutput",
    "RequestOutputKind",
    "SamplingParams",
    "ScoringOutput",
    "ScoringRequestOutput",
    "StructuredOutputsParams",
    "__version__",
]
"""The public API. Changing it is a decision, so it is written down here as well."""


def python(code: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)


def test_import_contracts_hold():
    pytest.importorskip("importlinter")
    code = "from importlinter.cli import lint_imports; import sys; sys.exit(lint_imports())"
    result = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stdout + result.stderr


def test_public_api():
    assert quire.__all__ == PUBLIC
    assert set(PUBLIC) <= set(dir(quire))


@pytest.mark.parametrize("name", PUBLIC)
def test_public_names_resolve(name):
    assert getattr(quire, name) is not None


def test_unknown_names_are_attribute_errors():
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        _ = quire.Nothing


def test_importing_quire_is_little_work():
    """Function calls of the whole process: a third of this is what it takes, and the import of
    torch alone is a million. `benchmarks/startup.py` says how long that is."""
    assert work_of("import quire").calls < 12_000


@pytest.mark.parametrize(
    "statement",
    [
        "import quire",
        "from quire import SamplingParams, EngineConfig, RequestOutput",
        "from quire import AsyncLLM",
        "import quire.cli.main, quire.cli.serve, quire.cli.chat, quire.cli.run",
        "import quire.core.scheduler",
    ],
)
def test_torch_is_not_loaded(statement):
    result = python(f"{statement}\nimport sys\nassert 'torch' not in sys.modules")
    assert result.returncode == 0, result.stderr
