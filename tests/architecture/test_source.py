"""Rules that hold for every source file, checked on its syntax tree."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "src" / "quire"
FILES = sorted(SOURCE.rglob("*.py"))
WALL_CLOCK = {
    "bench/saved.py",  # when a result was made
    "cli/api_keys.py",  # when keys of a file end
    "engine/frontend/disk/disk_journal.py",  # for how long after a restart a reply is kept
    "engine/frontend/request_tracing.py",  # wall time of spans
    "observability/metrics/tensorboard.py",  # wall time of points
    "serving/server_state.py",  # `created` of models
    "serving/exchange.py",  # `created` of replies
    "serving/responses/response_reply.py",  # when a response was complete
    "tokenizer/chat_template.py",  # strftime_now() in templates
}
"""Files that may read the wall clock: only to print it."""
FORBIDDEN_MODULES = {"pickle", "cloudpickle", "dill", "marshal", "shelve"}
FORBIDDEN_CALLS = {"eval", "exec", "torch.load", "os.system", "os.popen", "yaml.load"}
WALL_CALLS = {"time.time", "time.time_ns", "datetime.now", "datetime.datetime.now"}
MACHINE_PATH = re.compile(r"(^|[\s'\"=:])/(home|root|work|Users|mnt|tmp)/\w")


def names_of_imports(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
        yield from (f"{node.module}.{alias.name}" for alias in node.names)


def findings(tree: ast.Module, *, wall_clock: bool = False) -> Iterator[str]:
    """What breaks a rule, as `line: what`."""
    if ast.get_docstring(tree) is None:
        yield "1: no docstring"
    for node in ast.walk(tree):
        for name in names_of_imports(node):
            if name.partition(".")[0] in FORBIDDEN_MODULES:
                yield f"{node.lineno}: imports {name}"
            if name in WALL_CALLS and not wall_clock:
                yield f"{node.lineno}: imports {name}"
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            if called == "torch.load" and any(
                word.arg == "weights_only" and _is_true(word.value) for word in node.keywords
            ):
                continue  # builds tensors and plain containers, runs nothing
            if called in FORBIDDEN_CALLS or (called in WALL_CALLS and not wall_clock):
                yield f"{node.lineno}: calls {called}"
            if any(word.arg == "shell" and _is_true(word.value) for word in node.keywords):
                yield f"{node.lineno}: runs a shell"
        text = node.value if isinstance(node, ast.Constant) else None
        if isinstance(text, str) and MACHINE_PATH.search(text):
            yield f"{node.lineno}: a path of one machine: {text[:60]!r}"


def _is_true(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is True


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_every_file_keeps_the_rules(path):
    text = path.read_text("utf-8")
    relative = path.relative_to(SOURCE).as_posix()
    assert not list(findings(ast.parse(text), wall_clock=relative in WALL_CLOCK))


def test_the_list_of_exceptions_is_current():
    for name in WALL_CLOCK:
        assert any(call in (SOURCE / name).read_text("utf-8") for call in WALL_CALLS), name


@pytest.mark.parametrize(
    "code",
    [
        "import pickle",
        "from pickle import loads",
        "import os, cloudpickle.x",
        "eval('1')",
        "exec('1')",
        "torch.load('x')",
        "torch.load('x', weights_only=False)",
        "time.time()",
        "from time import time",
        "subprocess.run('ls', shell=True)",
        "x = '/home/someone/model'",
        "x = 'see /tmp/file'",
    ],
)
def test_the_rules_can_be_broken(code):
    assert len(list(findings(ast.parse(f'"""Doc."""\n{code}')))) == 1
    assert len(list(findings(ast.parse(code)))) == 2  # and no docstring


@pytest.mark.parametrize(
    "code",
    [
        "torch.load('x', weights_only=True)",
        "model.eval()",
        "time.monotonic()",
        "x = '/v1/models'",
        "x = '/proc/self/stat'",
        "f(shell=False)",
    ],
)
def test_harmless_code_passes(code):
    assert not list(findings(ast.parse(f'"""Doc."""\n{code}')))
