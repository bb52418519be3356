"""Writes a checkpoint in compressed-tensors' format: the tensors of a float one, with codes in the
place of the weights that have some.

Layouts after compressed-tensors 0.20 (`int-quantized`, `pack-quantized`). One file's tensors are in
memory at a time. The folder has its name only when it is complete. Knows no model.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from quire.compress.codes import Codes
from quire.compress.layers import tensors_beside
from quire.weights.files import INDEX, SINGLE, write_safetensors
from quire.weights.formats import Checkpoint

FILE_BYTES: Final = 2 << 30
_PER_WORD: Final = 8
"""Codes of 4 bits in a word of 32."""
CodesOf = Callable[[str], Codes | None]
"""By the checkpoint's name of a layer; `None`: it stays."""


def tensors_of(codes: Codes) -> dict[str, Tensor]:
    """What stands in the place of `weight`."""
    if codes.bits == 8:
        return {"weight": codes.codes, "weight_scale": codes.scales}
    return {
        "weight_packed": packed_nibbles(codes.codes),
        "weight_scale": codes.scales,
        "weight_shape": torch.tensor(codes.codes.shape, dtype=torch.int64),
    }


def packed_nibbles(codes: Tensor) -> Tensor:
    """-8 to 7 `[N, K]` as int32 `[N, K / 8]`: code + 8, the first in the lowest bits."""
    unsigned = (codes.to(torch.int32) + 8).unflatten(1, (-1, _PER_WORD))
    shifts = 4 * torch.arange(_PER_WORD, dtype=torch.int32)
    # Fields do not overlap: their sum is their union, in 64 bits and then cut to 32.
    words = (unsigned.to(torch.int64) << shifts).sum(2)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)


@dataclass
class Group:
    """Layers with the same scheme."""

    codes: Codes
    names: list[str] = field(default_factory=list)

    def entry(self) -> dict[str, Any]:
        """In `config_groups`."""
        common = {"type": "int", "symmetric": True, "dynamic": False, "actorder": None}
        if self.codes.bits == 8:
            activations = {"num_bits": 8, "type": "int", "symmetric": True, "dynamic": True,
                           "strategy": "token"}  # fmt: skip
            weights = {"num_bits": 8, "strategy": "channel", "group_size": None, **common}
            form = "int-quantized"
        else:
            activations = None
            weights = {"num_bits": 4, "strategy": "group", "group_size": self.codes.group, **common}
            form = "pack-quantized"
        return {"targets": self.names, "weights": weights, "input_activations": activations,
                "output_activations": None, "format": form}  # fmt: skip


def quantization_config(groups: Sequence[Group], kept: Sequence[str]) -> dict[str, Any]:
    """The entry of `config.json`."""
    entries = {f"group_{i}": group.entry() for i, group in enumerate(groups)}
    forms = {entry["format"] for entry in entries.values()}
    return {
        "quant_method": "compressed-tensors",
        "format": forms.pop() if len(forms) == 1 else "mixed-precision",
        "quantization_status": "compressed",
        "config_groups": entries,
        "ignore": sorted(kept),
        "kv_cache_scheme": None,
        "global_compression_ratio": None,
    }


def write_checkpoint(
    checkpoint: Checkpoint,
    source: Path,
    out: Path,
    codes_of: CodesOf,
    kept: Sequence[str],
    tell: Callable[[int, int], None],
    apart: str | None = None,
) -> int:
    """Write all of a model folder.

    Args:
        checkpoint: Of `source`, opened.
        source: The folder; its configuration and tokenizer are copied.
        out: A folder that exists and is empty.
        codes_of: See `CodesOf`.
        kept: Names of linear layers that stay, for readers that look for such.
        tell: Hears bytes.
        apart: Name of a head that `codes_of` has, and that was the embedding so far.

    Returns:
        Bytes of all tensors.
    """
    groups: dict[tuple[int, int], Group] = {}
    files: list[Mapping[str, int]] = []
    batch: dict[str, Tensor] = {}
    done = 0
    names = dict.fromkeys(checkpoint.tensors)
    if apart is not None:
        names[f"{apart}.weight"] = None  # some checkpoints have a copy of the embedding there
    for name, tensor in _tensors(checkpoint, names, codes_of, groups):
        batch[name] = tensor
        done += tensor.nbytes
        if sum(one.nbytes for one in batch.values()) > FILE_BYTES:
            files.append(_flush(batch, out, len(files)))
        tell(done, checkpoint.total_bytes)
    files.append(_flush(batch, out, len(files)))
    _named(out, files)
    for path in tensors_beside(source):
        shutil.copyfile(path, out / path.name)
    config = json.loads((source / "config.json").read_text("utf-8"))
    if groups:
        config["quantization_config"] = quantization_config(list(groups.values()), kept)
    if apart is not None:
        config["tie_word_embeddings"] = False
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n", "utf-8")
    return done


def _tensors(
    checkpoint: Checkpoint,
    names: Iterable[str],
    codes_of: CodesOf,
    groups: dict[tuple[int, int], Group],
) -> Iterator[tuple[str, Tensor]]:
    for name in names:
        layer = name.removesuffix(".weight")
        codes = codes_of(layer) if layer != name else None
        if codes is None:
            yield name, checkpoint.read(name).contiguous()
            continue
        group = codes.group if codes.bits == 4 else 0
        empty = Codes(codes.bits, codes.codes[:0], codes.scales[:0], codes.group)
        groups.setdefault((codes.bits, group), Group(empty)).names.append(layer)
        for part, tensor in tensors_of(codes).items():
            yield f"{layer}.{part}", tensor.contiguous()


def _flush(batch: dict[str, Tensor], out: Path, number: int) -> Mapping[str, int]:
    path = out / f"part-{number}.safetensors"
    path.touch()  # with the permissions of new files, which the library would not give it
    mode = path.stat().st_mode
    write_safetensors(batch, path)
    path.chmod(mode)
    names = {name: tensor.nbytes for name, tensor in batch.items()}
    batch.clear()
    return names


def _named(out: Path, files: Sequence[Mapping[str, int]]) -> None:
    """Give files the names that readers look for, and write their index."""
    if len(files) == 1:
        (out / "part-0.safetensors").rename(out / SINGLE)
        return
    where = {}
    for number, names in enumerate(files):
        name = f"model-{number + 1:05d}-of-{len(files):05d}.safetensors"
        (out / f"part-{number}.safetensors").rename(out / name)
        where |= dict.fromkeys(names, name)
    total = sum(sum(names.values()) for names in files)
    index = {"metadata": {"total_size": total}, "weight_map": where}
    (out / INDEX).write_text(json.dumps(index, indent=2) + "\n", "utf-8")
