"""What structured outputs cost.

    python benchmarks/structured_outputs.py mask
    python benchmarks/structured_outputs.py rate [--model DIR] [--batch 1,8,32,64] [--pairs 5]

`mask`: what a grammar adds for each token and row with a vocabulary of 151,936: to follow the
output, to make the mask, and to apply it, in microseconds of CPU time. To apply it is what the pick
of a random token takes longer with it than without, which may be less than nothing, since fewer
tokens are left; `apart`, which is not in the sum, is the same for masks that are applied in a pass
of their own before the pick, as penalties and the like need it. The tokens are learned by
BPE from the Python files of this installation, which takes a minute, or are those of `--tokenizer
tokenizer.json`. `random` tokens are concatenations of pieces at random, of which most contain a
quote or half a character: no tokenizer has such, but nothing is harder for a grammar of JSON.

`rate`: JSON and free text by turns, with the same sampling parameters: tokens in the time, and CPU
time, while all rows run. The clock stops when the first row has all its tokens, so that rows with
many forced tokens, which end early, do not make the batch smaller. The first compilation of the
grammar is timed apart. `--model learned` makes a model of the shape of Qwen2.5-0.5B with random
weights and the learned tokens.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import statistics
import sys
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import llguidance
import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "structured"))

import make_model
import paired

from quire import LLM, SamplingParams
from quire.kernels.dispatch import ops
from quire.params import StructuredOutputsParams
from quire.structured.compiler import Vocabulary
from quire.structured.state import GrammarState
from vocabularies import large

VOCAB_SIZE = 151_936
CORPUS = 60_000_000
"""Characters to learn tokens from."""
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""How Qwen2's tokenizer splits text."""
WORDS = ["small", "fox", "who", "lived", "edge", "forest", "met", "old", "owl", "asked", "river"]
PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "story": {"type": "string"},
        "age": {"type": "integer"},
        "tags": {"type": "array", "items": {"type": "string"}},
        "kind": {"enum": ["mammal", "bird", "fish"]},
    },
    "required": ["name", "story", "age", "tags", "kind"],
    "additionalProperties": False,
}
PEOPLE = {"type": "array", "items": PERSON, "minItems": 100}
"""Nobody gets to its end."""
STORY = "Once upon a time"
REPEATS = 7
RANDOM = np.array([[1.0, 0.0, 1.0, -np.inf]])
"""Temperature 1 without top-k, top-p and min-p, as `pick_tokens` takes it."""


def value(rng: random.Random) -> dict[str, Any]:
    """A person."""
    return {
        "name": " ".join(rng.choices(WORDS, k=2)),
        "story": " ".join(rng.choices(WORDS, k=40)),
        "age": rng.randint(1, 99),
        "tags": rng.choices(WORDS, k=4),
        "kind": "bird",
    }


def limited(schema: dict[str, Any]) -> dict[str, Any]:
    """The same with a longest length of each string, whose masks cannot be used twice."""
    text = json.dumps(schema)
    found: dict[str, Any] = json.loads(
        text.replace('"type": "string"', '"type": "string", "maxLength": 400')
    )
    return found


# ---- vocabularies --------------------------------------------------------------------------------


def corpus() -> Iterator[str]:
    """Text of the Python files here."""
    paths = sysconfig.get_paths()
    left = CORPUS
    for folder in (paths["stdlib"], paths["purelib"]):
        for path in sorted(Path(folder).rglob("*")):
            if path.suffix in (".py", ".txt", ".md", ".rst", ".h") and path.is_file():
                text = path.read_text("utf-8", errors="ignore")[: 2**20]
                left -= len(text)
                if left < 0:
                    return
                yield text


