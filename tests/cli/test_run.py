"""`quire run`: scripts written for vllm, unmodified, as python would run them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


@pytest.fixture
def script(tmp_path):
    def write(text: str, name: str = "script.py") -> Path:
        path = tmp_path / name
        path.write_text(text, "utf-8")
        return path

    return write


def quire_run(*arguments: object) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "quire", "run", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_the_script_sees_what_python_would_give_it(script, tmp_path):
    (tmp_path / "neighbour.py").write_text("word = 'next door'")
    path = script(
        "import sys, neighbour\n"
        "print(__name__, __file__, sys.argv, sys.path[0], neighbour.word)\n"
        "print(sys.modules['__main__'].__dict__ is globals())\n"
    )
    ours = quire_run(path, "--model", "x", "-v")
    pythons = subprocess.run(
        [sys.executable, path, "--model", "x", "-v"], capture_output=True, text=True, check=False
    )
    assert (ours.stdout, ours.stderr, ours.returncode) == (pythons.stdout, "", 0)


def test_vllm_is_quire(script):
    path = script(
        "import sys, vllm, vllm.entrypoints.llm, vllm.outputs\n"
        "import quire.outputs, quire.params\n"
        "from vllm import SamplingParams, RequestOutput\n"
        "from vllm.sampling_params import SamplingParams as S, RequestOutputKind\n"
        "from vllm.logger import init_logger\n"
        "assert S is SamplingParams is quire.params.SamplingParams is vllm.SamplingParams\n"
        "assert RequestOutput is quire.outputs.RequestOutput is vllm.outputs.RequestOutput\n"
        "from vllm import PoolingParams, EmbeddingRequestOutput as E\n"
        "from vllm.config import PoolerConfig\n"
        "assert PoolingParams is quire.params.PoolingParams\n"
        "assert E is quire.outputs.EmbeddingRequestOutput\n"
        "assert PoolerConfig(pooling_type='CLS') == {'pooling_type': 'CLS'}\n"
        "assert not hasattr(vllm, 'Nothing') and 'LLM' in vllm.__all__\n"
        "assert 'torch' not in sys.modules\n"
        "print(vllm.__version__, SamplingParams(temperature=0.5).temperature)\n"
    )
    result = quire_run(path)
    assert (result.stdout, result.stderr) == ("0.32.0 0.5\n", "")


def test_modules_that_quire_lacks_say_what_exists(script):
    result = quire_run(script("import vllm.multimodal.inputs\n"))
    assert result.returncode == 1
    assert "ModuleNotFoundError: quire has no module 'vllm.multimodal'" in result.stderr
    guarded = "try:\n    from vllm import LoRARequest\nexcept ImportError as e:\n    print('no')\n"
    assert quire_run(script(guarded)).stdout == "no\n"


@pytest.mark.parametrize(
    "text",
    [
        "def f():\n    raise ValueError('boom')\nf()\n",
        "import sys\nsys.exit(3)\n",
        "raise SystemExit('words')\n",
        "def broken(:\n",
        "import sys\nsys.excepthook = lambda *a: print('mine', a[0].__name__)\n1/0\n",
        "import threading\nthreading.Thread(target=lambda: print('late')).start()\n",
    ],
    ids=["exception", "exit code", "exit text", "syntax error", "hook", "thread"],
)
def test_ends_as_under_python(script, text):
    path = script(text)
    ours = quire_run(path)
    pythons = subprocess.run([sys.executable, path], capture_output=True, text=True, check=False)
    assert (ours.stdout, ours.stderr) == (pythons.stdout, pythons.stderr)
    assert ours.returncode == pythons.returncode


FAKE = (
    "import quire\n"
    "class LLM:\n"
    "    def __init__(self, model='quire-demo', **options):\n"
    "        from quire.config import EngineConfig, ModelShape\n"
    "        config = EngineConfig.from_options(model=model, **options)\n"
    "        ModelShape.from_folder(config.model.folder)\n"
    "        print(config.model.model, config.model.tokenizer, config.scheduler.max_num_seqs)\n"
    "quire.LLM = LLM\n"
)


@pytest.mark.parametrize("call", ["'facebook/opt-125m'", "model='facebook/opt-125m'", ""])
def test_another_model_than_the_script_names(script, call):
    rest = "import vllm\nfrom vllm.entrypoints.llm import LLM\n"
    rest += f"LLM({call + ', ' if call else ''}tokenizer='t', max_num_seqs=5)\n"
    path = script(FAKE + rest + "assert issubclass(vllm.LLM, quire.LLM)\n")
    result = quire_run("--model", "quire-demo", path)
    assert (result.stdout, result.stderr) == ("quire-demo None 5\n", "")
    assert quire_run("--model=quire-demo", path).stdout == "quire-demo None 5\n"


def test_a_name_that_is_no_folder_gets_a_remedy(script):
    path = script(FAKE + "from vllm import LLM\nLLM('facebook/opt-125m')\n")
    result = quire_run(path)
    assert result.returncode == 1
    *_, last_but_one, last = result.stderr.splitlines()
    assert "there is no model folder 'facebook/opt-125m': give a folder" in last_but_one
    assert last.endswith(f"quire run --model quire-demo {path}")


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ([], "no script"),
        (["/no/such.py"], "there is no script '/no/such.py'"),
        (["--modle", "x", "s.py"], "did you mean --model?"),
        (["--model"], "--model"),
    ],
)
def test_wrong_usage(arguments, told):
    result = quire_run(*arguments)
    assert result.returncode == 2 and told in result.stderr and result.stderr.count("\n") == 1
