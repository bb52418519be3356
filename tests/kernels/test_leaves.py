"""Products that ranks share: the same bits for any number of ranks, which a fixed tree gives."""

from types import SimpleNamespace

import pytest
import torch

from kernel_kit import error, needs_native, same
from quire.config.leaves import head_leaves, inner_leaves
from quire.kernels import compiled, dispatch, moe
from quire.kernels.exact import sum_neighbours
from quire.kernels.moe import ExpertWeights, Routing

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
MLPS = [(4864, 40), (512, 130), (128, 64)]
"""Inner size, width of the stream: 4, 8 and 2 leaves."""
HEADS = [(14, 2, 64, 70), (32, 8, 16, 33), (12, 2, 10, 64)]
"""Query heads, KV heads, dimensions, width of the stream: 2, 8 and 4 leaves."""


@pytest.fixture(params=["reference", *compiled.available_isas()])
def ops(request):
    """The operations of the reference, and of each instruction set with two threads."""
    if request.param == "reference":
        table = vars(dispatch.choose("reference"))
    else:
        request.getfixturevalue("set_isa")(request.param)
        table = vars(dispatch.choose("native"))
        compiled.lib.set_isa(request.param)
    return SimpleNamespace(**table)


@pytest.fixture
def set_isa():
    before, threads = compiled.lib.isa(), compiled.lib.num_threads()
    compiled.lib.set_num_threads(2, [])
    yield compiled.lib.set_isa
    compiled.lib.set_isa(before)
    compiled.lib.set_num_threads(threads, [])


def made(*size, dtype=torch.float32, seed=0):
    return torch.randn(size, generator=torch.Generator().manual_seed(seed)).to(dtype)


def ranks_of(leaves):
    """Numbers of ranks that can share a product of so many leaves."""
    return [ranks for ranks in (1, 2, 4, 8) if leaves % ranks == 0]


def cuts(size, ranks):
    """Each rank's part of K."""
    return [slice(r * size // ranks, (r + 1) * size // ranks) for r in range(ranks)]


@pytest.mark.parametrize(
    ("heads", "kv_heads", "width", "leaves"),
    [
        (14, 2, 64, 2),  # Qwen2.5-0.5B
        (12, 2, 128, 4),
        (28, 4, 128, 4),
        (32, 8, 128, 8),
        (64, 4, 128, 8),
        (16, 1, 256, 8),
        (71, 71, 64, 1),
        (12, 3, 64, 1),  # two ranks cannot share three KV heads
        (24, 6, 64, 2),
        (8, 8, 3, 4),  # eight leaves would be three columns each: one and a half pairs
        (1, 1, 1, 1),
    ],
)
def test_leaves_of_heads(heads, kv_heads, width, leaves):
    assert head_leaves(heads, kv_heads, width) == leaves


@pytest.mark.parametrize(
    ("size", "leaves"), [(4864, 4), (18944, 8), (1408, 2), (64, 1), (192, 1), (4095, 1), (33, 1)]
)
def test_leaves_of_an_inner_size(size, leaves):
    assert inner_leaves(size) == leaves


@pytest.mark.parametrize("leaves", [1, 2, 4, 8])
@pytest.mark.parametrize("rows", [1, 5, 13, 40, 250])
def test_neighbours_are_added_first(ops, leaves, rows):
    """One product per leaf, exact in float32: what is left is the tree, known to the last bit."""
    x, weight = torch.zeros(rows, 48 * leaves), torch.zeros(70, 48 * leaves)
    at = torch.arange(leaves) * 53
    sizes = torch.logspace(-4, 4, leaves, base=2)[torch.arange(leaves) * 3 % leaves]
    x[:, at], weight[:, at] = made(rows, leaves) * sizes, made(70, leaves, seed=1) * sizes
    x, weight = x.bfloat16(), weight.bfloat16()
    products = [x[:, i : i + 1].float() * weight[:, i].float() for i in at]
    tree = products
    while len(tree) > 1:
        tree = [left + right for left, right in zip(tree[::2], tree[1::2], strict=True)]
    got = ops.linear(x, ops.prepare_linear(weight, leaves=leaves), torch.float32)
    assert same(got, tree[0])
    if leaves > 2:
        assert not same(got, sum(products)), "these numbers do not tell a chain from a tree"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("k", "leaves"), [(4864, 4), (896, 2), (528, 8), (20, 2), (90, 1)])
def test_leaves_apart_are_the_parts_of_the_sum(ops, dtype, k, leaves):
    weight, bias = made(130, k, dtype=dtype), made(130, dtype=dtype, seed=1)
    layer = ops.prepare_linear(weight, bias, leaves=leaves)
    for rows in (1, 7, 25, 200):
        x = made(rows, k, dtype=dtype, seed=rows)
        apart = torch.zeros(leaves, rows, 130)
        ops.add_leaves(x, layer, apart, torch.arange(rows), torch.ones(rows))
        for part, cut in zip(apart, cuts(k, leaves), strict=True):
            alone = ops.prepare_linear(weight[:, cut])
            assert same(ops.linear(x[:, cut], alone, torch.float32), part)
        whole = ops.linear(x, layer, torch.float32)
        assert same(sum_neighbours(apart.unbind()).add_(bias), whole)
        assert error(whole, x.double() @ weight.double().t() + bias.double()) < 2e-6


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("k", "leaves"), [(528, 8), (2496, 2)])
def test_a_row_is_the_same_in_any_company(ops, dtype, k, leaves):
    layer = ops.prepare_linear(made(130, k, dtype=dtype), made(130, seed=1), leaves=leaves)
    x = made(230, k, dtype=dtype, seed=2)
    want = ops.linear(x, layer)
    for rows in (1, 2, 5, 7, 13, 19, 48, 97, 200):
        picked = torch.randperm(230, generator=torch.Generator().manual_seed(rows))[:rows]
        assert same(ops.linear(x[picked], layer), want[picked])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_weighed_leaves_are_added_to_their_rows(ops, dtype):
    """As torch does it with the sums; other rows stay as they are, however many threads."""
    weight = made(130, 80, dtype=dtype)
    layer = ops.prepare_linear(weight, made(130, seed=1), leaves=8)
    for rows in (1, 9, 210):
        x, shares = made(rows, 80, dtype=dtype, seed=rows), made(rows, seed=2)
        to = torch.randperm(300, generator=torch.Generator().manual_seed(3))[:rows]
        sums, total = torch.zeros(8, rows, 130), made(8, 300, 130, seed=4)
        ops.add_leaves(x, layer, sums, torch.arange(rows), torch.ones(rows))
        want = total.index_add(1, to, sums * shares.unsqueeze(1))
        ops.add_leaves(x, layer, total, to, shares)
        assert same(total, want)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sizes", HEADS, ids=str)
