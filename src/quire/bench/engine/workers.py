"""Engines in processes of their own: quire's, and those of peers, each with the settings that are
tried. Knows no figures."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from quire.bench.engine.options import FORMATS, PEERS, Case, own_options
from quire.errors import StartupError

SCRIPTS: Final = Path(__file__).resolve().parent / "peers"
LAST: Final = 600
"""Characters of what an engine that ended said last, told with the error."""
VLLM: Final = {"VLLM_CPU_KVCACHE_SPACE": "1"}
"""Of both settings of vLLM: its environment out of the box, but for the memory that it takes."""


class BenchedEngine:
    """An engine in a process: one line of JSON in, one out.

    Args:
        peer: Whose it is.
        form: Of `FORMATS`.
        setting: Which of the settings that are tried; empty if there is one.
        command: To start it.
        env: Variables beside this process' own.
        vocabulary: Ids of prompts are below this.
        verbose: Show what it logs.

    Raises:
        StartupError: it ended, or said something else than what it is.
    """

    def __init__(
        self,
        peer: str,
        form: str,
        setting: str,
        command: Sequence[str],
        env: Mapping[str, str],
        vocabulary: int,
        *,
        verbose: bool = False,
    ) -> None:
        self.peer, self.form, self.setting = peer, form, setting
        self._vocabulary = vocabulary
        self._log = None if verbose else tempfile.TemporaryFile("w+")  # noqa: SIM115 until `close`
        start = time.perf_counter()
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log,
            env={**os.environ, **env}, text=True,
        )  # fmt: skip
        self.about = self._read()
        self.ready_seconds = time.perf_counter() - start

    @property
    def name(self) -> str:
        """Its peer's, its format and its setting."""
        return f"{self.row} {self.setting}".rstrip()

    @property
    def row(self) -> str:
        """What figures go by: the best of its settings counts."""
        return f"{self.peer} {self.form}"

    def run(self, case: Case, seed: int) -> float:
        """Seconds that the engine took for a case, the mean of its repeats.

        Raises:
            StartupError: it ended.
        """
        total = sum(self.run_once(case, seed + 100 * i) for i in range(case.repeats))
        return total / case.repeats

    def run_once(self, case: Case, seed: int) -> float:
        """Seconds of one run.

        Raises:
            StartupError: it ended.
        """
        assert self._process.stdin is not None
        job = {
            "prompts": case.prompts, "in": case.inputs, "out": case.outputs, "seed": seed,
            "vocab": self._vocabulary,
        }  # fmt: skip
        with suppress(BrokenPipeError):  # then there is no answer either
            self._process.stdin.write(json.dumps(job) + "\n")
            self._process.stdin.flush()
        return float(self._read()["seconds"])

    def close(self) -> None:
        """End the process."""
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with suppress(BrokenPipeError):
                pipe.close()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._log is not None:
            self._log.close()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        try:
            return dict(json.loads(line))
        except (ValueError, TypeError):
            what = f"{self.name} said {line[:80]!r}" if line else f"{self.name} ended"
            words = self._last_words()
            self.close()
            raise StartupError(f"{what}{words}") from None

    def _last_words(self) -> str:
        if self._log is None:
            return ""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(1)
        self._log.seek(0)
        said = self._log.read().strip()[-LAST:]
        return f"; it said last: {said}" if said else ""


