"""The mixture layer against a naive float64 loop, and each row's bits alone and in batches."""

import pytest
import torch

from quire.kernels.dispatch import ops
from quire.kernels.moe import Routing
from quire.layers.moe import MoE, MoEStyle

HIDDEN, INNER, EXPERTS = 24, 20, 8
ROUTINGS = {
    "softmax then top-k": Routing(EXPERTS, 3, normalise=False),
    "normalised": Routing(EXPERTS, 2),
    "scaled": Routing(EXPERTS, 3, normalise=False, scale=2.5),
    "best group": Routing(EXPERTS, 3, normalise=False, groups=4, top_groups=2),
    "sigmoid": Routing(EXPERTS, 3, "sigmoid", scale=1.5),
    "sigmoid, plain": Routing(EXPERTS, 3, "sigmoid", normalise=False),
    "sigmoid, groups": Routing(EXPERTS, 3, "sigmoid", groups=4, top_groups=2, group_score="top2"),
    "one": Routing(EXPERTS, 1),
    "all": Routing(EXPERTS, EXPERTS),
}


def gpt_oss(x):
    return ops.clamped_swiglu(x, 1.702, 7.0)


def style(routing, **more):
    return MoEStyle(routing, INNER, **more)


STYLES = {name: style(routing) for name, routing in ROUTINGS.items()} | {
    "correction bias": style(ROUTINGS["sigmoid, groups"], correction_bias=True),
    "shared": style(ROUTINGS["normalised"], shared_size=36),
    "shared and gated": style(ROUTINGS["normalised"], shared_size=36, shared_gate=True),
    "leaves": MoEStyle(ROUTINGS["normalised"], 256, expert_bias=True, shared_size=128),
    "GPT-OSS": style(
        ROUTINGS["normalised"], expert_bias=True, router_bias=True, activation=gpt_oss
    ),
}


def build(style, dtype=torch.float32, seed=0):
    """A layer with random weights, and the weights."""
    torch.manual_seed(seed)
    layer, weights = MoE(HIDDEN, style), {}
    for name, parameter in layer.parameters().items():
        scale = 1.0 if "correction" in name else 3 * parameter.shape[-1] ** -0.5
        kind = parameter.dtype or dtype
        weights[name] = (torch.randn(parameter.shape) * scale).to(kind)
        parameter.load(weights[name])
    return layer, {name: tensor.double() for name, tensor in weights.items()}


