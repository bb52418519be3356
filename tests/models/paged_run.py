"""Runs a loaded model over several requests the way an engine would: paged, cut, mixed."""

import torch

from quire.attention.kv_cache import allocate_kv_cache
from quire.config.shape import ModelShape
from quire.kernels.attention_metadata import AttentionMetadata
from quire.models.registry import load_model


def load(folder, dtype="auto", **options):
    return load_model(ModelShape.from_folder(folder), folder, dtype, "cpu", **options)


def name_of(model):
    return str(model.dtype).removeprefix("torch.")


def serve(model, prompts, rng, block_size=16, chunk=None, garbage=float("nan"), layers=None):
    """Logits of every position of each prompt, `chunk()` tokens of each a step; `layers`: what is
    kept of a token, if not in the model's type."""
    chunk = chunk or (lambda: 10**9)
    needs = [-(-len(p) // block_size) for p in prompts]
    free = list(range(sum(needs) + 2))
    rng.shuffle(free)
    tables = [[free.pop() for _ in range(n)] for n in needs]
    layers = layers or model.kv_layers(model.shape)
    size = (layers, sum(needs) + 2, block_size, name_of(model), "cpu")
    caches = allocate_kv_cache(*size)
    for pair in caches:
        for cache in pair:
            cache.fill_(garbage)
    done, rows = [0] * len(prompts), [[] for _ in prompts]
    while any(d < len(p) for d, p in zip(done, prompts, strict=True)):
        turn = [i for i, p in enumerate(prompts) if done[i] < len(p)]
        rng.shuffle(turn)
        ends = {i: min(done[i] + chunk(), len(prompts[i])) for i in turn}
        lens = [ends[i] - done[i] for i in turn]
        metadata = AttentionMetadata.build(
            lens,
            [ends[i] for i in turn],
            [tables[i][: -(-ends[i] // block_size)] for i in turn],
            block_size,
        )
        ids = torch.tensor([t for i in turn for t in prompts[i][done[i] : ends[i]]])
        hidden = model.forward(ids, metadata.positions, caches, metadata)
        logits = model.compute_logits(hidden)
        for i, part in zip(turn, logits.split(lens), strict=True):
            rows[i].append(part)
            done[i] = ends[i]
    return [torch.cat(r) for r in rows]
