"""The exponential race: its layout, its distribution, and what it promises beyond that."""

import math

import numpy as np
import pytest
import torch

import slow_sampler
from quire.kernels.dispatch import ops
from quire.params import SamplingParams
from quire.sampling import RequestSampling, Sampler, SamplingMetadata
from quire.sampling.race import arrivals, earliest, winners

sampler = Sampler()


@pytest.fixture(autouse=True, params=["steps", "at once"])
def kernels(request, monkeypatch):
    """The plain steps, and the compiled operation that does several of them at once."""
    ops.exp  # noqa: B018 # the first use chooses the kernels
    if request.param == "steps":
        monkeypatch.setitem(ops.__dict__, "pick_tokens", None)
    elif ops.pick_tokens is None:
        pytest.skip("the native kernels are not built")
    return request.param


def choices(logits, count, seed=11, **params):
    """Tokens of `count` output positions, all of the same logits `[vocab]`."""
    vocab = len(logits)
    request = RequestSampling.from_params(SamplingParams(seed=seed, **params), [], vocab)
    longest, at_once, tokens = np.zeros(count, np.int32), max(1, 2**22 // vocab), []
    for start in range(0, count, at_once):
        some = range(start, min(count, start + at_once))
        meta = SamplingMetadata.build([request] * len(some), [longest[:i] for i in some])
        tokens += sampler(logits.expand(len(some), -1).clone(), meta).token_ids
    return np.array(tokens)


# ---- the layout is a contract --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("seed", "position", "token", "expected"),
    [
        (0, 0, 0, "0x1.d65ce261a7ef2p-1"),
        (0, 0, 1, "0x1.0497ab7b52aa4p-3"),
        (7, 0, 151935, "0x1.78a850a440ffep+0"),
        (2**64 - 1, 2**32 + 5, 6, "0x1.0fd2eeb10a396p+0"),
        (2**63 + 12345, 999, 50001, "0x1.2a716b027243fp-1"),
    ],
)
def test_arrivals_of_the_likeliest_are_these_numbers(seed, position, token, expected):
    """A logit of 0 has the weight 2**43. The numbers hold on every device, for good."""
    place = torch.tensor([[position % 2**32, position >> 32, seed % 2**32, seed >> 32]])
    got = arrivals(torch.zeros(1), place, torch.tensor([token])).item() * 2**43
    assert got.hex() == expected
    assert got == pytest.approx(slow_sampler.exponential(seed, position, token), rel=1e-14)


def test_nobody_arrives_before_the_first_word_allows():
    logits = torch.linspace(-32.0, 0.0, 4097).expand(3, -1)
    places = torch.tensor([[5, 0, 6, 7], [0, 1, 2**32 - 1, 2**32 - 1], [9, 9, 0, 0]])
    tokens = torch.arange(4097).repeat(3)
    exact = arrivals(logits.flatten(), places.repeat_interleave(4097, 0), tokens).view(3, -1)
    early = earliest(logits, places)
    assert bool((early <= exact).all())
    assert torch.equal(winners(logits, [6 + (7 << 32), 2**64 - 1, 0], [5, 2**32, 9 + (9 << 32)]),
                       exact.argmin(1))  # fmt: skip


# ---- the distribution ----------------------------------------------------------------------------


def critical(degrees):
    """What chi-square exceeds with a probability of 0.1 % (Wilson and Hilferty)."""
    spread = 2 / (9 * degrees)
    return degrees * (1 - spread + 3.09 * math.sqrt(spread)) ** 3


def assert_follows(tokens, probabilities, bins):
    """Chi-square over bins of tokens with neighbouring ids, of about equal probability."""
    assert probabilities[tokens].min() > 0
    place = (np.cumsum(probabilities) - probabilities / 2) * bins
    which = np.minimum(place.astype(int), bins - 1)
    expected = np.bincount(which, weights=probabilities, minlength=bins) * len(tokens)
    found = np.bincount(which[tokens], minlength=bins)
    often = expected > 5
    chi_square = ((found - expected)[often] ** 2 / expected[often]).sum()
    assert chi_square < critical(often.sum() - 1)
    assert found[~often].sum() < expected[~often].sum() * 2 + 8