def learned(file: Path) -> Path:
    """Learn tokens and write them, unless the file is there."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    if file.exists():
        return file
    tokenizer = Tokenizer(models.BPE())
    bytes_of = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    split = pre_tokenizers.Split(Regex(SPLIT), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, bytes_of])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus(), trainer)
    file.parent.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(file))
    return file


def learned_model(folder: Path) -> Path:
    """A model of random weights with the learned tokens."""
    made = make_model.make("qwen2.5-0.5b", folder)
    target = folder / "qwen2.5-0.5b-learned"
    target.mkdir(exist_ok=True)
    for name in ("config.json", "model.safetensors"):
        if not (target / name).exists():
            (target / name).symlink_to(made / name)
    tokens = learned(folder / "learned.json")
    if not (target / "tokenizer.json").exists():
        (target / "tokenizer.json").symlink_to(tokens)
    config = {"eos_token": "<|endoftext|>", "tokenizer_class": "PreTrainedTokenizerFast"}
    (target / "tokenizer_config.json").write_text(json.dumps(config), "utf-8")
    return target


# ---- what a mask costs ---------------------------------------------------------------------------


def of_masks(name: str, vocabulary: Vocabulary, schema: dict[str, Any]) -> None:
    """What each token of 40 texts costs: the cheapest of some times, since other programs share the
    processor. Each time begins with a grammar that is compiled anew."""
    rng = random.Random(0)
    texts = [vocabulary.tokens.tokenize_str(json.dumps(value(rng))) for _ in range(40)]
    times = [once(vocabulary, schema, texts) for _ in range(REPEATS)]
    follow, make, free, within, apart = np.minimum.reduce(times).T / 1e3
    print(f"{name}: {len(make)} tokens, {int((make == 0).sum())} of them forced")
    apply = within - free
    whole = follow + make + apply
    rows = {"follow": follow, "make": make, "apply": apply, "all": whole, "apart": apart - free}
    for part, costs in rows.items():
        middle, far = np.percentile(costs, (50, 99))
        print(f"  {part:7} median {middle:7.1f}   mean {costs.mean():7.1f}   99 % {far:7.1f}")


def once(vocabulary: Vocabulary, schema: dict[str, Any], texts: list[list[int]]) -> np.ndarray:
    """Nanoseconds of CPU time of each token: to follow it, to make the mask, and to pick without
    one, with it, and after it was applied `[tokens, 5]`. A forced token takes no mask and no
    pick."""
    now = time.thread_time_ns
    logits = torch.randn(32, vocabulary.vocab_size)  # a batch, not to stay in the nearest cache
    unmasked, fresh = logits.clone(), itertools.cycle(range(len(logits)))
    start = vocabulary.compile(vocabulary.settle(StructuredOutputsParams(json=schema)))
    masks, which = np.empty((1, vocabulary.num_words), np.int32), np.zeros(1, np.int64)
    costs: list[tuple[int, ...]] = []
    for tokens in texts:
        state, output = GrammarState(start, vocabulary), np.array(tokens, np.int32)
        for at in range(len(tokens)):
            so_far = output[:at]
            begun = now()
            forced = state.forces_after(so_far)
            followed = now()
            if forced:
                costs.append((followed - begun, 0, 0, 0, 0))
                continue
            masks[0] = state.allowed(so_far)
            made = now()
            place = np.array([at], np.uint64), np.array([at], np.int64)
            row = [logits[next(fresh)].unsqueeze(0) for _ in range(3)]
            times = [now()]
            ops.pick_tokens(row[0], RANDOM, *place)
            times.append(now())
            ops.pick_tokens(row[1], RANDOM, *place, (which, masks))
            times.append(now())
            ops.keep_allowed(row[2], which, masks)
            ops.pick_tokens(row[2], RANDOM, *place)
            times.append(now())
            costs.append((followed - begun, made - followed, *np.diff(times).tolist()))
            if len(costs) % 10 == 0:
                logits.copy_(unmasked)
    return np.array(costs)


# ---- JSON beside free text -----------------------------------------------------------------------


class Spent:
    """Tokens, and seconds of the clock, of all threads, and of the one that steps."""

    def __init__(self) -> None:
        self.tokens = 0
        self.begun = np.array(self._now())

    @staticmethod
    def _now() -> tuple[float, float, float]:
        return time.perf_counter(), time.process_time(), time.thread_time()

    def each(self) -> np.ndarray:
        """Microseconds for each token: clock, all threads, this thread."""
        return (np.array(self._now()) - self.begun) * 1e6 / self.tokens


def run(llm: LLM, batch: int, length: int, form: dict[str, Any] | None) -> np.ndarray:
    """Microseconds for each token, while all rows run."""
    engine = llm.llm_engine
    names = [f"{'json' if form else 'free'}-{i}-{time.monotonic_ns()}" for i in range(batch)]
    for i, name in enumerate(names):
        params = SamplingParams(
            temperature=1.0, seed=i, max_tokens=length, ignore_eos=True, structured_outputs=form
        )
        engine.add_request(name, STORY, params)
    so_far = dict.fromkeys(names, 0)
    spent, at_begin = None, 0
    while True:
        done = False
        for output in engine.step():
            so_far[output.request_id] = len(output.outputs[0].token_ids)
            done |= output.finished
        if spent is None and all(so_far.values()):
            # All are there: prompts are computed, and the grammar is compiled.
            spent, at_begin = Spent(), sum(so_far.values())
        elif done:
            break
    assert spent is not None, "a row had all its tokens before another had one"
    spent.tokens = sum(so_far.values()) - at_begin
    each = spent.each()
    engine.abort_request(names)
    while engine.has_unfinished_requests:
        engine.step()
    return each


def of_rates(model: str | None, batches: list[int], length: int, pairs: int) -> None:
    """Ratios of JSON to free text."""
    schemas = {"JSON": PEOPLE, "JSON, strings limited": limited(PEOPLE)}
    forms = {name: {"json": schema} for name, schema in schemas.items()}
    forms["JSON, compact"] = {"json": PEOPLE, "disable_any_whitespace": True}
    with LLM() if model is None else LLM(model=model, max_model_len=1024) as llm:
        for name, form in {"free text": None, **forms, "free text again": None}.items():
            begun = time.process_time()
            llm.generate(
                [STORY], SamplingParams(max_tokens=1, structured_outputs=form), use_tqdm=False
            )
            first = (time.process_time() - begun) * 1e3
            print(f"the first token of {name}: {first:.1f} ms of CPU, compilation included")
        for batch in batches:
            run(llm, batch, length, None)
            for name, form in forms.items():
                run(llm, batch, length, form)
                compared(f"batch {batch:2}, {name}", llm, batch, length, form, pairs)


def compared(
    name: str, llm: LLM, batch: int, length: int, form: dict[str, Any], pairs: int
) -> None:
    """Measure a form and free text by turns, and print a row."""
    free, held = [], []
    for pair in range(pairs):
        for kind in (None, form)[:: 1 if pair % 2 else -1]:
            (held if kind else free).append(run(llm, batch, length, kind))
    row = f"{name:32}"
    for column, what in enumerate(("clock", "CPU", "stepping thread")):
        ratios = [a[column] / b[column] for a, b in zip(free, held, strict=True)]
        low, high = paired.interval(ratios)
        row += f" {what} {statistics.median(ratios):.2f} [{low:.2f}, {high:.2f}]"
    each = [statistics.median(x[1] for x in runs) for runs in (free, held)]
    print(f"{row}  us of CPU a token: free {each[0]:.1f}, held {each[1]:.1f}", flush=True)


def main() -> None:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=["mask", "rate"])
    parser.add_argument("--folder", type=Path, default=Path.home() / ".cache/quire-benchmarks")
    parser.add_argument(
        "--tokenizer", type=Path, help="a tokenizer.json, instead of learned tokens"
    )
    parser.add_argument("--model", help="a model's folder, or `learned`; without: the embedded one")
    parser.add_argument("--batch", default="1,8,32,64")
    parser.add_argument("--length", type=int, default=200, help="tokens of each row")
    parser.add_argument("--pairs", type=int, default=5)
    options = parser.parse_args()
    if options.what == "rate":
        model = options.model
        if model == "learned":
            model = str(learned_model(options.folder))
        of_rates(model, [int(b) for b in options.batch.split(",")], options.length, options.pairs)
        return
    torch.set_num_threads(1)
    file = options.tokenizer or learned(options.folder / "learned.json")
    tokens = Vocabulary(file.read_text("utf-8"), VOCAB_SIZE, [0])
    of_masks("learned tokens", tokens, PERSON)
    of_masks("learned tokens, strings limited", tokens, limited(PERSON))
    own = Vocabulary(file.read_text("utf-8"), VOCAB_SIZE, [0])
    own.tokens = own.tokens.with_slices(llguidance.LLTokenizer.general_slices())
    of_masks("the same with llguidance's own sets of tokens", own, limited(PERSON))
    of_masks("random tokens", large(), PERSON)


if __name__ == "__main__":
    main()
