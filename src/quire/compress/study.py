"""What each way to keep each layer costs, measured on text; and the choice that is then verified.

The text is cut into windows that take turns: one part is what GPTQ sees, one is what choices are
made by, and one, which nothing was fitted to, is what the result is judged by. A layer's cost is
the divergence of the model in which it alone is quantised from the model as it was. In memory are
the model, the codes of what is chosen, and one layer's numbers. Knows no file format.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from quire.compress.choose import Option, nearest, smallest, too_little
from quire.compress.codes import Codes, int4_codes, int8_codes
from quire.compress.layers import EXPERT, LayerUnit, bias_of, swap, trial, weight_of
from quire.compress.writing import told_of_writing
from quire.config.online_schemes import GROUPS
from quire.errors import ConfigError
from quire.evaluation.compare import Scores, compare
from quire.evaluation.scored_model import ROWS, ModelPass
from quire.evaluation.windows import Windows
from quire.layers.linear import Linear
from quire.layers.linear_method import LinearMethod
from quire.quantization.scheme import of_integers
from quire.weights.files import SafetensorsCheckpoint, write_safetensors
from quire.weights.formats import Checkpoint

PLAIN: Final = "as it was"
SCHEMES: Final = {"int8": ("int8",), "int4": ("int4",), "mixed": ("int8", "int4")}
"""Options besides `PLAIN`, by the scheme's name."""
_HESSIANS: Final = 1 << 30
"""Bytes of all that are collected in one pass."""
_TURNS: Final = 8
"""Times that a choice is made, measured, and made again with another budget."""
Tell = Callable[[str, int, int], None]
"""Called with (phase, done, total)."""


@dataclass(frozen=True, slots=True)
class Texts:
    """Windows of the three parts."""

    fitted: Windows
    chosen: Windows
    held_out: Windows

    @classmethod
    def of(cls, windows: Windows) -> Texts:
        """Every third window each."""
        return cls(*(Windows(windows.ids[i::3], windows.unscored) for i in range(3)))


@dataclass
class UnitStudy:
    """What was found of a unit."""

    unit: LayerUnit
    options: dict[str, Option] = field(default_factory=dict)
    methods: dict[str, float] = field(default_factory=dict)
    """Divergence of each way to make int4 codes that was tried: `nearest`, `gptq`."""
    group: int = 0
    """Columns of a scale of its int4; 0: no group fits."""

    @property
    def method(self) -> str:
        """The better way to make int4 codes."""
        return min(self.methods, key=lambda name: self.methods[name])


class Remembered:
    """The model as it was, as the reference: its states were kept, its head is still there."""

    def __init__(self, model: Any, passes: ModelPass, head: Linear | None) -> None:
        self._model, self._head = model, head
        self._original = None if head is None else head.method
        self._passes = passes
        self._states: dict[tuple[int, ...], Tensor] = {}

    def remember(self, windows: Windows) -> None:
        """Compute the states of windows now."""
        for window in windows.ids:
            self._states[tuple(window)] = self._passes.hidden(window)

    def hidden(self, window: Sequence[int]) -> Tensor:
        """Those that were computed."""
        return self._states[tuple(window)]

    def logits(self, hidden: Tensor) -> Iterator[Tensor]:
        """By the head as it was."""
        for some in hidden.split(ROWS):
            now = None if self._head is None else self._head.method
            if self._head is None or now is self._original:
                yield self._model.compute_logits(some)
                continue
            assert self._original is not None and now is not None
            self._head.use(self._original)
            found = self._model.compute_logits(some)
            self._head.use(now)
            yield found


class RecordingMethod(LinearMethod):
    """A method around another one that adds up x x^T of what it multiplies."""

    def __init__(self, inner: LinearMethod) -> None:
        super().__init__(inner.spec)
        self.inner = inner
        columns = inner.spec.in_features
        self.hessian = torch.zeros(columns, columns)

    def _seen(self, x: Tensor) -> None:
        wide = x.to(torch.float32)
        self.hessian.addmm_(wide.t(), wide)

    def apply(
        self, x: Tensor, out_dtype: torch.dtype | None = None, keep: str | None = None
    ) -> Tensor:
        """See `LinearMethod.apply`."""
        self._seen(x)
        return self.inner.apply(x, out_dtype, keep)

    def gated(self, x: Tensor, activation: str, keep: str | None = None) -> Tensor:
        """See `LinearMethod.gated`."""
        self._seen(x)
        return self.inner.gated(x, activation, keep)

    def rows(self, ids: Tensor, dtype: torch.dtype) -> Tensor:
        """See `LinearMethod.rows`."""
        return self.inner.rows(ids, dtype)