def test_attention_outputs_over_ranks(ops, dtype, sizes):
    """Sums cross; then bias, then residual, then one rounding."""
    heads, kv_heads, dim, size = sizes
    k, leaves = heads * dim, head_leaves(heads, kv_heads, dim)
    weight, bias = made(size, k, dtype=dtype), made(size, dtype=dtype, seed=1)
    layer = ops.prepare_linear(weight, bias, leaves=leaves)
    for rows in (1, 9, 30):
        x, residual = made(rows, k, dtype=dtype, seed=2), made(rows, size, dtype=dtype, seed=3)
        want = ops.linear(x, layer), ops.linear_add(x, layer, residual.clone())
        for ranks in ranks_of(leaves):
            sums = sum_neighbours(
                [
                    ops.linear(
                        x[:, cut],
                        ops.prepare_linear(weight[:, cut], leaves=leaves // ranks),
                        torch.float32,
                    )
                    for cut in cuts(k, ranks)
                ]
            ).add_(bias)
            assert same(sums.to(dtype), want[0])
            assert same((sums + residual).to(dtype), want[1])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("inner", "size"), MLPS)
def test_an_mlp_over_ranks(ops, dtype, inner, size):
    """Each rank has some columns of gates and ups, and the same of the down projection."""
    leaves = inner_leaves(inner)
    gate, up = made(inner, size, dtype=dtype), made(inner, size, dtype=dtype, seed=1)
    down, x = made(size, inner, dtype=dtype, seed=2), made(11, size, dtype=dtype, seed=3) / 4
    assert len(ranks_of(leaves)) > 1

    def rank(cut, leaves):
        first = ops.prepare_linear([gate[cut], up[cut]], gated=True, dtype=dtype)
        last = ops.prepare_linear(down[:, cut], leaves=leaves)
        return ops.linear(ops.gated_linear(x, first), last, torch.float32)

    want = rank(slice(None), leaves)
    for ranks in ranks_of(leaves):
        assert same(sum_neighbours([rank(c, leaves // ranks) for c in cuts(inner, ranks)]), want)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("inner", [256, 512])
def test_experts_over_ranks(ops, dtype, inner):
    """Every rank has a part of every expert."""
    size, count, leaves = 40, 5, inner_leaves(inner)
    gates = [made(inner, size, dtype=dtype, seed=i) for i in range(count)]
    ups = [made(inner, size, dtype=dtype, seed=10 + i) for i in range(count)]
    downs = [made(size, inner, dtype=dtype, seed=20 + i) for i in range(count)]
    x = made(23, size, dtype=dtype, seed=30) / 4
    logits = made(23, count, seed=31)
    weights, experts = moe.route_experts(logits, None, Routing(count, 3))

    def rank(cut, leaves, rows=slice(None)):
        layers = [
            ExpertWeights(
                ops.prepare_linear([gate[cut], up[cut]], dtype=dtype),
                ops.prepare_linear(down[:, cut], leaves=leaves),
            )
            for gate, up, down in zip(gates, ups, downs, strict=True)
        ]
        act = ops.silu_and_mul
        return moe.grouped_experts(x[rows], weights[rows], experts[rows], layers, act, ops=ops)

    want = rank(slice(None), leaves)
    assert same(rank(slice(None), leaves, slice(4, 5)), want[4:5])
    for ranks in ranks_of(leaves)[1:]:
        assert same(sum_neighbours([rank(c, leaves // ranks) for c in cuts(inner, ranks)]), want)
    assert not same(rank(slice(None), 1), want), "one chain over K would do as well"


@needs_native
def test_ranks_without_a_tree_would_fail_these_tests(ops):
    """The tests above see what they are meant to see: plain sums depend on the ranks."""
    weight, x = made(64, 4864), made(9, 4864, seed=1)
    one = ops.linear(x, ops.prepare_linear(weight))
    parts = [ops.linear(x[:, c], ops.prepare_linear(weight[:, c])) for c in cuts(4864, 4)]
    assert not same(parts[0] + parts[1] + parts[2] + parts[3], one)
