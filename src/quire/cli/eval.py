"""`quire eval MODEL --text FILE`: perplexity, and how far the model is from another."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
from collections.abc import Sequence
from typing import Any, Final

from quire.cli.parser import Parser
from quire.cli.target import quiet_logs
from quire.config import CacheConfig, EngineConfig, ModelConfig
from quire.config.cli import add_engine_flags, engine_config
from quire.errors import ConfigError
from quire.utils.math import human_bytes

WINDOW: Final = 512
EPILOG: Final = (
    "Example: quire eval MODEL --quantization int4 --reference MODEL --text book.txt. The engine's "
    "flags are those of `quire serve` and hold for MODEL; the reference runs as its files are."
)


def build_parser() -> Parser:
    """The parser of this command."""
    parser = Parser(
        "eval", "Perplexity of a model on a text, and its distance from a reference.", epilog=EPILOG
    )
    group = parser.add_argument_group("Evaluation", "What is scored.")
    group.add_argument(
        "--text", metavar="FILE", default=None, help="UTF-8 text to score; - reads stdin."
    )
    group.add_argument(
        "--reference", metavar="MODEL", default=None,
        help="Compare each position with this model: KLD and the share of the same likeliest "
        "token. May be the same MODEL, which then runs unquantised. Both are in memory at once.",
    )  # fmt: skip
    group.add_argument(
        "--window", metavar="N", type=int, default=None,
        help=f"Tokens of a window; each is computed on its own, its first token is given. Default: "
        f"{WINDOW}, or less if the model's context is shorter.",
    )  # fmt: skip
    group.add_argument(
        "--max-windows", metavar="N", type=int, default=None,
        help="Windows to score, from the beginning. Default: the whole text.",
    )  # fmt: skip
    group.add_argument("--json", action="store_true", default=False, help="Print JSON.")
    parser.add_config_flag()
    add_engine_flags(parser)
    return parser


def main(arguments: Sequence[str]) -> int:
    """Score; returns the exit code."""
    namespace = build_parser().parse(arguments)
    if namespace.text is None:
        raise ConfigError("a text is needed: --text FILE, or - for stdin")
    for name in ("window", "max_windows"):
        value, least = getattr(namespace, name), 2 if name == "window" else 1
        if value is not None and value < least:
            flag = "--" + name.replace("_", "-")
            raise ConfigError(f"{flag} must be at least {least}, got {value}")
    quiet_logs()
    report = evaluate(engine_config(namespace), namespace)
    print(json.dumps(report, indent=2) if namespace.json else as_text(report))
    return 0


def evaluate(config: EngineConfig, how: argparse.Namespace) -> dict[str, Any]:
    """The report as plain data.

    Args:
        config: Of the model that is scored.
        how: `text`, `reference`, `window`, `max_windows` as the flags.

    Raises:
        StartupError: a model cannot be loaded, the text cannot be read or is too short.
    """
    from contextlib import ExitStack

    from quire.config.locate import located
    from quire.evaluation.compare import compare
    from quire.evaluation.scored_model import ScoredModel
    from quire.evaluation.windows import cut, read_text

    text, started = read_text(how.text), time.monotonic()
    config = located(config)
    length = _window(config, how.window)
    with ExitStack() as stack:
        model = stack.enter_context(ScoredModel(config, length))
        windows = cut(model.tokenizer, text, length, how.max_windows)
        reference = None
        if how.reference is not None:
            reference = stack.enter_context(ScoredModel(_reference(config, how.reference), length))
            _check_same_tokens(model.tokenizer, reference.tokenizer, text)
        passes = None if reference is None else reference.passes
        scores = compare(windows, model.passes, passes, Told())
        return {
            "model": config.model.model,
            "reference": how.reference,
            "window": length,
            "windows": len(windows.ids),
            **scores.to_dict(),
            "weight_bytes": model.weight_bytes,
            "layers": {name: form._asdict() for name, form in model.forms.items()},
            "seconds": round(time.monotonic() - started, 3),
        }


def _window(config: EngineConfig, wanted: int | None) -> int:
    """Tokens of a window.

    Raises:
        ConfigError: more than the model takes.
    """
    limit = config.model.read_shape().length_limit
    if wanted is None:
        return min(WINDOW, config.model.max_model_len or limit, limit)
    if wanted > limit:
        raise ConfigError(f"--window {wanted} is more than the {limit} positions of the model")
    return wanted


def _reference(config: EngineConfig, name: str) -> EngineConfig:
    """As its files are: no option that changes numbers is taken over but the device."""
    from quire.config.locate import located

    model = ModelConfig(model=name, device=config.model.device)
    return located(dataclasses.replace(config, model=model, cache=CacheConfig()))


def _check_same_tokens(one: Any, other: Any, text: str) -> None:
    sample = text[:100_000]
    if one.encode(sample) != other.encode(sample):
        raise ConfigError(
            "model and reference cut the text into different tokens, so their probabilities "
            "cannot be compared: take a reference with the same tokenizer"
        )


class Told:
    """Progress on stderr: a line that is rewritten on a terminal, else one for every tenth."""

    def __init__(self, what: str = "windows") -> None:
        self._what = what
        self._last = -1

    def __call__(self, done: int, total: int) -> None:
        """So many of so many."""
        tenth = 10 * done // max(1, total)
        if sys.stderr.isatty():
            end = "\n" if done == total else ""
            print(f"\r{done}/{total} {self._what}", end=end, file=sys.stderr, flush=True)
        elif tenth != self._last:
            print(f"{done}/{total} {self._what}", file=sys.stderr, flush=True)
        self._last = tenth


def as_text(report: dict[str, Any]) -> str:
    """The report for a reader."""
    lines = [
        ("model", report["model"]),
        ("reference", report["reference"]),
        ("scored", f"{report['positions']:,} tokens in {report['windows']} windows of "
         f"{report['window']}"),
        ("perplexity", f"{report['perplexity']:.4f}"),
    ]  # fmt: skip
    if report["reference"] is not None:
        lines += [
            ("  of reference", f"{report['reference_perplexity']:.4f}"),
            ("KLD", f"{report['kld']:.6f} nats in the mean, {report['kld_p99']:.6f} at 99 %, "
             f"{report['kld_max']:.6f} at most"),
            ("same top token", f"{100 * report['same_top']:.2f} %"),
        ]  # fmt: skip
    kept = [f"{form['layers']} layers {name}" for name, form in report["layers"].items()]
    lines.append(("weights", f"{human_bytes(report['weight_bytes'])}: {', '.join(kept)}"))
    lines.append(("took", f"{report['seconds']:.1f} s"))
    return "\n".join(f"{name:<16}{text}" for name, text in lines if text is not None)
