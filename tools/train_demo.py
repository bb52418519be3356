"""Make quire's embedded model from one seed: tokenizer, model, draft model and adapter.

    python tools/train_demo.py --out src/quire/assets

It knows the training schedule and the folder layout that is shipped.  It does not know
the corpus (demo_corpus), the network (demo_model) or the measuring (eval_demo).  The same
seed gives the same corpus and the same first weights everywhere; the trained weights may
differ in their last bits between processors, since floating-point sums do.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

# Threads that spin long at barriers starve one another on a busy machine, and threads that
# sleep at once are slow on an idle one; this lies between.  It is read when torch loads.
os.environ.setdefault("GOMP_SPINCOUNT", "30000")

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import nn

from demo_card import write_cards
from demo_chat import CHAT_TEMPLATE, END, STOP
from demo_corpus import documents, pirate_documents
from demo_data import Packer, train_tokenizer
from demo_lora import LORA_ALPHA, LORA_RANK, LORA_TARGETS, add_lora, save_lora
from demo_model import DRAFT, MAIN, Llama, ModelConfig, hf_config, load_model, save_weights
from demo_optim import Muon

MODEL, DRAFT_MODEL, LORA = "quire-demo", "quire-demo-draft", "quire-demo-lora"
TOKENS_PER_STEP = 4096


@dataclass(frozen=True)
class Stage:
    """Part of a schedule: row length, share of the steps, and long documents in it."""

    length: int
    share: float
    long_words: int = 0
    long_share: float = 0.0
    stress: str = ""


# Short rows first, since they are cheap; the end teaches positions up to the full window.
# The two stress stages come when the model has learned the forms: looking back and adding are
# what it learns last otherwise.
MODEL_STAGES = (
    Stage(256, 0.26),
    Stage(256, 0.07, stress="copy"),
    Stage(256, 0.09, stress="arithmetic"),
    Stage(256, 0.38),
    Stage(512, 0.10, long_words=250, long_share=0.03),
    Stage(1024, 0.07, long_words=600, long_share=0.05),
    Stage(2048, 0.03, long_words=1100, long_share=0.05),
)
POLISH_STAGES = (
    Stage(256, 0.50, stress="polish"),
    Stage(512, 0.20, long_words=250, long_share=0.08, stress="polish"),
    Stage(1024, 0.22, long_words=650, long_share=0.15, stress="polish"),
    Stage(2048, 0.08, long_words=1100, long_share=0.15),
)
DRAFT_STAGES = (
    Stage(256, 0.25),
    Stage(256, 0.30, stress="copy"),
    Stage(256, 0.33),
    Stage(1024, 0.12, long_words=600, long_share=0.04),
)
LORA_STAGES = (Stage(256, 1.0),)


def batches(
    packer_for: Callable[[Stage], Packer], stages: tuple[Stage, ...], steps: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Ids and targets for every step, each with about the same number of tokens."""
    done = 0.0
    for stage in stages:
        packer = packer_for(stage)
        first, last = round(done * steps), round((done + stage.share) * steps)
        done += stage.share
        for _ in range(first, last):
            ids, targets = packer.batch(max(1, TOKENS_PER_STEP // stage.length), stage.length)
            yield torch.from_numpy(ids), torch.from_numpy(targets)


def rate(step: int, steps: int, warmup: int = 60) -> float:
    """Learning-rate factor: a linear start, then a cosine down to a twentieth."""
    if step < warmup:
        return (step + 1) / warmup
    return 0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, steps - warmup)))


class Progress:
    """Prints loss, speed and the time that is left, now and then."""

    def __init__(self, name: str, steps: int, every: int = 25) -> None:
        self.name, self.steps, self.every = name, steps, every
        self.start = self.last = time.perf_counter()
        self.losses: list[float] = []
        self.tokens = 0

    def update(self, step: int, loss: float, tokens: int) -> None:
        self.losses.append(loss)
        self.tokens += tokens
        if (step + 1) % self.every and step + 1 != self.steps:
            return
        now = time.perf_counter()
        speed = self.tokens / (now - self.last)
        left = (now - self.start) / (step + 1) * (self.steps - step - 1)
        mean = sum(self.losses) / len(self.losses)
        print(
            f"{self.name} step {step + 1}/{self.steps} loss {mean:.4f} "
            f"{speed:.0f} tokens/s, {left / 60:.1f} min left",
            flush=True,
        )
        self.losses, self.tokens, self.last = [], 0, now