def naive_choice(logits, bias, routing):
    """Expert to weight, for one row, by the formulas of the papers."""
    sigmoid = routing.score == "sigmoid"
    scores = logits.sigmoid() if sigmoid else logits.softmax(-1)
    keys = scores + (0 if bias is None else bias)
    size = routing.num_experts // routing.groups
    groups = keys.split(size)
    best = [sum(sorted(g.tolist())[-2:]) if routing.group_score == "top2" else max(g.tolist())
            for g in groups]  # fmt: skip
    open_groups = sorted(range(len(best)), key=lambda g: -best[g])[: routing.top_groups]
    allowed = [e for e in range(routing.num_experts) if e // size in open_groups]
    chosen = sorted(allowed, key=lambda e: -keys[e])[: routing.top_k]
    total = sum(scores[e] for e in chosen) if routing.normalise else 1
    return {e: scores[e] / total * routing.scale for e in chosen}


def naive_activation(gate_up, style):
    gate, up = gate_up.chunk(2)
    if style.activation is gpt_oss:
        gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
        return (up + 1) * gate * (1.702 * gate).sigmoid()
    return gate * gate.sigmoid() * up


def naive(x, weights, style):
    """Row by row, expert by expert, float64."""

    def mlp(row, name):
        inner = weights[f"{name}.gate_up_proj.weight"] @ row
        inner = inner + weights.get(f"{name}.gate_up_proj.bias", 0)
        out = weights[f"{name}.down_proj.weight"] @ naive_activation(inner, style)
        return out + weights.get(f"{name}.down_proj.bias", 0)

    rows = []
    for row in x.double():
        logits = weights["gate.weight"] @ row + weights.get("gate.bias", 0)
        choice = naive_choice(logits, weights.get("gate.e_score_correction_bias"), style.routing)
        total = sum(weight * mlp(row, f"experts.{e}") for e, weight in choice.items())
        if style.shared_size:
            gate = weights["shared_expert_gate.weight"] @ row if style.shared_gate else None
            total = total + mlp(row, "shared_expert") * (1 if gate is None else gate.sigmoid())
        rows.append(total)
    return torch.stack(rows)


def bits(tensor):
    return tensor.contiguous().view(torch.int32 if tensor.dtype == torch.float32 else torch.int16)


@pytest.mark.parametrize("name", STYLES)
def test_it_is_the_naive_loop(name):
    layer, weights = build(STYLES[name])
    x = torch.randn(37, HIDDEN)
    want = naive(x, weights, STYLES[name])
    torch.testing.assert_close(layer(x).double(), want, atol=1e-4, rtol=1e-4)
    assert want.std() > 0.3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_short_types_round_once_at_the_end(dtype):
    layer, weights = build(STYLES["shared and gated"], dtype)
    x = torch.randn(20, HIDDEN).to(dtype)
    got = layer(x)
    want = naive(x, weights, STYLES["shared and gated"])
    assert got.dtype == dtype
    assert (got.double() - want).norm() / want.norm() < 2e-2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", STYLES)
def test_a_row_has_the_same_bits_alone_and_in_any_batch(name, dtype):
    layer, _ = build(STYLES[name], dtype)
    x = torch.randn(41, HIDDEN).to(dtype)
    want = bits(layer(x))
    alone = torch.cat([layer(row) for row in x.split(1)])
    order = torch.randperm(41)
    assert torch.equal(bits(alone), want)
    assert torch.equal(bits(layer(x[order])), want[order])
    assert torch.equal(bits(layer(x[7:30])), want[7:30])
    crowd = torch.cat([x[:5], x[:1].expand(60, -1), x[5:]])
    assert torch.equal(bits(layer(crowd))[65:], want[5:])


@pytest.mark.parametrize("name", ROUTINGS)
def test_experts_are_distinct_ascending_and_best(name):
    routing = ROUTINGS[name]
    logits = torch.randn(200, EXPERTS)
    weights, experts = ops.route_experts(logits, None, routing)
    assert experts.dtype == torch.int64 and weights.dtype == torch.float32
    assert (experts.diff(dim=-1) > 0).all()
    for row, chosen in zip(logits.double(), experts.tolist(), strict=True):
        assert set(chosen) == set(naive_choice(row, None, routing))


def test_ties_go_to_the_first_experts():
    weights, experts = ops.route_experts(torch.zeros(5, EXPERTS), None, Routing(EXPERTS, 3))
    assert experts.tolist() == [[0, 1, 2]] * 5
    torch.testing.assert_close(weights, torch.full((5, 3), 1 / 3))


def test_extreme_logits_stay_finite():
    logits = torch.tensor([[3e38, -3e38, 0.0, 100.0], [-200.0, -300.0, -400.0, -500.0]])
    for score in ("softmax", "sigmoid"):
        for normalise in (True, False):
            routing = Routing(4, 2, score, normalise)
            weights, _ = ops.route_experts(logits, None, routing)
            assert weights.isfinite().all()


def test_experts_that_nobody_chose_are_not_computed(monkeypatch):
    layer, _ = build(STYLES["one"])
    x = torch.randn(1, HIDDEN).expand(9, -1)
    rows = []

    def counted(product):
        def call(x, *rest):
            rows.append(x.shape[0])
            return product(x, *rest)

        return call

    for name in ("linear", "add_leaves"):
        monkeypatch.setattr(ops, name, counted(getattr(ops, name)))
    layer(x)
    # The router, and the weights of one expert; native kernels add up what experts say in one call.
    assert rows == ([9, 9] if ops.name == "native" else [9, 9, 9])


def test_a_sum_in_order_of_arrival_would_fail_these_tests(monkeypatch):
    """The tests above see what they are meant to see: here the batch decides the order."""
    honest = ops.grouped_experts

    def by_arrival(x, weights, experts, layers, activation):
        turn = 1 if x.shape[0] % 2 else -1
        names = torch.arange(len(layers) - 1, -1, -1) if turn < 0 else torch.arange(len(layers))
        return honest(x, weights, names[experts], [layers[i] for i in names], activation)

    layer, _ = build(STYLES["all"])
    x = torch.randn(40, HIDDEN)
    monkeypatch.setattr(ops, "grouped_experts", by_arrival)
    alone = torch.cat([layer(row) for row in x.split(1)])
    assert not torch.equal(bits(alone), bits(layer(x)))


def test_clamped_swiglu():
    x = torch.randn(9, 30) * 10
    got = ops.clamped_swiglu(x, 1.702, 7.0)
    want = torch.stack([naive_activation(row, STYLES["GPT-OSS"]) for row in x.double()])
    torch.testing.assert_close(got.double(), want, atol=1e-4, rtol=1e-5)
    assert (x > 7).any() and (x < -7).any()
