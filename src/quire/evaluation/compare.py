"""Perplexity of a model on given text, and how far it is from a reference.

- perplexity: exp of the mean of -log p(token), over every token that is scored;
- KLD: the divergence of Kullback and Leibler, sum over the whole vocabulary of
  p * (log p - log q), in nats, p the reference's and q the model's probability: its mean over all
  positions, its 99th percentile, its largest;
- same top: the share of positions at which both hold the same token for the likeliest (the lower
  id among equals).

Logits and single terms are float32; sums and their logarithms are float64. Knows no checkpoint.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from quire.errors import ConfigError
from quire.evaluation.windows import Windows

Progress = Callable[[int, int], None]
"""Called with (windows done, of how many)."""


class Passes(Protocol):
    """See `quire.evaluation.scored_model.ModelPass`."""

    def hidden(self, window: Any) -> Tensor:
        """Ids to states."""
        ...

    def logits(self, hidden: Tensor) -> Iterator[Tensor]:
        """States to logits, some rows at a time."""
        ...


@dataclass(frozen=True, slots=True)
class Scores:
    """What was found. Of no reference: `None`."""

    positions: int
    perplexity: float
    reference_perplexity: float | None = None
    kld: float | None = None
    """Mean, nats."""
    kld_p99: float | None = None
    kld_max: float | None = None
    same_top: float | None = None
    """0 to 1."""

    def to_dict(self) -> dict[str, Any]:
        """By name, without what there is none of."""
        return {name: value for name, value in asdict(self).items() if value is not None}


class DistanceTally:
    """Adds up positions."""

    def __init__(self) -> None:
        self._loss: list[Tensor] = []
        self._reference_loss: list[Tensor] = []
        self._kld: list[Tensor] = []
        self._same: list[Tensor] = []

    def add(self, logits: Tensor, targets: Tensor, reference: Tensor | None) -> None:
        """Some positions.

        Args:
            logits: `[T, V]`, each row made of what stands before its target.
            targets: Ids `[T]`.
            reference: As `logits`.
        """
        at = targets[:, None]
        total = _log_sum(logits)[0]
        self._loss.append((total - logits.gather(1, at).flatten()).cpu())
        if reference is None:
            return
        theirs, weights = _log_sum(reference)
        self._reference_loss.append((theirs - reference.gather(1, at).flatten()).cpu())
        # sum of p * (log p - log q) = sum of p * (difference of logits) - difference of totals
        apart = (weights * (reference - logits)).sum(1, dtype=torch.float64)
        kld = apart / weights.sum(1, dtype=torch.float64) - (theirs - total)
        if not bool(kld.isfinite().all()):
            kld = _slow_divergence(reference, logits)
        self._kld.append(kld.clamp_(min=0).cpu())
        self._same.append((logits.argmax(1) == reference.argmax(1)).cpu())

    @property
    def scores(self) -> Scores:
        """Of all positions so far.

        Raises:
            ConfigError: the model gives numbers that are not finite.
        """
        loss = torch.cat(self._loss)
        if not bool(loss.isfinite().all()):
            at = int(loss.isfinite().logical_not().nonzero()[0])
            raise ConfigError(f"the model gives no finite probability to token {at} of the text")
        perplexity = math.exp(float(loss.mean()))
        if not self._kld:
            return Scores(len(loss), perplexity)
        kld = torch.cat(self._kld)
        return Scores(
            len(loss),
            perplexity,
            math.exp(float(torch.cat(self._reference_loss).mean())),
            max(0.0, float(kld.mean())),
            float(kld.quantile(0.99)) if len(kld) < 1 << 24 else float(kld.kthvalue(
                math.ceil(0.99 * len(kld))).values),
            float(kld.max()),
            float(torch.cat(self._same).double().mean()),
        )  # fmt: skip


def _log_sum(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Of rows `[T, V]`: log of the sum of exp, float64 `[T]`, and what p is in proportion to."""
    most = logits.amax(1, keepdim=True)
    weights = (logits - most).exp_()
    total = weights.sum(1, dtype=torch.float64).log_()
    return total.add_(most.squeeze(1)), weights


def _slow_divergence(reference: Tensor, logits: Tensor) -> Tensor:
    """Where some probabilities are 0. What the reference gives none adds nothing, whatever the
    model gives it."""
    theirs, mine = reference.double().log_softmax(1), logits.double().log_softmax(1)
    probable = theirs.exp()
    return torch.where(probable > 0, probable * (theirs - mine), 0.0).sum(1)


def compare(
    windows: Windows, model: Passes, reference: Passes | None = None, tell: Progress | None = None
) -> Scores:
    """Score every window.

    Raises:
        ConfigError: both have vocabularies of different sizes, or the model gives what is no
            number.
    """
    tally = DistanceTally()
    for done, window in enumerate(windows.ids):
        targets = torch.tensor(window)
        states = model.hidden(window)[windows.unscored - 1 : -1]
        theirs = None if reference is None else reference.hidden(window)
        if theirs is not None:
            theirs = theirs[windows.unscored - 1 : -1]
        _add_window(tally, targets[windows.unscored :], (model, states), (reference, theirs))
        if tell is not None:
            tell(done + 1, len(windows.ids))
    return tally.scores


def _add_window(
    tally: DistanceTally,
    targets: Tensor,
    one: tuple[Passes, Tensor],
    other: tuple[Passes | None, Tensor | None],
) -> None:
    """All rows of a window. An iterator of logits may use the memory of its last ones."""
    model, states = one
    reference, theirs = other
    at = 0
    others = reference.logits(theirs) if reference is not None and theirs is not None else None
    for logits in model.logits(states):
        against = None if others is None else next(others)
        if against is not None and against.shape != logits.shape:
            raise ConfigError(
                f"the model has {logits.shape[1]} tokens and the reference {against.shape[1]}: "
                "compare models with the same vocabulary"
            )
        rows = targets[at : at + len(logits)].to(logits.device)
        tally.add(logits, rows, against)
        at += len(logits)
