"""gpt-oss checkpoints: experts in MXFP4, `…_blocks` and `…_scales`, everything else as it was.

After transformers (`integrations/mxfp4.py`): blocks uint8 `[E, rows, K / 32, 16]`, the lower half
of a byte first; scales are exponents `[E, rows, K / 32]`. Knows no kernel.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire.quantization.checkpoint import QuantisedFormat
from quire.quantization.scheme import Scheme
from quire.quantization.schemes import Fp4
from quire.weights.bundles import StoredPart


def make(config: Mapping[str, Any]) -> QuantisedFormat:
    """The format of a checkpoint by its `quantization_config`."""
    del config  # its list of layers that are left out repeats what the tensors say
    return QuantisedFormat(GptOssMxfp4())


class GptOssMxfp4:
    """A `CheckpointFormat`: layers with blocks are quantised."""

    def scheme(self, part: StoredPart, columns: int) -> Scheme | None:
        """See `CheckpointFormat`."""
        del columns
        if "blocks" not in part.tensors and "scales" not in part.tensors:
            return None
        return Fp4("blocks", "scales", blocks=True)