@dataclass(frozen=True)
class Contest:
    """What all engines are started for."""

    model: Path
    vocabulary: int
    context: int
    """Tokens of the longest sequence."""
    tokens: int
    """Of all sequences of the largest case together."""
    verbose: bool = False
    settings: str = "all"
    """See `EngineBenchOptions.settings`."""
    workers: list[BenchedEngine] = field(default_factory=list)

    def start(
        self, peer: str, form: str, setting: str, command: Sequence[str], env: Mapping[str, str]
    ) -> None:
        """One more worker, unless it is but one more setting and not asked for."""
        seen = any(worker.row == f"{peer} {form}" for worker in self.workers)
        if seen and self.settings == "first":
            return
        self.workers.append(
            BenchedEngine(peer, form, setting, command, env, self.vocabulary, verbose=self.verbose)
        )

    @property
    def pool(self) -> dict[str, int]:
        """An option of `LLM`: a pool of keys and values that just holds the largest case, so that
        the first run touches all of it. It counts blocks of 16 tokens; vLLM's may be larger.
        """
        return {"num_gpu_blocks_override": self.tokens // 16 * 9 // 8 + 64}

    def close(self) -> None:
        """End all."""
        for worker in self.workers:
            worker.close()


def start_own(contest: Contest, formats: Sequence[str]) -> None:
    """Start quire once for each format.

    Raises:
        StartupError: it does not start.
    """
    script = str(SCRIPTS / "llm_worker.py")
    ours = [sys.executable, script, "quire", str(contest.model), str(contest.context)]
    for form in formats:
        options = json.dumps(contest.pool | own_options(form))
        contest.start("quire", form, "", [*ours, options], {})


def start_peers(
    contest: Contest, peers: Mapping[str, str], formats: Sequence[str], folder: Path
) -> None:
    """Start each peer with each format and each of its settings. What did start is in
    `contest.workers`, also if another did not.

    Args:
        contest: What for.
        peers: Pythons, by name.
        formats: Of `FORMATS`.
        folder: Takes what a peer needs to have converted.

    Raises:
        StartupError: one does not start, or the model cannot be converted for it.
    """
    starters: dict[str, Any] = {"vllm": _vllm, "openvino": _openvino, "llama": _llama}
    for peer, python in peers.items():
        for form in formats:
            kind = getattr(FORMATS[form], peer)
            if kind is not None:
                starters[peer](contest, python, form, kind, folder)


def _vllm(contest: Contest, python: str, form: str, bits: int, folder: Path) -> None:
    """Out of the box, and with all cores and the OpenMP that its package brought."""
    model = contest.model
    if bits < 16:
        # It quantises none by itself on CPUs, but reads what others wrote.
        from quire.bench.engine.rounded_copy import write_rounded

        model = folder / f"compressed-{bits}"
        write_rounded(contest.model, model, bits)
    script = str(SCRIPTS / "llm_worker.py")
    options = json.dumps(contest.pool)
    command = [python, script, "vllm", str(model), str(contest.context), options]
    plain = {**VLLM, "PYTHONPATH": ""}
    cores = ",".join(map(str, sorted(os.sched_getaffinity(0))))
    tuned = {**plain, "VLLM_CPU_OMP_THREADS_BIND": cores}
    for library in sorted(Path(python).parent.parent.rglob("libiomp5.so"))[:1]:
        tuned["LD_PRELOAD"] = str(library)
    contest.start("vllm", form, "tuned", command, tuned)
    contest.start("vllm", form, "default", command, plain)


def _llama(contest: Contest, python: str, form: str, kind: str, folder: Path) -> None:
    """With keys and values of all sequences in one buffer, and with one of its own for each."""
    path = str(folder / f"{kind}.gguf")
    _convert("llama", [python, str(SCRIPTS / "to_gguf.py"), str(contest.model), path, kind])
    for setting in ("split", "unified"):
        command = [python, str(SCRIPTS / "llama_worker.py"), path, setting]
        contest.start("llama", form, setting, command, {"PYTHONPATH": ""})


def _openvino(contest: Contest, python: str, form: str, kind: str, folder: Path) -> None:
    """Computed in bf16; f32 was never faster."""
    path = str(folder / f"openvino-{kind}")
    export = [python, "-m", "optimum.commands.optimum_cli", "export", "openvino"]
    task = ["--task", "text-generation-with-past", "--weight-format", kind]
    _convert("openvino", [*export, "-m", str(contest.model), *task, path])
    command = [python, str(SCRIPTS / "openvino_worker.py"), path]
    contest.start("openvino", form, "", command, {"PYTHONPATH": ""})


def _convert(peer: str, command: Sequence[str]) -> None:
    env = {**os.environ, "PYTHONPATH": ""}
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    if done.returncode != 0:
        words = (done.stderr or done.stdout).strip()[-LAST:]
        raise StartupError(f"the model cannot be converted for {PEERS[peer]}: {words}")