def label_loss(model: Llama, ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Cross entropy at the learned positions only."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        hidden = model.hidden(ids)
        kept = targets >= 0
        logits = model.logits(hidden[kept])
    return F.cross_entropy(logits.float(), targets[kept])


def distil_loss(teacher: Llama) -> Callable[..., torch.Tensor]:
    """The label loss mixed with the teacher's own distribution, which a draft must guess."""

    def loss(model: Llama, ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        kept = targets >= 0
        with torch.autocast("cpu", dtype=torch.bfloat16):
            with torch.no_grad():
                aim = teacher.logits(teacher.hidden(ids)[kept]).float().softmax(-1)
            logits = model.logits(model.hidden(ids)[kept]).float()
        soft = F.cross_entropy(logits, aim)
        return 0.3 * F.cross_entropy(logits, targets[kept]) + 0.7 * soft

    return loss


def optimizers(model: nn.Module, lr: float, muon: float) -> list[torch.optim.Optimizer]:
    """Muon for the layers' matrices, AdamW for the embedding and the norms."""
    named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    matrices = [p for n, p in named if p.dim() == 2 and "layers" in n] if muon else []
    taken = {id(p) for p in matrices}
    rest = [p for _, p in named if id(p) not in taken]
    made: list[torch.optim.Optimizer] = [
        torch.optim.AdamW(rest, lr=lr, betas=(0.9, 0.98), weight_decay=0.01, fused=True)
    ]
    if matrices:
        made.append(Muon(matrices, lr=muon))
    return made


def fit(
    name: str,
    model: Llama,
    data: Iterator[tuple[torch.Tensor, torch.Tensor]],
    steps: int,
    lr: float,
    muon: float = 0.0,
    loss_of: Callable[..., torch.Tensor] = label_loss,
    check: Callable[[int], None] | None = None,
    check_every: int = 400,
) -> None:
    """Train in place; `check` runs now and then and at the end."""
    used = optimizers(model, lr, muon)
    tops = [group["lr"] for optimizer in used for group in optimizer.param_groups]
    progress = Progress(name, steps)
    for step, (ids, targets) in enumerate(data):
        groups = [group for optimizer in used for group in optimizer.param_groups]
        for group, top in zip(groups, tops, strict=True):
            group["lr"] = top * rate(step, steps)
        loss = loss_of(model, ids, targets)
        loss.backward()
        nn.utils.clip_grad_norm_([p for g in groups for p in g["params"]], 1.0)
        for optimizer in used:
            optimizer.step()
            optimizer.zero_grad()
        progress.update(step, loss.item(), ids.numel())
        if check and ((step + 1) % check_every == 0 or step + 1 == steps):
            check(step + 1)


# --- the folders ----------------------------------------------------------------------------


def write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def write_folder(folder: Path, tokenizer: Tokenizer, config: ModelConfig) -> None:
    """Everything of a model folder but its weights and card."""
    folder.mkdir(parents=True, exist_ok=True)
    end, stop = tokenizer.token_to_id(END), tokenizer.token_to_id(STOP)
    write_json(folder / "config.json", hf_config(config, end, stop))
    write_json(
        folder / "generation_config.json",
        {
            "bos_token_id": end,
            "do_sample": False,
            "eos_token_id": [stop, end],
            "pad_token_id": end,
        },
    )
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    added = json.loads(tokenizer.to_str())["added_tokens"]
    kept = ("content", "lstrip", "normalized", "rstrip", "single_word", "special")
    write_json(
        folder / "tokenizer_config.json",
        {
            "add_bos_token": False,
            "add_prefix_space": False,
            "added_tokens_decoder": {str(t["id"]): {k: t[k] for k in kept} for t in added},
            "bos_token": END,
            "chat_template": CHAT_TEMPLATE,
            "clean_up_tokenization_spaces": False,
            "eos_token": STOP,
            "model_max_length": config.max_position_embeddings,
            "pad_token": END,
            "tokenizer_class": "PreTrainedTokenizerFast",
            "unk_token": None,
        },
    )


def read_tokenizer(out: Path) -> Tokenizer:
    path = out / MODEL / "tokenizer.json"
    if not path.is_file():
        raise FileNotFoundError(f"no {path}; run with --only tokenizer first, or without --only")
    return Tokenizer.from_file(str(path))


def corpus_packers(
    seed: int, name: str, tokenizer: Tokenizer, stages: tuple[Stage, ...]
) -> Callable[[Stage], Packer]:
    """A packer per stage, each with documents of its own."""

    def packer_for(stage: Stage) -> Packer:
        rng = random.Random(f"{seed}/{name}/{stages.index(stage)}")
        source = documents(rng, stage.long_words, stage.long_share, stage.stress)
        return Packer(tokenizer, source)

    return packer_for


def make_tokenizer(out: Path, seed: int, args: argparse.Namespace) -> None:
    """The tokenizer, and both model folders with untrained weights to be replaced."""
    tokenizer = train_tokenizer(seed)
    for name, config in ((MODEL, MAIN), (DRAFT_MODEL, DRAFT)):
        write_folder(out / name, tokenizer, config)
        if not (out / name / "model.safetensors").exists():
            torch.manual_seed(seed)
            save_weights(Llama(config), out / name / "model.safetensors")
    print(f"tokenizer: {tokenizer.get_vocab_size()} entries", flush=True)


def quick_check(folder: Path, model: Llama) -> Callable[[int], None]:
    """Save, then measure a few items of every kind with the saved weights."""
    from eval_demo import measure, torch_backend

    def check(step: int) -> None:
        save_weights(model, folder / "model.safetensors")
        table = measure(torch_backend(folder), count=20)
        shown = ", ".join(f"{k} {v['accuracy']:.0%}" for k, v in table.items())
        print(f"check at step {step}: {shown}", flush=True)

    return check


def make_model(out: Path, seed: int, args: argparse.Namespace) -> None:
    tokenizer = read_tokenizer(out)
    torch.manual_seed(seed)
    model = Llama(MAIN)
    write_folder(out / MODEL, tokenizer, MAIN)
    fit(
        "model",
        model,
        batches(corpus_packers(seed, "model", tokenizer, MODEL_STAGES), MODEL_STAGES, args.steps),
        args.steps,
        args.lr,
        args.muon,
        check=quick_check(out / MODEL, model),
        check_every=args.check_every,
    )


def make_polish(out: Path, seed: int, args: argparse.Namespace) -> None:
    """A second, gentler run from the saved weights, with the hardest skills in front."""
    tokenizer = read_tokenizer(out)
    model = load_model(out / MODEL).train()
    fit(
        "polish",
        model,
        batches(
            corpus_packers(seed, "polish", tokenizer, POLISH_STAGES),
            POLISH_STAGES,
            args.polish_steps,
        ),
        args.polish_steps,
        args.lr * 0.4,
        args.muon * 0.4,
        check=quick_check(out / MODEL, model),
        check_every=args.check_every,
    )


def make_draft(out: Path, seed: int, args: argparse.Namespace) -> None:
    tokenizer = read_tokenizer(out)
    teacher = load_model(out / MODEL)
    torch.manual_seed(seed + 1)
    model = Llama(DRAFT)
    write_folder(out / DRAFT_MODEL, tokenizer, DRAFT)
    fit(
        "draft",
        model,
        batches(
            corpus_packers(seed, "draft", tokenizer, DRAFT_STAGES), DRAFT_STAGES, args.draft_steps
        ),
        args.draft_steps,
        args.lr * 1.5,
        args.muon,
        loss_of=distil_loss(teacher),
    )
    save_weights(model, out / DRAFT_MODEL / "model.safetensors")


def make_lora(out: Path, seed: int, args: argparse.Namespace) -> None:
    tokenizer = read_tokenizer(out)
    torch.manual_seed(seed + 2)
    model = add_lora(load_model(out / MODEL))
    source = pirate_documents(random.Random(f"{seed}/lora"))
    packer = Packer(tokenizer, source)
    fit(
        "lora",
        model,
        batches(lambda stage: packer, LORA_STAGES, args.lora_steps),
        args.lora_steps,
        2e-3,
    )
    folder = out / LORA
    folder.mkdir(parents=True, exist_ok=True)
    save_lora(model, folder / "adapter_model.safetensors")
    write_json(
        folder / "adapter_config.json",
        {
            "base_model_name_or_path": MODEL,
            "bias": "none",
            "fan_in_fan_out": False,
            "inference_mode": True,
            "init_lora_weights": True,
            "lora_alpha": LORA_ALPHA,
            "lora_dropout": 0.0,
            "modules_to_save": None,
            "peft_type": "LORA",
            "r": LORA_RANK,
            "target_modules": list(LORA_TARGETS),
            "task_type": "CAUSAL_LM",
            "use_dora": False,
            "use_rslora": False,
        },
    )


# In the order they are made; each needs the ones before it.
PARTS: dict[str, Callable[[Path, int, argparse.Namespace], None]] = {
    "tokenizer": make_tokenizer,
    "model": make_model,
    "polish": make_polish,
    "lora": make_lora,
    "draft": make_draft,
}


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    default_out = Path(__file__).resolve().parent.parent / "src" / "quire" / "assets"
    parser = argparse.ArgumentParser(description="Make quire-demo, its draft and its adapter.")
    parser.add_argument("--out", type=Path, default=default_out, help="folder of the folders")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", choices=tuple(PARTS))
    parser.add_argument("--steps", type=int, default=2200, help="steps of the model")
    parser.add_argument("--polish-steps", type=int, default=450)
    parser.add_argument("--draft-steps", type=int, default=1600)
    parser.add_argument("--lora-steps", type=int, default=150)
    parser.add_argument("--lr", type=float, default=2e-3, help="AdamW's peak learning rate")
    parser.add_argument("--muon", type=float, default=0.02, help="Muon's peak rate; 0: AdamW only")
    parser.add_argument("--check-every", type=int, default=400, help="steps between checks")
    parser.add_argument("--threads", type=int, default=min(2, os.cpu_count() or 1))
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    args = parse(argv)
    torch.set_num_threads(args.threads)
    started = time.perf_counter()
    for name, make in PARTS.items():
        if args.only in (None, name):
            make(args.out, args.seed, args)
    write_cards(args.out)
    print(f"done in {(time.perf_counter() - started) / 60:.1f} min", flush=True)


if __name__ == "__main__":
    main()
