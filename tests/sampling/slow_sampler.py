"""The sampler once more, slowly: one row, lists, no torch. Tests compare against it.

Float64, but for the penalties: what float32 makes equal must be equal here, and nothing else.
"""

import math
import struct

from quire.params import SamplingParams

CLEAR = 1e-5
"""A decision closer than this to its limit may fall either way in float32."""


class Unclear(Exception):
    """Rounding could decide; such a case proves nothing."""


def by_rank(logits: list[float]) -> list[int]:
    """Token ids by falling logit, equal ones by rising id."""
    return sorted(range(len(logits)), key=lambda i: (-logits[i], i))


def sample(
    logits: list[float],
    params: SamplingParams,
    prompt: list[int],
    output: list[int],
    mask: set[int] | None = None,
) -> int | None:
    """The token, or `None` if the request must fail for want of any candidate. `mask`: the only
    tokens that a grammar allows."""
    x = penalise(mask_and_bias(logits, params, output, mask), params, prompt, output)
    if max(x) == -math.inf:
        return None
    _check_gaps(x)
    if params.greedy:
        return by_rank(x)[0]
    best = max(x)
    x = filter_all([(v - best) / params.temperature for v in x], params)
    return draw(x, params.seed, len(output))


def mask_and_bias(
    logits: list[float], params: SamplingParams, output: list[int], mask: set[int] | None
) -> list[float]:
    x = [v if mask is None or i in mask else -math.inf for i, v in enumerate(logits)]
    if params.allowed_token_ids is not None:
        x = [v if i in params.allowed_token_ids else -math.inf for i, v in enumerate(x)]
    for word in params.bad_words_token_ids or []:
        start, last = word[:-1], word[-1]
        if output[len(output) - len(start) :] == start and len(start) <= len(output):
            x[last] = -math.inf
    if len(output) < params.min_tokens:
        stops = params.all_stop_token_ids
        masked = [-math.inf if i in stops else v for i, v in enumerate(x)]
        if max(masked) > -math.inf:
            x = masked
    for i, bias in (params.logit_bias or {}).items():
        x[i] += bias
    return x


def penalise(
    x: list[float], params: SamplingParams, prompt: list[int], output: list[int]
) -> list[float]:
    for i in set(prompt) | set(output):
        penalty = params.repetition_penalty
        x[i] = float32(x[i] / penalty if x[i] > 0 else x[i] * penalty)
    for i in set(output):
        x[i] = float32(x[i] - params.frequency_penalty * output.count(i))
        x[i] = float32(x[i] - params.presence_penalty)
    return x


def float32(x: float) -> float:
    """Rounded: of one operation on float32 numbers, what float32 gives at once."""
    return struct.unpack("f", struct.pack("f", x))[0]


def filter_all(x: list[float], params: SamplingParams) -> list[float]:
    """min-p, top-k, top-p; the largest of `x` is 0."""
    if params.min_p:
        least = math.log(params.min_p)
        _check(*(v - least for v in x))
        x = [v if v >= least else -math.inf for v in x]
    if params.top_k:
        kept = by_rank(x)[: params.top_k]
        x = [v if i in kept else -math.inf for i, v in enumerate(x)]
    if params.top_p < 1:
        total = sum(map(math.exp, x))
        before, kept = 0.0, []
        for i in by_rank(x):
            _check((before - params.top_p * total) / total)
            if before < params.top_p * total:
                kept.append(i)
            before += math.exp(x[i])
        x = [v if i in kept else -math.inf for i, v in enumerate(x)]
    return x


def draw(x: list[float], seed: int, position: int) -> int:
    """The token that arrives first, at its exponential number over its weight."""
    times = sorted(
        (exponential(seed, position, i) / math.exp(v), i) for i, v in enumerate(x) if v > -math.inf
    )
    if len(times) > 1:
        _check((times[1][0] - times[0][0]) / times[0][0])
    return times[0][1]


def exponential(seed: int, position: int, token: int) -> float:
    """The exponential number of a token at an output position."""
    high, low = (
        philox(
            (position % 2**32, position // 2**32, token // 4, half), (seed % 2**32, seed // 2**32)
        )[token % 4]
        for half in (0, 1)
    )
    return -math.log(((high * 2**32 + low) // 2**12 + 0.5) / 2**52)


def philox(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    """Philox4x32-10 (Salmon et al. 2011): words lowest first."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        (high0, low0), (high1, low1) = (
            divmod(c0 * 0xD2511F53, 2**32),
            divmod(c2 * 0xCD9E8D57, 2**32),
        )
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + 0x9E3779B9) % 2**32, (k1 + 0xBB67AE85) % 2**32
    return c0, c1, c2, c3


def _check(*distances: float) -> None:
    # Exactly 0 comes from equal inputs and is equal in float32 too.
    if any(0 < abs(d) < CLEAR for d in distances):
        raise Unclear


def _check_gaps(x: list[float]) -> None:
    finite = sorted({v for v in x if v > -math.inf})
    _check(*(b - a for a, b in zip(finite, finite[1:], strict=False)))
