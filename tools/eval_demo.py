"""Measure quire-demo on its held-out items and print, or write down, what is reached.

    python tools/eval_demo.py                 # through quire's own engine
    python tools/eval_demo.py --backend torch # through the plain decoder of the tools

Both backends get identical items, decoded greedily.  This module knows how an answer is
judged; it does not know how the items are made (demo_corpus) or the model trained.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from demo_card import update_card
from demo_chat import CALL, CALL_END, END, STOP, prompt_text
from demo_corpus import (
    eval_arithmetic,
    eval_capitals,
    eval_copies,
    eval_edits,
    eval_needles,
    eval_tools,
)

ASSETS = Path(__file__).resolve().parent.parent / "src" / "quire" / "assets"
Item = dict[str, Any]
Results = dict[str, dict[str, Any]]


class Backend(Protocol):
    """What the evaluation asks of an engine."""

    name: str

    def complete(self, prompts: list[str], max_tokens: int) -> list[str]: ...

    def chat(self, items: list[Item], max_tokens: int) -> list[str]: ...

    def count(self, text: str) -> int: ...


class _Tokens:
    """Counts tokens with the model's own tokenizer, the same for every backend."""

    def __init__(self, folder: Path) -> None:
        from tokenizers import Tokenizer

        path = folder / "tokenizer.json"
        if not path.is_file():
            raise FileNotFoundError(f"no {path}; make the model with tools/train_demo.py")
        self.tokenizer = Tokenizer.from_file(str(path))

    def count(self, text: str) -> int:
        return len(self.tokenizer.encode(text).ids)


class TorchBackend(_Tokens):
    """The plain decoder of the tools: slow, small, and independent of the engine."""

    name = "torch"

    def __init__(self, folder: Path, lora: Path | None = None) -> None:
        super().__init__(folder)
        from demo_lora import load_lora
        from demo_model import load_model

        self.model = load_model(folder)
        if lora:
            load_lora(self.model, lora / "adapter_model.safetensors")
        self.stops = {self.tokenizer.token_to_id(token) for token in (END, STOP)}

    def complete(self, prompts: list[str], max_tokens: int) -> list[str]:
        from demo_model import generate

        ids = [self.tokenizer.encode(prompt).ids for prompt in prompts]
        made = generate(self.model, ids, self.stops, max_tokens)
        return [self.tokenizer.decode(out) for out in made]

    def chat(self, items: list[Item], max_tokens: int) -> list[str]:
        prompts = [prompt_text(item["messages"], item.get("tools")) for item in items]
        return self.complete(prompts, max_tokens)


class QuireBackend(_Tokens):
    """quire's own engine, as a user would call it."""

    name = "quire"

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        try:
            from quire import LLM
        except ImportError as error:
            raise SystemExit(
                f"quire cannot be imported ({error}); install it with `pip install -e .`, "
                "or measure without it: --backend torch"
            ) from error
        # The default model is the embedded one; any other folder is named.
        self.llm = LLM() if folder == ASSETS / "quire-demo" else LLM(str(folder))

    def _params(self, max_tokens: int) -> Any:
        from quire import SamplingParams

        return SamplingParams(temperature=0, max_tokens=max_tokens)

    def complete(self, prompts: list[str], max_tokens: int) -> list[str]:
        outputs = self.llm.generate(prompts, self._params(max_tokens), use_tqdm=False)
        return [output.outputs[0].text for output in outputs]

    def chat(self, items: list[Item], max_tokens: int) -> list[str]:
        if not any(item.get("tools") for item in items):
            talks = [item["messages"] for item in items]
            outputs = self.llm.chat(talks, self._params(max_tokens), use_tqdm=False)
            return [output.outputs[0].text for output in outputs]
        # One chat call has one list of tools; rendering first lets all items run together.
        tokenizer = self.llm.get_tokenizer()
        prompts = [
            tokenizer.apply_chat_template(
                item["messages"], tools=item.get("tools"), add_generation_prompt=True
            )
            for item in items
        ]
        return self.complete(prompts, max_tokens)


def torch_backend(folder: Path) -> TorchBackend:
    return TorchBackend(folder)


# --- judging ----------------------------------------------------------------------------------


def parse_call(text: str) -> dict[str, Any] | None:
    """The one tool call of an answer, or None where it is not exactly one valid call."""
    match = re.fullmatch(rf"{re.escape(CALL)}\s*(.*?)\s*{re.escape(CALL_END)}", text.strip(), re.S)
    if not match:
        return None
    try:
        value = json.loads(match[1])
    except json.JSONDecodeError:
        return None
    valid = isinstance(value, dict) and isinstance(value.get("arguments"), dict)
    return value if valid and isinstance(value.get("name"), str) else None


def right_capital(text: str, expect: str) -> bool:
    """The sentence is closed with the capital, or the whole taught sentence is said."""
    said = text.strip()
    return said.startswith(f"{expect}.") or said.endswith(f" is {expect}.")


