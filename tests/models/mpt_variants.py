"""What MPT's own code does and transformers' `MptForCausalLM` leaves out, put into the latter with
hooks: for `Row.prepare`. Checkpoints get the parameters under the names of MPT's own code."""

import torch
from torch import nn


def _noise(*shape, scale=0.2):
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape))) * scale


def biases(model):
    """`no_bias` false: every linear layer and every norm has one."""
    for block in model.transformer.blocks:
        linears = (block.attn.Wqkv, block.attn.out_proj, block.ffn.up_proj, block.ffn.down_proj)
        for layer in linears:
            layer.bias = nn.Parameter(_noise(layer.out_features))
    norms = [n for block in model.transformer.blocks for n in (block.norm_1, block.norm_2)]
    for norm in (*norms, model.transformer.norm_f):
        norm.bias = nn.Parameter(_noise(*norm.weight.shape))


def learned_positions(model):
    """`alibi` false: a table of positions is added to the embedding."""
    inner = model.transformer
    rows, size = inner.config.max_seq_len, inner.config.d_model
    inner.wpe = nn.Embedding.from_pretrained(_noise(rows, size, scale=0.5), freeze=False)

    def add(module, args, out):
        return out + inner.wpe.weight[: out.shape[1]]

    inner.wte.register_forward_hook(add)

    def no_biases(num_heads, length, alibi_bias_max=8, device=None):
        return torch.zeros(num_heads, 1, length)

    inner.build_mpt_alibi_tensor = no_biases


def normed_queries(model):
    """`qk_ln`: a norm over all queries of a token and one over all keys."""
    for block in model.transformer.blocks:
        size = block.attn.hidden_size
        for name in ("q_ln", "k_ln"):
            norm = nn.LayerNorm(size, bias=False)
            norm.weight = nn.Parameter(1 + _noise(size))
            setattr(block.attn, name, norm)

        def normed(module, args, out, attn=block.attn):
            q, k, v = out.chunk(3, -1)
            return torch.cat((attn.q_ln(q), attn.k_ln(k), v), -1)

        block.attn.Wqkv.register_forward_hook(normed)


def two_key_heads(model):
    """`kv_n_heads` of 2."""
    _share_keys(model, 2)


def one_key_head(model):
    """`attn_type` multiquery_attention."""
    _share_keys(model, 1)


def _share_keys(model, kv_heads):
    for block in model.transformer.blocks:
        attn = block.attn
        size, dim = attn.hidden_size, attn.head_dim
        rows = size + 2 * kv_heads * dim
        attn.Wqkv.weight = nn.Parameter(attn.Wqkv.weight[:rows].detach().clone())

        def repeated(module, args, out, attn=attn, size=size, dim=dim):
            q, k, v = out.split((size, kv_heads * dim, kv_heads * dim), -1)
            times = attn.n_heads // kv_heads
            k, v = (x.unflatten(-1, (kv_heads, dim)).repeat_interleave(times, -2) for x in (k, v))
            return torch.cat((q, k.flatten(-2), v.flatten(-2)), -1)

        attn.Wqkv.register_forward_hook(repeated)


def wide_mlp(model):
    """`expansion_ratio` of 2."""
    for block in model.transformer.blocks:
        up, down = block.ffn.up_proj, block.ffn.down_proj
        up.weight = nn.Parameter(up.weight[: 2 * up.in_features].detach().clone())
        down.weight = nn.Parameter(down.weight[:, : 2 * up.in_features].detach().clone())


def scaled_logits(model):
    """`logit_scale` inv_sqrt_d_model, of logits that are large before."""
    norm = model.transformer.norm_f
    norm.weight = nn.Parameter(norm.weight * 4)
    model.lm_head.register_forward_hook(lambda m, args, out: out * m.in_features**-0.5)


def slopes_of_16(model):
    """`alibi_bias_max` of 16."""
    inner = model.transformer
    build = inner.build_mpt_alibi_tensor

    def steep(num_heads, length, alibi_bias_max=16, device=None):
        return build(num_heads, length, 16, device)

    inner.build_mpt_alibi_tensor = steep