class Study:
    """Measures a model's layers.

    Args:
        model: Loaded with `SourceFormat`.
        units: Of it.
        checkpoint: Where its weights are read again.
        texts: What it is measured on.
        scheme: A name in `SCHEMES`.
        group: Columns of a scale of int4, at most.
        scratch: Folder for codes until they are written.
        tell: Hears of the progress.
    """

    def __init__(
        self,
        model: Any,
        units: Sequence[LayerUnit],
        checkpoint: Checkpoint,
        texts: Texts,
        scheme: str,
        group: int,
        scratch: Path,
        tell: Tell,
    ) -> None:
        self._model, self._checkpoint, self._texts = model, checkpoint, texts
        self._scratch, self._tell = scratch, tell
        self._kinds = SCHEMES[scheme]
        self.dtype: torch.dtype = model.dtype
        self.units = [UnitStudy(u, group=_group(u, group)) for u in units if not u.kept_because]
        _align_experts(self.units)
        longest = max(map(len, texts.chosen.ids))
        name = str(self.dtype).removeprefix("torch.")
        self._passes = ModelPass(model, max(longest, max(map(len, texts.fitted.ids))), name)
        head = next((u.linears[0] for u in units if u.is_head), None)
        self._reference = Remembered(model, self._passes, head)
        for windows in (texts.chosen, texts.held_out):
            self._reference.remember(windows)

    def check_room(self, memory: int) -> None:
        """Refuse what no choice can keep to, before anything is measured: scales do not count.

        Raises:
            ConfigError: `memory` bytes are less than the codes of all layers.
        """
        least = sum(study.unit.weights * self._least_bits(study) // 8 for study in self.units)
        if least > memory:
            raise too_little(least, memory)

    def _least_bits(self, study: UnitStudy) -> int:
        if study.unit.apart:
            return 0
        return 4 if "int4" in self._kinds and study.group else 8

    # ---- one by one ---------------------------------------------------------------------------

    def measure(self) -> None:
        """Fill every unit's options."""
        done, total = 0, len(self.units)
        for some in self._by_memory():
            hessians = self._hessians(some)
            for study in some:
                self._measure_unit(study, hessians.get(study.unit.name))
                done += 1
                self._tell("Measuring layers", done, total)

    def _by_memory(self) -> Iterator[list[UnitStudy]]:
        some: list[UnitStudy] = []
        for study in self.units:
            some.append(study)
            if sum(4 * one.unit.columns**2 for one in some) > _HESSIANS:
                yield some
                some = []
        if some:
            yield some

    def _hessians(self, some: Sequence[UnitStudy]) -> dict[str, Tensor]:
        """Of units with one linear layer that may become int4. Experts see too few tokens each."""
        wanted = [s.unit for s in some if s.group and len(s.unit.linears) == 1]
        if "int4" not in self._kinds or not wanted:
            return {}
        methods = {unit.name: RecordingMethod(unit.originals[0]) for unit in wanted}
        for unit in wanted:
            swap(self._model, unit, [methods[unit.name]])
        for window in self._texts.fitted.ids:
            self._passes.hidden(window)
        for unit in wanted:
            swap(self._model, unit, unit.originals)
        return {name: method.hessian for name, method in methods.items()}

    def _measure_unit(self, study: UnitStudy, hessian: Tensor | None) -> None:
        unit = study.unit
        whole = unit.weights * self.dtype.itemsize
        # The embedding stays whatever becomes of a head apart from it, and is the head without it.
        study.options[PLAIN] = Option(0 if unit.apart else whole, 0.0, whole)
        if "int8" in self._kinds or not study.group:
            codes = [int8_codes(weight, self.dtype) for weight in self._weights(unit)]
            study.options["int8"] = Option(_bytes_of(codes), self._cost(unit, codes))
        if "int4" not in self._kinds or not study.group:
            return
        tried = {"nearest": None} if hessian is None else {"nearest": None, "gptq": hessian}
        kept: list[Codes] = []
        for name, seen in tried.items():
            codes = [
                int4_codes(weight, study.group, self.dtype, seen) for weight in self._weights(unit)
            ]
            study.methods[name] = self._cost(unit, codes)
            if study.method == name:
                kept = codes
        study.options["int4"] = Option(_bytes_of(kept), study.methods[study.method])
        tensors = {f"{i}.codes": one.codes for i, one in enumerate(kept)}
        tensors |= {f"{i}.scales": one.scales for i, one in enumerate(kept)}
        place = self._place(unit)
        with told_of_writing():
            place.mkdir(parents=True)
            write_safetensors(tensors, place / "model.safetensors")

    def _weights(self, unit: LayerUnit) -> Iterator[Tensor]:
        for _, part in unit.parts:
            yield weight_of(self._checkpoint, part, self.dtype)

    def _cost(self, unit: LayerUnit, codes: Sequence[Codes]) -> float:
        self._use(unit, codes)
        found = compare(self._texts.chosen, self._passes, self._reference)
        swap(self._model, unit, unit.originals)
        assert found.kld is not None
        return found.kld

    def _use(self, unit: LayerUnit, codes: Sequence[Codes]) -> None:
        """Compute with codes, as a reader of the checkpoint does."""
        of_linear: dict[int, list[Any]] = {}
        for (i, part), one in zip(unit.parts, codes, strict=True):
            # Packed codes say nothing of activations: see `quire.compress.writer.Group`.
            packed = one.bits == 4 or EXPERT.fullmatch(part.name) is not None
            activations = of_integers() if packed else "int8"
            of_linear.setdefault(i, []).append(one.coded(activations))
        swap(self._model, unit, [
            trial(original, of_linear[i], bias_of(self._checkpoint, original), unit.apart)
            for i, original in enumerate(unit.originals)
        ])  # fmt: skip

    # ---- all together -------------------------------------------------------------------------

    def codes_of(self, study: UnitStudy, choice: str) -> list[Codes]:
        """The codes of each part of a unit for an option; nothing for `PLAIN`."""
        if choice == PLAIN:
            return []
        return [self.codes_of_part(study, choice, i) for i, _ in enumerate(study.unit.parts)]

    def codes_of_part(self, study: UnitStudy, choice: str, index: int) -> Codes:
        """Of one part: made anew, or as they were kept when they were measured."""
        if choice == "int8":
            part = list(study.unit.parts)[index][1]
            return int8_codes(weight_of(self._checkpoint, part, self.dtype), self.dtype)
        with SafetensorsCheckpoint(self._place(study.unit)) as kept:
            codes, scales = (kept.read(f"{index}.{what}").clone() for what in ("codes", "scales"))
        return Codes(4, codes, scales, study.group)

    def _place(self, unit: LayerUnit) -> Path:
        return self._scratch / f"codes-{unit.name.replace('*', 'all')}"

    def choose(self, budget: float | None, memory: int | None) -> tuple[dict[str, str], Scores]:
        """An option for each unit, and how the whole model then is on the text for choices.

        Args:
            budget: Mean divergence, at most; `None`: any.
            memory: Bytes of all units, at most; `None`: any.

        Raises:
            ConfigError: there is no such choice.
        """
        options = {study.unit.name: study.options for study in self.units}
        if budget is None:
            chosen = (
                {name: min(of, key=lambda o: of[o].bytes_read) for name, of in options.items()}
                if memory is None
                else nearest(options, memory)
            )
            return chosen, self._judged(chosen, self._texts.chosen)
        chosen, found = self._within(options, budget)
        taken = sum(options[name][choice].nbytes for name, choice in chosen.items())
        if memory is not None and taken > memory:
            raise ConfigError(
                f"a divergence of {budget:g} takes {taken:,} bytes of layers, and --memory leaves "
                f"{max(0, memory):,}: allow more of one of them"
            )
        return chosen, found

    def _within(
        self, options: Mapping[str, Mapping[str, Option]], budget: float
    ) -> tuple[dict[str, str], Scores]:
        """Few bytes whose measured divergence is within the budget: what is chosen by the sum of
        the layers' is measured, and the sum allowed is corrected by what was found."""
        best: tuple[int, dict[str, str], Scores] | None = None
        allowed, seen = budget, set[tuple[str, ...]]()
        for turn in range(_TURNS):
            chosen = smallest(options, allowed)
            if tuple(chosen.values()) in seen:
                break
            seen.add(tuple(chosen.values()))
            found = self._judged(chosen, self._texts.chosen)
            self._tell("Verifying choices", turn + 1, _TURNS)
            assert found.kld is not None
            taken = sum(options[name][choice].bytes_read for name, choice in chosen.items())
            if found.kld <= budget and (best is None or taken < best[0]):
                best = taken, chosen, found
            allowed *= min(4.0, max(0.1, 0.98 * budget / max(found.kld, 1e-12)))
        if best is None:
            chosen = smallest(options, 0.0)
            best = 0, chosen, self._judged(chosen, self._texts.chosen)
        return best[1], best[2]

    def _judged(self, chosen: Mapping[str, str], windows: Windows) -> Scores:
        for study in self.units:
            codes = self.codes_of(study, chosen[study.unit.name])
            if codes:
                self._use(study.unit, codes)
            else:
                swap(self._model, study.unit, study.unit.originals)
        return compare(windows, self._passes, self._reference)

    def held_out(self, chosen: Mapping[str, str]) -> Scores:
        """How the whole model is on text that nothing was fitted to."""
        return self._judged(chosen, self._texts.held_out)


def _bytes_of(codes: Sequence[Codes]) -> int:
    return sum(one.nbytes for one in codes)


def _align_experts(studies: Sequence[UnitStudy]) -> None:
    """Give all experts the smallest group that one of them needs: transformers reads experts of a
    model with one scheme only."""
    experts = [study for study in studies if study.unit.is_experts and study.group]
    for study in experts:
        study.group = min(other.group for other in experts)


def _group(unit: LayerUnit, most: int) -> int:
    """0: no int4. Heads get none, as online: they decide about every token, and int8 halves them
    already."""
    if unit.is_head:
        return 0
    fits = (g for g in sorted(GROUPS, reverse=True) if g <= most and unit.leaf % g == 0)
    return next(fits, 0)
