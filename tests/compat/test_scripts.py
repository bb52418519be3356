"""Scripts of the kind that tutorials for vLLM show run under `quire run`, as they are."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPTS = sorted((Path(__file__).parent / "scripts").glob("*.py"))
ARGUMENTS = {"arguments": "--max_model_len 256 --max-tokens 5 --temperature 0 -tp 1 --top-k=3"}
DRIVER = """
import contextlib, io, json, sys
from quire.cli.run import main

todo, answer, told = json.loads(sys.argv[1]), sys.argv[2], {}
for name, arguments in todo.items():
    words = io.StringIO()
    with contextlib.redirect_stderr(words):
        try:
            code = main(["--model", "quire-demo", *arguments])
        except SystemExit as end:
            code = end.code
    told[name] = code, words.getvalue()
json.dump(told, open(answer, "w"))
"""


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    """Exit code and stderr of each script. One process runs all: importing torch takes seconds."""
    answer = tmp_path_factory.mktemp("scripts") / "told.json"
    todo = {p.stem: [str(p), *ARGUMENTS.get(p.stem, "").split()] for p in SCRIPTS}
    command = [sys.executable, "-c", DRIVER, json.dumps(todo), str(answer)]
    environment = {**os.environ, "QUIRE_LOGGING_LEVEL": "WARNING"}
    subprocess.run(command, check=True, env=environment, stdout=subprocess.DEVNULL)
    return json.loads(answer.read_text("utf-8"))


@pytest.mark.parametrize("name", [path.stem for path in SCRIPTS])
def test_it_runs(told, name):
    code, words = told[name]
    assert code == 0 and "Traceback" not in words, words