def expected_probabilities(logits, temperature=1.0, **filters):
    params = SamplingParams(temperature=temperature, **filters)
    x = logits.double().numpy()
    kept = np.array(slow_sampler.filter_all(((x - x.max()) / temperature).tolist(), params))
    return np.exp(kept) / np.exp(kept).sum()


FILTERS = [
    {},
    {"temperature": 0.6},
    {"temperature": 1.7, "min_p": 0.02},
    {"top_k": 5},
    {"top_p": 0.8},
    {"temperature": 1.3, "top_k": 40, "top_p": 0.9, "min_p": 0.01},
]


@pytest.mark.parametrize("params", FILTERS, ids=str)
def test_a_small_vocabulary(params):
    logits = torch.tensor([0.5, 2.0, -9.0, 1.1, 1.9, 0.3, -1.2, -math.inf]).clamp(min=-80.0)
    tokens = choices(logits, 10_000, **params)
    assert_follows(tokens, expected_probabilities(logits, **params), 400)


@pytest.mark.parametrize("params", FILTERS, ids=str)
def test_a_vocabulary_of_two_thousand(params, kernels):
    if kernels == "steps" and params not in FILTERS[::5]:
        pytest.skip("the same tokens, as other tests show")
    logits = torch.randn(2003, generator=torch.Generator().manual_seed(1)) * 2
    tokens = choices(logits, 8000 if kernels == "at once" else 1500, seed=3, **params)
    assert_follows(tokens, expected_probabilities(logits, **params), 50)


@pytest.mark.parametrize("params", [{}, {"top_p": 0.95}, {"top_k": 50, "min_p": 0.01}], ids=str)
def test_a_vocabulary_of_a_real_model(params, kernels):
    if kernels == "steps":
        pytest.skip("the same tokens, as other tests show")
    logits = torch.randn(151936, generator=torch.Generator().manual_seed(2)) * 1.5
    tokens = choices(logits, 1000, seed=4, **params)
    assert_follows(tokens, expected_of_many(logits, **params), 50)


def expected_of_many(logits, top_k=0, top_p=1.0, min_p=0.0):
    """`expected_probabilities`, quicker."""
    x = logits.double().numpy()
    rank, weight = np.argsort(-x, kind="stable"), np.exp(x - x.max())
    weight[weight < min_p] = 0.0
    if top_k:
        weight[rank[top_k:]] = 0.0
    before = np.cumsum(weight[rank]) - weight[rank]
    weight[rank[before >= top_p * weight.sum()]] = 0.0
    return weight / weight.sum()


# ---- what an inverse distribution function cannot do ---------------------------------------------


def test_a_token_that_is_not_chosen_can_be_banned():
    logits = torch.randn(300, generator=torch.Generator().manual_seed(5)) * 2
    tokens = choices(logits, 400)
    for banned in (3, 77, int(logits.argmax())):
        without = choices(logits, 400, logit_bias={banned: -100.0})
        others = tokens != banned
        assert (without[others] == tokens[others]).all()
        assert (without != banned).all()


def test_a_token_that_gains_wins_more_and_changes_nothing_else():
    logits = torch.randn(300, generator=torch.Generator().manual_seed(6)) * 2
    tokens, favoured = choices(logits, 1000), int(logits.argsort()[-5])
    more = choices(logits, 1000, logit_bias={favoured: 1.0})
    changed = tokens != more
    assert changed.sum() > 20
    assert (more[changed] == favoured).all()


def test_two_models_that_nearly_agree_choose_alike():
    """At least (1 - d) / (1 + d), d their distance: Daliri, Musco, Suresh (2024), theorem 3."""
    generator = torch.Generator().manual_seed(7)
    target = torch.randn(2000, generator=generator) * 2.5
    draft = target + torch.randn(2000, generator=generator) * 0.5
    distance = (target.softmax(0) - draft.softmax(0)).abs().sum().item() / 2
    alike = (choices(target, 4000) == choices(draft, 4000)).mean()
    assert 0.1 < distance < 0.3
    assert alike > (1 - distance) / (1 + distance) - 0.02