def right_number(text: str, expect: str) -> bool:
    """The first number of the text, or after its first equals sign, is the result."""
    found = re.search(r"-?\d+", text.split("=", 1)[-1])
    return bool(found) and found[0] == expect


def right_text(text: str, expect: str) -> bool:
    return text == expect


def right_call_form(text: str, expect: dict[str, Any]) -> bool:
    value = parse_call(text)
    return (
        value is not None
        and value["name"] == expect["name"]
        and set(value["arguments"]) == set(expect["arguments"])
    )


def right_call(text: str, expect: dict[str, Any]) -> bool:
    value = parse_call(text)
    return value is not None and value == expect


Judge = Callable[[str, Any], bool]


def item_groups(backend: Backend, count: int, seed: int) -> dict[str, tuple[list[Item], int]]:
    """All items by skill, with the number of tokens an answer may take."""
    rng = random.Random(f"evaluation/{seed}")
    capitals = eval_capitals()
    if count < 150:
        capitals = {name: rng.sample(items, count) for name, items in capitals.items()}
    groups = {name: (items, 32) for name, items in capitals.items()}
    groups |= {name: (items, 16) for name, items in eval_arithmetic(rng, count).items()}
    groups["tool call"] = (eval_tools(rng, count), 80)
    groups["copy of 40 tokens"] = (eval_copies(rng, count, backend.count), 60)
    groups["one word replaced"] = (eval_edits(rng, count), 60)
    if count >= 50:
        # A fifth of the count, and left out of quick checks: these prompts are the long ones.
        groups["code found in about 900 tokens"] = (eval_needles(rng, count // 5, 620), 24)
    return groups


def answer(backend: Backend, items: list[Item], max_tokens: int) -> list[str]:
    if "prompt" in items[0]:
        return backend.complete([item["prompt"] for item in items], max_tokens)
    return backend.chat(items, max_tokens)


def judges_of(name: str) -> dict[str, Judge]:
    """The rows a group of items makes; tool calls make two."""
    if name.startswith("capitals"):
        return {name: right_capital}
    if name.startswith(("addition", "subtraction")):
        return {name: right_number}
    if name == "tool call":
        return {"tool call, form": right_call_form, "tool call, arguments too": right_call}
    return {name: right_text}


def measure(
    backend: Backend, count: int = 200, seed: int = 0, show: int = 0, only: str = ""
) -> Results:
    """Accuracy by skill; `show` wrong answers of each are printed to stderr."""
    results: Results = {}
    for name, (items, max_tokens) in item_groups(backend, count, seed).items():
        if only not in name:
            continue
        texts = answer(backend, items, max_tokens)
        for row, judge in judges_of(name).items():
            verdicts = [judge(t, item["expect"]) for t, item in zip(texts, items, strict=True)]
            results[row] = {
                "correct": sum(verdicts),
                "items": len(items),
                "accuracy": sum(verdicts) / len(items),
            }
            wrong = [i for i, right in enumerate(verdicts) if not right]
            for index in wrong[:show]:
                asked = items[index].get("prompt") or items[index]["messages"][-1]["content"]
                print(
                    f"{row}: {asked[-300:]!r}\n  expected {items[index]['expect']!r}\n"
                    f"  answered {texts[index]!r}",
                    file=sys.stderr,
                )
    return results


def print_table(results: Results, backend: str, seconds: float) -> None:
    width = max(map(len, results))
    for name, value in results.items():
        print(
            f"{name:<{width}}  {value['correct']:>4} / {value['items']:<4} {value['accuracy']:7.1%}"
        )
    print(f"backend {backend}, {seconds:.0f} s")


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Measure quire-demo on held-out items.")
    parser.add_argument("--backend", choices=("quire", "torch"), default="quire")
    parser.add_argument("--model", type=Path, default=ASSETS / "quire-demo", help="model folder")
    parser.add_argument("--lora", type=Path, help="adapter folder (torch backend only)")
    parser.add_argument("--count", type=int, default=200, help="items per skill")
    parser.add_argument("--seed", type=int, default=0, help="which held-out items are drawn")
    parser.add_argument("--only", default="", help="only skills whose name holds this text")
    parser.add_argument("--show", type=int, default=0, help="wrong answers to show per skill")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--write-card", action="store_true", help="rewrite the card's table")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    args = parse(argv)
    folder = args.model.resolve()
    if args.backend == "torch":
        backend: Backend = TorchBackend(folder, args.lora)
    elif args.lora:
        raise SystemExit("--lora works with --backend torch only; add --backend torch")
    else:
        backend = QuireBackend(folder)
    started = time.perf_counter()
    results = measure(backend, args.count, args.seed, args.show, args.only)
    seconds = time.perf_counter() - started
    if args.json:
        print(json.dumps({"backend": backend.name, "seconds": seconds, "results": results}))
    else:
        print_table(results, backend.name, seconds)
    if args.write_card:
        update_card(folder / "README.md", results)


if __name__ == "__main__":
    main()
