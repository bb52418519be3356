"""Quantised checkpoints with random damage, in the configuration and in the tensors: each loads, or
is refused in one sentence of its own."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from fuzz_kit import cases
from hostile import PLAIN, damage
from quantised_writers import FORMATS, checkpoint
from quire.config import ModelShape
from quire.errors import QuireError
from quire.models.registry import load_model

COPIES = 6
"""Of one format, in a case."""
LONGEST = 1200
"""Characters of a refusal: it may list what there is, but not repeat what was given."""
ENTRIES = (
    *PLAIN,
    3, 4, 8, 16, 32, 64, 128, [1, 128], [128, 128],
    "int", "float", "int8", "group", "channel", "tensor", "block", "gptq", "awq", "fp8",
    "compressed-tensors", "re:.*", "re:(",
)  # fmt: skip
DTYPES = (
    torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int8, torch.uint8,
    torch.float8_e4m3fn, torch.bool,
)  # fmt: skip
NUMBERS = (float("nan"), float("inf"), -1, 0, 1e30, 255, 127, -128, 2**31 - 1)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A good checkpoint of each format."""
    return {
        name: checkpoint(tmp_path_factory.mktemp("good"), make(), layers=1)[1]
        for name, make in FORMATS.items()
    }


def damaged_tensor(rng: random.Random, tensor: Tensor) -> Tensor | None:
    """One of another shape or type, with another number in it, or none."""
    some = tensor.dim() > 0 and len(tensor) > 0
    ways = {
        "none": lambda: None,
        "type": lambda: tensor.float().to(rng.choice(DTYPES)),
        "turned": lambda: tensor.mT if tensor.dim() > 1 else tensor,
        "short": lambda: tensor[: rng.randrange(len(tensor))] if some else tensor,
        "long": lambda: torch.cat([tensor, tensor[:1]]) if some else tensor,
        "deep": lambda: tensor.unsqueeze(rng.choice([0, -1])),
        "flat": lambda: tensor.reshape(-1),
        "number": lambda: with_number(rng, tensor),
    }
    return ways[rng.choice(sorted(ways))]()


def with_number(rng: random.Random, tensor: Tensor) -> Tensor:
    """Another number at one place."""
    changed = tensor.clone()
    if changed.numel():
        number = rng.choice(NUMBERS)
        if not changed.dtype.is_floating_point:
            number = int(number) if abs(number) < 2**62 else 1
            low, high = (0, 1) if changed.dtype == torch.bool else limits(changed.dtype)
            number = min(max(number, low), high)
        changed.view(-1)[rng.randrange(changed.numel())] = number
    return changed


def limits(dtype: torch.dtype) -> tuple[int, int]:
    info = torch.iinfo(dtype)
    return info.min, info.max


@cases(len(FORMATS))
def test_damage_is_told_or_does_no_harm(
    rng: random.Random, fuzz_number: int, written: dict[str, Path], tmp_path: Path
) -> None:
    good = written[sorted(FORMATS)[fuzz_number % len(FORMATS)]]
    refused: set[int] = set()
    for number in range(COPIES):
        folder = tmp_path / str(number)
        shutil.copytree(good, folder)
        config = json.loads((folder / "config.json").read_text())
        tensors: dict[str, Tensor] = load_file(folder / "model.safetensors")
        done = []
        for _ in range(rng.randint(1, 2)):
            if rng.random() < 0.5:
                said = config.get("quantization", config.get("quantization_config"))
                inside = said if isinstance(said, dict) and said and rng.random() < 0.8 else config
                done.append(damage(rng, inside, ENTRIES))
            else:
                name = rng.choice(sorted(name for name in tensors if ".layers." in name))
                changed = damaged_tensor(rng, tensors.pop(name))
                if changed is not None:
                    tensors[name] = changed.contiguous()
                done.append(f"{name}: {None if changed is None else changed.shape}")
        if number == 0:  # some damage is always told
            largest = max(tensors, key=lambda name: tensors[name].numel())
            tensors[largest] = tensors[largest].flatten()[:-1]
        (folder / "config.json").write_text(json.dumps(config))
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
        try:
            load_model(ModelShape.from_folder(folder), folder, "float32", "cpu", max_model_len=64)
        except QuireError as error:
            refused.add(number)
            assert 0 < len(error.message) < LONGEST and "\n" not in error.message, done
        except Exception as error:
            raise AssertionError(f"{good.parent.name}: {done}") from error
        shutil.rmtree(folder)
    assert 0 in refused
