"""The JSON files that say what a model is: `config.json` and those beside it.

Opens and parses them; what their entries mean is for `quire.config` to say.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

from quire.errors import ModelLoadError

CONFIG_FILE: Final = "config.json"
QUANTIZATION_FILES: Final = {
    "quantize_config.json": "gptq",
    "quant_config.json": "awq",
    "hf_quant_config.json": "modelopt",
}
"""Files that describe a quantised checkpoint whose config.json does not, and the `quant_method`
that they stand for."""

_OLD_ENTRY: Final = "compression_config"
"""Of older versions of compressed-tensors, in place of `quantization_config`."""
_MLX_ENTRY: Final = "quantization"
"""Of mlx-lm, which has the same as `quantization_config`, without a `quant_method`."""
_MLX_SIZES: Final = ("bits", "group_size")


def read_config(folder: Path) -> dict[str, Any]:
    """The object in `config.json` of a model folder, or the one that a GGUF file stands for.

    Raises:
        ModelLoadError: the folder or the file is missing, or it is not a JSON object.
    """
    path = folder / CONFIG_FILE
    if not path.exists():
        # Imported here: most models are no GGUF, and a start need not wait for that format.
        from quire.checkpoint.gguf_model import config_of, gguf_file

        file = gguf_file(folder)
        if file is not None:
            return config_of(file)
    if not folder.is_dir():
        raise _no_folder(folder)
    data = read_json(path)
    if data is None and not path.exists():
        raise ModelLoadError(f"the model folder {str(folder)!r} has no config.json")
    return _with_quantization(as_object(data, path), folder)


def _with_quantization(config: dict[str, Any], folder: Path) -> dict[str, Any]:
    """The configuration, with what a file beside it says of quantisation."""
    of_mlx = config.get(_MLX_ENTRY)
    if isinstance(of_mlx, dict) and all(type(of_mlx.get(size)) is int for size in _MLX_SIZES):
        return config | {"quantization_config": {**of_mlx, "quant_method": "mlx"}}
    if config.get("quantization_config"):
        return config
    if said := config.get(_OLD_ENTRY):
        entries = as_object(said, folder / CONFIG_FILE)
        return config | {"quantization_config": {"quant_method": "compressed-tensors", **entries}}
    for name, method in QUANTIZATION_FILES.items():
        said = read_json(folder / name)
        if said is not None:
            entries = as_object(said, folder / name)
            return config | {"quantization_config": {"quant_method": method, **entries}}
    return config


def read_json(path: Path) -> Any:
    """The content of a JSON file; `None` if there is no such file, or it holds `null`.

    Raises:
        ModelLoadError: it cannot be read, or is not JSON.
    """
    try:
        return json.loads(path.read_text("utf-8"))
    except (FileNotFoundError, NotADirectoryError):  # a GGUF file is a model without a folder
        return None
    except (ValueError, OSError, RecursionError) as error:
        raise ModelLoadError(f"cannot read {str(path)!r}: {error}") from None


def as_object(data: Any, path: Path) -> dict[str, Any]:
    """What was read from `path`, if it is a JSON object.

    Raises:
        ModelLoadError: it is none.
    """
    if not isinstance(data, dict):
        raise ModelLoadError(f"{str(path)!r} must hold a JSON object")
    return data


def _no_folder(folder: Path) -> ModelLoadError:
    from quire.checkpoint.short_names import advice

    hint = advice(folder.name) if folder.name == str(folder) else ""
    hint = hint or (
        ": give a folder with config.json, tokenizer.json and *.safetensors, a name on the hub "
        "(org/name), or quire-demo"
    )
    return ModelLoadError(f"there is no model folder {str(folder)!r}{hint}")
