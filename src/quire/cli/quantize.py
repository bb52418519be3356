"""`quire quantize MODEL OUT`: writes a quantised copy of a model, chosen by measurement."""

from __future__ import annotations

import argparse
import json
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from quire.bounds import read_integer
from quire.cli.eval import Told
from quire.cli.parser import Parser
from quire.cli.target import quiet_logs
from quire.config.online_schemes import GROUPS
from quire.errors import ConfigError
from quire.spelling import did_you_mean
from quire.utils.process import when_told_to_end

SCHEMES: Final = ("int8", "int4", "mixed")
HEADS: Final = ("int8", "shared", "keep")
_NEAREST: Final = {
    "fp8": "int8", "int2": "int4", "int3": "int4", "int5": "int8", "int6": "int8", "nf4": "int4",
    "awq": "int4", "gptq": "int4", "w4a16": "int4", "w8a8": "int8", "q4_0": "int4", "q8_0": "int8",
}  # fmt: skip
BUDGET: Final = 0.02
EPILOG: Final = (
    "Example: quire quantize ./my-model ./my-model-q --budget-kld 0.02 --calibration prompts.txt. "
    "OUT is a checkpoint in compressed-tensors' format, with a report in it."
)


def build_parser() -> Parser:
    """The parser of this command."""
    parser = Parser(
        "quantize", "Write a quantised copy of a model, chosen by measurement.", epilog=EPILOG
    )
    parser.add_argument(
        "model", metavar="MODEL", nargs="?", default=None, help="Folder, hub name, or quire-demo."
    )
    parser.add_argument(
        "out", metavar="OUT", nargs="?", default=None, help="Folder to write; it must not exist."
    )
    parser.add_argument(
        "--scheme", metavar="NAME", default="mixed",
        help="int8, int4, or mixed: for each layer what measurement says, or neither. Default: "
        "mixed.",
    )  # fmt: skip
    parser.add_argument(
        "--budget-kld", metavar="NATS", type=float, default=None,
        help="Mean divergence from the model, at most, on the part of the text that choices are "
        "made with; the report has that on the part held out, too, which may be above it. "
        f"Default: {BUDGET} with mixed and no --memory; else any.",
    )  # fmt: skip
    parser.add_argument(
        "--memory", metavar="BYTES", default=None,
        help="Bytes of all weights, at most (600M, 4G).",
    )  # fmt: skip
    parser.add_argument(
        "--calibration", metavar="FILE", default=None,
        help="UTF-8 text like what the model will see; - reads stdin. Default: what the model "
        "writes itself.",
    )  # fmt: skip
    parser.add_argument(
        "--calibration-tokens", metavar="N", type=int, default=6144,
        help="Tokens of it, at most: a third is for GPTQ, one for choices, one for the verdict. "
        "Default: 6144.",
    )  # fmt: skip
    parser.add_argument(
        "--group-size", metavar="N", type=int, default=128,
        help="Inputs that one scale of int4 has: 32, 64 or 128, less where a layer needs it. "
        "Default: 128.",
    )  # fmt: skip
    parser.add_argument(
        "--head", metavar="HOW", default="int8",
        help="int8; keep: as it is; shared: with the embedding that it is, as one tensor of int8, "
        "the fewest bytes, which quire reads, and transformers only with --scheme int8 and "
        "dequantize=True. With int8 such a head is written apart, and the embedding stays. "
        "Default: int8.",
    )  # fmt: skip
    parser.add_argument("--revision", metavar="TEXT", default=None, help="Of a model on the hub.")
    parser.add_argument("--json", action="store_true", default=False, help="Print the report.")
    return parser


def main(arguments: Sequence[str]) -> int:
    """Quantise; returns the exit code."""
    given = build_parser().parse(arguments)
    _check(given)
    budget = given.budget_kld
    memory = None if given.memory is None else _bytes(str(given.memory))
    if budget is None and memory is None and given.scheme == "mixed":
        budget = BUDGET
    quiet_logs()
    from quire.compress.command import QuantizeOptions, located_model, quantize
    from quire.compress.report import as_text
    from quire.evaluation.windows import read_text

    text = None if given.calibration is None else read_text(given.calibration)
    options = QuantizeOptions(
        Path(given.out), given.scheme, budget, memory, text, given.calibration_tokens,
        given.group_size, given.head,
    )  # fmt: skip
    model = located_model(given.model, {"revision": given.revision})
    with when_told_to_end(_unwind):
        report = quantize(model, options, _Phases())
    print(json.dumps(report, indent=2) if given.json else as_text(report))
    return 0


def _unwind(number: int, _frame: object) -> None:
    """End with 128 and the signal's number, by way of what deletes files."""
    # A second one would end the deleting, half done.
    signal.signal(number, signal.SIG_IGN)
    sys.exit(128 + number)


def _check(given: argparse.Namespace) -> None:
    if given.model is None or given.out is None:
        raise ConfigError("a model and a new folder are needed: quire quantize MODEL OUT")
    if given.scheme not in SCHEMES:
        near = did_you_mean(given.scheme, SCHEMES)
        if given.scheme in _NEAREST:
            near = f"; nearest: {_NEAREST[given.scheme]}"
        raise ConfigError(f"--scheme must be {', '.join(SCHEMES)}, got {given.scheme!r:.60}{near}")
    if given.head not in HEADS:
        near = did_you_mean(given.head, HEADS)
        raise ConfigError(f"--head must be {', '.join(HEADS)}, got {given.head!r:.60}{near}")
    if given.group_size not in GROUPS:
        size = min(GROUPS, key=lambda known: abs(known - given.group_size))
        raise ConfigError(
            f"--group-size must be {', '.join(map(str, GROUPS))}, got {given.group_size}; "
            f"nearest: {size}"
        )
    budget = given.budget_kld
    if budget is not None and not 0 <= budget < float("inf"):
        raise ConfigError(f"--budget-kld must be 0 or more, got {budget}")
    if given.calibration_tokens < 1:
        raise ConfigError(f"--calibration-tokens must be 1 or more, got {given.calibration_tokens}")


def _bytes(text: str) -> int:
    try:
        found: int = read_integer(text)
    except ValueError:
        raise ConfigError(f"--memory must be bytes (600M, 4G), got {text!r:.40}") from None
    if found < 1:
        raise ConfigError(f"--memory must be at least 1, got {text!r:.40}")
    return found


class _Phases:
    """Progress of each phase on stderr."""

    def __init__(self) -> None:
        self._phase = ""
        self._told = Told()

    def __call__(self, phase: str, done: int, total: int) -> None:
        """So much of a phase is done."""
        if phase != self._phase:
            self._phase, self._told = phase, Told("")
            print(f"{phase} …", file=sys.stderr, flush=True)
        if total < 1 << 20:  # not bytes
            self._told(done, total)
