"""Writes a checkpoint in compressed-tensors' format: the tensors of a float one, with codes in the
place of the weights that have some.

Layouts after compressed-tensors 0.20 (`int-quantized`, `pack-quantized`). One file's tensors are in
memory at a time. The folder has its name only when it is complete. Knows no model.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from quire.compress.codes import Codes
from quire.compress.layers import EXPERT, tensors_beside
from quire.compress.writing import told_of_writing
from quire.weights.files import INDEX, SINGLE, write_safetensors
from quire.weights.formats import Checkpoint

FILE_BYTES: Final = 2 << 30
CodesOf = Callable[[str], Codes | None]
"""By the checkpoint's name of a layer; `None`: it stays."""


def tensors_of(codes: Codes, packed: bool) -> dict[str, Tensor]:
    """What stands in the place of `weight`."""
    if not packed:
        return {"weight": codes.codes, "weight_scale": codes.scales}
    return {
        "weight_packed": packed_codes(codes.codes, codes.bits),
        "weight_scale": codes.scales,
        "weight_shape": torch.tensor(codes.codes.shape, dtype=torch.int64),
    }


def packed_codes(codes: Tensor, bits: int) -> Tensor:
    """Signed codes `[N, K]` of 4 or 8 bits as int32 `[N, ceil(K * bits / 32)]`: code plus the
    middle of the range, the first in the lowest bits."""
    per_word = 32 // bits
    unsigned = codes.to(torch.int64) + (1 << (bits - 1))
    padded = torch.nn.functional.pad(unsigned, (0, -codes.shape[1] % per_word))
    shifts = bits * torch.arange(per_word)
    # Fields do not overlap: their sum is their union, in 64 bits and then cut to 32.
    words = (padded.unflatten(1, (-1, per_word)) << shifts).sum(2)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)


@dataclass
class Group:
    """Layers with the same scheme: experts of a mixture, or other ones.

    Codes of experts are packed, those of 8 bits, too, and say nothing of activations, because that
    is what transformers reads of experts. It finds their group by a regular expression with
    "experts" in it; without one it takes the first group for theirs.
    """

    codes: Codes
    experts: bool
    names: list[str] = field(default_factory=list)

    @property
    def packed(self) -> bool:
        """Whether its codes are."""
        return self.experts or self.codes.bits == 4

    def targets(self, others: Collection[str]) -> list[str]:
        """The entry of that name: names, and one pattern for all experts of a layer where none of
        `others`, the names that are not of this group, is among them."""
        split = {found[1] for found in map(EXPERT.fullmatch, others) if found}
        targets = dict.fromkeys(_target(name, split) for name in self.names)
        return list(targets)

    def entry(self, others: Collection[str]) -> dict[str, Any]:
        """In `config_groups`. `others`: see `targets`."""
        common = {"type": "int", "symmetric": True, "dynamic": False, "actorder": None}
        activations: dict[str, Any] | None = None
        if self.codes.bits == 8:
            weights = {"num_bits": 8, "strategy": "channel", "group_size": None, **common}
        else:
            weights = {"num_bits": 4, "strategy": "group", "group_size": self.codes.group, **common}
        if not self.packed:
            activations = {"num_bits": 8, "type": "int", "symmetric": True, "dynamic": True,
                           "strategy": "token"}  # fmt: skip
        return {"targets": self.targets(others), "weights": weights,
                "input_activations": activations, "output_activations": None,
                "format": "pack-quantized" if self.packed else "int-quantized"}  # fmt: skip


def _target(name: str, split: Collection[str]) -> str:
    """`split`: see `Group.targets`, the beginnings of experts' names."""
    expert = EXPERT.fullmatch(name)
    if expert is None:
        return name
    # vLLM asks for gate_proj, up_proj and down_proj, whatever the checkpoint calls them.
    after = re.escape(expert[2]) if expert[1] in split else r"\..+"
    return f"re:{re.escape(expert[1])}\\d+{after}$"


Groups = dict[tuple[int, int, bool], Group]
"""By bits, columns of a scale (0: rows have one), and whether they are experts."""


def quantization_config(groups: Sequence[Group], kept: Sequence[str]) -> dict[str, Any]:
    """The entry of `config.json`."""
    entries: dict[str, dict[str, Any]] = {}
    # transformers reads all experts by their first group. If that has 8 bits, it refuses those of
    # 4 for their shape; the other way round it would take wrong weights without a word.
    for i, group in enumerate(sorted(groups, key=lambda one: -one.codes.bits)):
        others = [name for other in groups if other is not group for name in other.names]
        entries[f"group_{i}"] = group.entry([*others, *kept])
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

    Raises:
        StartupError: the disk is full, or cannot be written.
    """
    groups: Groups = {}
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
    with told_of_writing():
        _named(out, files)
        for path in tensors_beside(source):
            shutil.copyfile(path, out / path.name)
    config = json.loads((source / "config.json").read_text("utf-8"))
    if groups:
        config["quantization_config"] = quantization_config(list(groups.values()), kept)
    if apart is not None:
        config["tie_word_embeddings"] = False
    with told_of_writing():
        (out / "config.json").write_text(json.dumps(config, indent=2) + "\n", "utf-8")
    return done


def _tensors(
    checkpoint: Checkpoint,
    names: Iterable[str],
    codes_of: CodesOf,
    groups: Groups,
) -> Iterator[tuple[str, Tensor]]:
    for name in names:
        layer = name.removesuffix(".weight")
        codes = codes_of(layer) if layer != name else None
        if codes is None:
            yield name, checkpoint.read(name).contiguous()
            continue
        columns = codes.group if codes.bits == 4 else 0
        experts = EXPERT.fullmatch(layer) is not None
        empty = Codes(codes.bits, codes.codes[:0], codes.scales[:0], codes.group)
        group = groups.setdefault((codes.bits, columns, experts), Group(empty, experts))
        group.names.append(layer)
        for part, tensor in tensors_of(codes, group.packed).items():
            yield f"{layer}.{part}", tensor.contiguous()


def _flush(batch: dict[str, Tensor], out: Path, number: int) -> Mapping[str, int]:
    path = out / f"part-{number}.safetensors"
    with told_of_writing():
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
