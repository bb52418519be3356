"""Logits to tokens: one ordered list of steps, each a pure function of a request and its row.

Nothing here knows the ids of requests, the steps of the engine or where logits come from.
"""

from quire.sampling.logprobs import LogprobRow, gather_logprobs
from quire.sampling.masks import TokenMask
from quire.sampling.metadata import RequestSampling, SamplingMetadata
from quire.sampling.sampler import Sampler, SamplerOutput

__all__ = [
    "LogprobRow",
    "RequestSampling",
    "Sampler",
    "SamplerOutput",
    "SamplingMetadata",
    "TokenMask",
    "gather_logprobs",
]
