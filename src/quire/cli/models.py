"""`quire pull`, `ls`, `rm` and `verify`: the models on this machine."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import Any

from quire.checkpoint import hub_cache
from quire.cli.parser import Parser
from quire.config.model import EMBEDDED_FOLDER, FORMATS, ModelConfig
from quire.errors import ConfigError
from quire.utils.math import human_bytes


def _with_cache(parser: Parser) -> Parser:
    parser.add_argument(
        "--download-dir", metavar="FOLDER", default=None,
        help="The cache to use. Default: the hub's own (HF_HOME).",
    )  # fmt: skip
    return parser


def _with_model(parser: Parser) -> Parser:
    _add_model(parser, "Folder, or name on the hub (org/name).")
    parser.add_argument("--revision", metavar="TEXT", default=None, help="Branch, tag or commit.")
    return _with_cache(parser)


def _add_model(parser: Parser, text: str) -> None:
    # Optional for argparse only: a wrong flag is the better complaint when both are wrong.
    parser.add_argument("model", nargs="?", metavar="MODEL", default=None, help=text)


def _parsed(parser: Parser, arguments: Sequence[str]) -> Any:
    given = parser.parse(arguments)
    if given.model is None:
        raise ConfigError(f"which model? See {parser.prog} --help")
    return given


def pull_parser() -> Parser:
    """The parser of `quire pull`."""
    parser = _with_model(Parser("pull", "Download a model into the local cache."))
    parser.add_argument(
        "--load-format", choices=["auto", *FORMATS], default="auto",
        help="Which weights: auto (safetensors, else GGUF), safetensors, gguf, pt.",
    )  # fmt: skip
    return parser


def pull(arguments: Sequence[str]) -> int:
    """Download a model; prints its folder."""
    given = _parsed(pull_parser(), arguments)
    if not hub_cache.is_repo_id(given.model):
        from quire.checkpoint.short_names import EXAMPLES, family

        like = EXAMPLES.get(family(given.model), "org/name")
        raise ConfigError(f"a model on the hub has a name like {like}, got {given.model!r}")
    from quire.checkpoint.hub import fetch

    commit = fetch(given.model, given.revision, given.download_dir, given.load_format, _say)
    print(hub_cache.snapshot(given.model, commit, given.download_dir))
    return 0


def ls_parser() -> Parser:
    """The parser of `quire ls`."""
    parser = _with_cache(Parser("ls", "List the models on this machine: cached and embedded."))
    parser.add_argument("--json", action="store_true", default=False, help="As JSON.")
    return parser


def ls(arguments: Sequence[str]) -> int:
    """List models with size and revisions."""
    given = ls_parser().parse(arguments)
    rows = [*_embedded(), *_cached(given.download_dir)]
    if given.json:
        print(json.dumps(rows, indent=2))
        return 0
    width = max(len(row["name"]) for row in rows)
    for row in rows:
        print(f"{row['name']:<{width}}  {human_bytes(row['bytes']):>10}  {row['where']}")
    return 0


def _embedded() -> list[dict[str, Any]]:
    folders = sorted(p.parent for p in EMBEDDED_FOLDER.glob("*/config.json"))
    return [
        {
            "name": folder.name,
            "bytes": sum(p.stat().st_size for p in folder.iterdir() if p.is_file()),
            "where": "embedded",
            "folder": str(folder),
        }
        for folder in folders
    ]


def _cached(download_dir: str | None) -> list[dict[str, Any]]:
    return [
        {
            "name": model.name,
            "bytes": model.bytes,
            "where": ", ".join(model.revisions) or "no revision",
            "folder": str(model.folder),
        }
        for model in hub_cache.cached_models(download_dir)
    ]


def rm_parser() -> Parser:
    """The parser of `quire rm`."""
    parser = _with_cache(Parser("rm", "Delete a model from the local cache, all revisions."))
    _add_model(parser, "Name on the hub (org/name).")
    return parser


def rm(arguments: Sequence[str]) -> int:
    """Delete a cached model."""
    given = _parsed(rm_parser(), arguments)
    if given.model in {row["name"] for row in _embedded()}:
        raise ConfigError(f"{given.model} ships with quire, and is not in the cache: it stays")
    freed = hub_cache.remove(given.model, given.download_dir)
    print(f"deleted {given.model}: {human_bytes(freed)}")
    return 0


def verify_parser() -> Parser:
    """The parser of `quire verify`."""
    parser = _with_model(Parser("verify", "Check a model's files against their checksums."))
    parser.add_argument(
        "--write", action="store_true", default=False,
        help="Write SHA256SUMS beside the files instead, for later checks.",
    )  # fmt: skip
    return parser


def verify(arguments: Sequence[str]) -> int:
    """Check checksums, or write them."""
    from quire.checkpoint import manifest

    given = _parsed(verify_parser(), arguments)
    model = ModelConfig(
        model=given.model, revision=given.revision, download_dir=given.download_dir
    ).folder
    if not model.exists():
        raise ConfigError(f"there is no model folder {str(model)!r}")
    if given.write:
        print(f"wrote {manifest.write_manifest(model)}")
        return 0
    print(f"{manifest.verify(model)} files match their checksums")
    return 0


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
