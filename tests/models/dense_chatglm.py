"""ChatGLM's forward, dense and in float64, from its original names: a second source beside
transformers' GLM, with the options that no class of transformers has."""

import torch


def random_tensors(config, seed=0):
    """Weights by their original names, scaled so that logits are worth comparing."""
    generator = torch.Generator().manual_seed(seed)
    size, inner, vocab = (
        config["hidden_size"],
        config["ffn_hidden_size"],
        config["padded_vocab_size"],
    )
    dim, heads = config["kv_channels"], config["num_attention_heads"]
    groups = config["multi_query_group_num"] if config["multi_query_attention"] else heads
    rows = (heads + 2 * groups) * dim
    linears = {
        "self_attention.query_key_value": (rows, size),
        "self_attention.dense": (size, heads * dim),
        "mlp.dense_h_to_4h": (2 * inner, size),
        "mlp.dense_4h_to_h": (size, inner),
    }
    shapes = {"transformer.embedding.word_embeddings.weight": (vocab, size)}
    norms = ["input_layernorm", "post_attention_layernorm"]
    for i in range(config["num_layers"]):
        head = f"transformer.encoder.layers.{i}"
        for name, shape in linears.items():
            shapes[f"{head}.{name}.weight"] = shape
            if config["add_bias_linear"] or (config["add_qkv_bias"] and "query" in name):
                shapes[f"{head}.{name}.bias"] = shape[:1]
        shapes |= {f"{head}.{norm}.weight": (size,) for norm in norms}
        if not config["rmsnorm"]:
            shapes |= {f"{head}.{norm}.bias": (size,) for norm in norms}
    if config["post_layer_norm"]:
        shapes["transformer.encoder.final_layernorm.weight"] = (size,)
        if not config["rmsnorm"]:
            shapes["transformer.encoder.final_layernorm.bias"] = (size,)
    shapes["transformer.output_layer.weight"] = (vocab, size)

    def tensor(name, shape):
        noise = torch.randn(shape, generator=generator)
        if len(shape) == 1:
            return noise * 0.2 + (1.0 if name.endswith("norm.weight") else 0.0)
        return noise * 1.5 * shape[1] ** -0.5

    return {name: tensor(name, shape) for name, shape in shapes.items()}


def logits(config, tensors, ids):
    """`[len(ids), vocab]` of one request."""
    weights = {name: tensor.double() for name, tensor in tensors.items()}

    def linear(x, name):
        return x @ weights[f"{name}.weight"].t() + weights.get(f"{name}.bias", 0)

    def norm(x, name):
        if not config["rmsnorm"]:
            x = x - x.mean(-1, keepdim=True)
        x = x / (x.pow(2).mean(-1, keepdim=True) + config["layernorm_epsilon"]).sqrt()
        return x * weights[f"{name}.weight"] + weights.get(f"{name}.bias", 0)

    x = weights["transformer.embedding.word_embeddings.weight"][torch.tensor(ids)]
    for i in range(config["num_layers"]):
        head = f"transformer.encoder.layers.{i}"
        normed = norm(x, f"{head}.input_layernorm")
        mixed = linear(normed, f"{head}.self_attention.query_key_value")
        out = linear(attention(config, mixed), f"{head}.self_attention.dense")
        post = config["apply_residual_connection_post_layernorm"]
        x = (normed if post else x) + out
        normed = norm(x, f"{head}.post_attention_layernorm")
        gate, up = linear(normed, f"{head}.mlp.dense_h_to_4h").chunk(2, -1)
        out = linear(gate * gate.sigmoid() * up, f"{head}.mlp.dense_4h_to_h")
        x = (normed if post else x) + out
    if config["post_layer_norm"]:
        x = norm(x, "transformer.encoder.final_layernorm")
    return linear(x, "transformer.output_layer")


def attention(config, mixed):
    """Queries, keys and values of all heads, then causal softmax attention: `[T, heads * dim]`."""
    dim, heads, length = config["kv_channels"], config["num_attention_heads"], len(mixed)
    if config["multi_query_attention"]:
        groups = config["multi_query_group_num"]
        parts = mixed.split([heads * dim, groups * dim, groups * dim], -1)
        q, k, v = (part.view(length, -1, dim) for part in parts)
    else:
        q, k, v = mixed.view(length, heads, 3 * dim).split(dim, -1)
    q, k = rotated(config, q), rotated(config, k)
    k, v = (t.repeat_interleave(heads // t.shape[1], 1) for t in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) / dim**0.5
    later = torch.ones(length, length, dtype=torch.bool).triu(1)
    weights = scores.masked_fill(later, -torch.inf).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, v).flatten(1)


def rotated(config, x):
    """The first half of each head as complex numbers, turned by the position."""
    half = config["kv_channels"] // 2
    base = 10000.0 * config.get("rope_ratio", 1.0)
    speeds = base ** (-torch.arange(0, half, 2, dtype=torch.float64) / half)
    angles = torch.outer(torch.arange(len(x), dtype=torch.float64), speeds)
    pairs = torch.view_as_complex(x[..., :half].unflatten(-1, (-1, 2)).contiguous())
    turned = pairs * torch.polar(torch.ones_like(angles), angles).unsqueeze(1)
    return torch.cat((torch.view_as_real(turned).flatten(-2), x[..., half:]), -1)
