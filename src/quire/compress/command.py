"""From a model folder to a quantised one: what `quire quantize` does, step by step."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from quire.compress.choose import Option
from quire.compress.layers import EXPERT, HEAD, LayerUnit, SourceFormat, find_units
from quire.compress.report import read_bandwidth, write_report
from quire.compress.study import PLAIN, Study, Tell, Texts, UnitStudy
from quire.compress.writer import write_checkpoint
from quire.compress.writing import check_out, folder_for, give_name, told_of_writing
from quire.config import EngineConfig, ModelConfig, ModelShape
from quire.engine.llm import LLM
from quire.errors import ConfigError
from quire.evaluation.compare import Scores
from quire.evaluation.windows import Windows, cut
from quire.models.registry import build_model, resolve_dtype
from quire.params import SamplingParams
from quire.tokenizer import Tokenizer
from quire.weights.files import SafetensorsCheckpoint
from quire.weights.formats import Checkpoint
from quire.weights.loader import load_weights

WINDOW: Final = 512
LEAST_TOKENS: Final = 192
"""Of text, without which nothing can be said of a model."""
_SHORTEST: Final = 32
_OWN_TEXTS: Final = 24


@dataclass(frozen=True, slots=True)
class QuantizeOptions:
    """What is asked for."""

    out: Path
    scheme: str = "mixed"
    budget: float | None = None
    """Mean divergence in nats, at most."""
    memory: int | None = None
    """Bytes of all weights, at most."""
    text: str | None = None
    """Text to measure on; `None`: what the model writes itself."""
    max_tokens: int = 6144
    group: int = 128
    head: str = "int8"
    """See `find_units`."""


def quantize(model: ModelConfig, how: QuantizeOptions, tell: Tell) -> dict[str, Any]:
    """Write a quantised copy of a model; gives the report.

    Raises:
        StartupError: the model cannot be quantised so, the text is too short, there is no such
            choice, or OUT cannot be written. Nothing is left behind, except the complete copy under
            another name if something else has made OUT meanwhile.
    """
    check_out(how.out)
    shape = model.read_shape()
    _check_model(model, shape)
    # Made before the work: a folder that cannot be made is told of at once.
    with folder_for(how.out) as made:
        windows = _windows(model, how, shape)
        report = _quantized(model, shape, how, Texts.of(windows), made, tell)
        give_name(made / "out", how.out)
    return report


def _check_model(model: ModelConfig, shape: ModelShape) -> None:
    said = shape.raw.get("quantization_config")
    if said:
        method = said.get("quant_method") if isinstance(said, dict) else None
        raise ConfigError(
            f"{model.model!r} is quantised already{f' ({method})' if method else ''}: give the "
            "model that it was made of"
        )
    if not model.folder.is_dir() or not list(model.folder.glob("*.safetensors")):
        raise ConfigError(
            f"{model.model!r} has no *.safetensors, which is what is read and written: convert it"
        )


def _windows(model: ModelConfig, how: QuantizeOptions, shape: ModelShape) -> Windows:
    tokenizer = Tokenizer.from_folder(model.tokenizer_folder)
    text = how.text
    if text is None:
        text = _own_text(model, shape)
    ids = tokenizer.encode(text, add_special_tokens=False)[: how.max_tokens]
    if len(ids) < LEAST_TOKENS:
        where = "--calibration-tokens" if how.max_tokens < LEAST_TOKENS else "the calibration text"
        raise ConfigError(
            f"{where}: at least {LEAST_TOKENS} tokens are needed, there are {len(ids)}: give more"
        )
    length = min(WINDOW, shape.length_limit, max(_SHORTEST, len(ids) // 9))
    found = cut(tokenizer, text, length, max(3, how.max_tokens // length))
    return found


def _own_text(model: ModelConfig, shape: ModelShape) -> str:
    """What the model writes after nothing, with seeds of its own: the same each time."""
    length = min(shape.length_limit, 257)
    params = [
        SamplingParams(temperature=1, seed=i, max_tokens=length - 1, ignore_eos=True)
        for i in range(_OWN_TEXTS)
    ]
    with LLM(model.model, max_model_len=length, revision=model.revision) as llm:
        tokenizer = llm.get_tokenizer()
        begin = tokenizer.bos_token_id
        if begin is None:
            begin = tokenizer.eos_token_id or 0
        given: Any = [{"prompt_token_ids": [begin]}] * len(params)
        outputs = llm.generate(given, params, use_tqdm=False)
    return "\n".join(output.outputs[0].text for output in outputs)


def _quantized(
    model: ModelConfig,
    shape: ModelShape,
    how: QuantizeOptions,
    texts: Texts,
    folder: Path,
    tell: Tell,
) -> dict[str, Any]:
    dtype = resolve_dtype(shape, model.dtype)
    loaded = build_model(shape, dtype, "cpu", weights=SourceFormat())
    load_weights(
        model.folder, loaded.parameters(), loaded.name_rules(), loaded.dtype, "cpu",
        lambda done, total: tell("Loading weights", done, total),
    )  # fmt: skip
    units = find_units(loaded, loaded.is_tied, how.head, _head_kept(model, how, loaded.is_tied))
    if all(unit.kept_because for unit in units):
        raise ConfigError(f"no layer can be quantised: {units[0].name}: {units[0].kept_because}")
    with told_of_writing():
        (folder / "out").mkdir()
    with SafetensorsCheckpoint(model.folder) as checkpoint:
        study = Study(
            loaded, units, checkpoint, texts, how.scheme, how.group, folder / "codes", tell
        )
        beside = _bytes_beside(checkpoint, study.units)
        room = None if how.memory is None else how.memory - beside
        if room is not None:
            study.check_room(room)
        study.measure()
        apart = any(of.unit.apart for of in study.units)
        chosen, by = study.choose(how.budget, room)
        held = study.held_out(chosen)
        _write(checkpoint, model.folder, folder / "out", study, chosen, units, tell)
        taken = [s.options[chosen[s.unit.name]] for s in study.units]
        before = [s.options[PLAIN] for s in study.units]
        report = _report(model, how, study.units, units, chosen, by, held)
        multiplied = beside - _never_multiplied(checkpoint, loaded.is_tied and not apart)
    bandwidth = read_bandwidth()
    read = [multiplied + sum(one.bytes_read for one in options) for options in (taken, before)]
    report |= {
        "bytes": beside + sum(one.nbytes for one in taken),
        "bytes_before": beside + sum(one.nbytes for one in before),
        "bandwidth": bandwidth,
        "predicted_tokens_per_second": bandwidth / max(1, read[0]),
        "predicted_before": bandwidth / max(1, read[1]),
    }
    with told_of_writing():
        report["plot"] = write_report(folder / "out", report)
    return report


def _bytes_beside(checkpoint: Checkpoint, studies: Sequence[UnitStudy]) -> int:
    """Of all tensors that no choice changes."""
    changed = [s.unit for s in studies if not s.unit.apart]
    own = sum(part.tensors["weight"].nbytes for unit in changed for _, part in unit.parts)
    return sum(stored.nbytes for stored in checkpoint.tensors.values()) - own


def _head_kept(model: ModelConfig, how: QuantizeOptions, tied: bool) -> str | None:
    """Why the head stays as it is whatever was asked for; `None`: it need not.

    Raises:
        ConfigError: it is no embedding, and was to stay one.
    """
    if how.head == "shared" and not tied:
        raise ConfigError(
            f"--head shared: the head of {model.model!r} is not its embedding; take int8"
        )
    if how.head != "int8" or not tied:
        return None
    if how.memory is not None:
        return "it is the embedding, and apart from it would take more memory: see --head shared"
    if "text_config" in json.loads((model.folder / "config.json").read_text("utf-8")):
        return "it is the embedding of one part of the model"
    return None


def _never_multiplied(checkpoint: Checkpoint, tied: bool) -> int:
    """Bytes of embeddings of which a token needs one row: those that are no head too."""
    if tied:
        return 0
    names = [n for n in checkpoint.tensors if "embed" in n or "wte" in n]
    return sum(checkpoint.tensors[name].nbytes for name in names)


def _write(
    checkpoint: Checkpoint,
    source: Path,
    out: Path,
    study: Study,
    chosen: Mapping[str, str],
    units: Sequence[LayerUnit],
    tell: Tell,
) -> None:
    places = {
        HEAD if of.unit.apart else part.name: (of, index)
        for of in study.units
        for index, (_, part) in enumerate(of.unit.parts)
        if chosen[of.unit.name] != PLAIN
    }

    def codes_of(layer: str) -> Any:
        if layer not in places:
            return None
        of, index = places[layer]
        return study.codes_of_part(of, chosen[of.unit.name], index)

    names = [part.name for unit in units for _, part in unit.parts]
    kept = [name for name in [*names, HEAD] if name not in places]
    apart = any(of.unit.apart and chosen[of.unit.name] != PLAIN for of in study.units)
    write_checkpoint(
        checkpoint, source, out, codes_of, sorted(set(kept)),
        lambda done, total: tell("Writing", done, total), HEAD if apart else None,
    )  # fmt: skip


def _report(
    model: ModelConfig,
    how: QuantizeOptions,
    studies: Sequence[UnitStudy],
    units: Sequence[LayerUnit],
    chosen: Mapping[str, str],
    by: Scores,
    held: Scores,
) -> dict[str, Any]:
    return {
        "model": model.model,
        "out": str(how.out),
        "scheme": how.scheme,
        "budget_kld": how.budget,
        "memory": how.memory,
        "held_out": held.to_dict(),
        "held_out_within_budget": how.budget is None or (held.kld or 0.0) <= how.budget,
        "chosen_by": by.to_dict(),
        "transformers": _unread_because(how, studies, units, chosen),
        "head_apart": any(s.unit.apart and chosen[s.unit.name] != PLAIN for s in studies),
        "kept": {unit.name: unit.kept_because for unit in units if unit.kept_because},
        "layers": [
            {
                "name": study.unit.name,
                "choice": chosen[study.unit.name],
                "method": study.method if "int4" in study.options else None,
                "group_size": study.group or None,
                "bytes": {name: option.nbytes for name, option in study.options.items()},
                "kld": _klds(study.options) | _ways(study),
            }
            for study in studies
        ],
    }


def _unread_because(
    how: QuantizeOptions,
    studies: Sequence[UnitStudy],
    units: Sequence[LayerUnit],
    chosen: Mapping[str, str],
) -> str | None:
    """Why transformers 5 with compressed-tensors 0.20 does not read it as it is; `None`: it does.

    It takes one scheme for all experts of a model, and with `dequantize=True`, which a quantised
    embedding needs, one scheme for all other layers.
    """
    schemes = {s.unit.name: (chosen[s.unit.name], _group_of(s, chosen)) for s in studies}
    plain = (PLAIN, 0)
    if all(scheme == plain for scheme in schemes.values()):
        return None
    experts = {schemes.get(unit.name, plain) for unit in units if _is_one_by_one(unit)}
    if len(experts) > 1 or plain in experts:
        return "cannot read it: experts are not all of one scheme, as with --scheme int4 or int8"
    head = next((s.unit for s in studies if s.unit.is_head), None)
    if how.head != "shared" or head is None or schemes[head.name] == plain:
        return None
    if len({scheme for scheme in schemes.values() if scheme != plain}) > 1:
        return "cannot read it: the embedding is quantised, and layers are not all int8; see --head"
    return "reads it with CompressedTensorsConfig(dequantize=True) alone: see --head"


def _group_of(study: UnitStudy, chosen: Mapping[str, str]) -> int:
    return study.group if chosen[study.unit.name] == "int4" else 0


def _is_one_by_one(unit: LayerUnit) -> bool:
    """Whether these are experts that have tensors of their own in the checkpoint."""
    stored = (part.tensors["weight"].name for _, part in unit.parts)
    return any(EXPERT.fullmatch(name) for name in stored)


def _klds(options: Mapping[str, Option]) -> dict[str, float]:
    return {name: option.kld for name, option in options.items() if name not in (PLAIN, "int4")}


def _ways(study: UnitStudy) -> dict[str, float]:
    return {f"int4, {name}": kld for name, kld in study.methods.items()}


def located_model(name: str, options: Mapping[str, Any]) -> ModelConfig:
    """The model on this machine, downloaded if necessary.

    Raises:
        StartupError: it is not found.
    """
    from quire.config.locate import located

    config = EngineConfig(model=dataclasses.replace(ModelConfig(model=name), **options))
    return located(config).model
