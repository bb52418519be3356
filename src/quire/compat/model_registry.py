"""vLLM's `ModelRegistry` over the table of model families."""

from __future__ import annotations

from typing import Any


class ModelRegistry:
    """The architectures that quire supports."""

    @staticmethod
    def get_supported_archs() -> set[str]:
        """Architectures as `config.json` names them, those of plugins among them."""
        from quire.config.encoders import ENCODERS
        from quire.models.registry import MODELS

        return {*MODELS.names(), *(f"{family}Model" for family in ENCODERS)}

    @staticmethod
    def register_model(model_arch: str, model_cls: str | type[Any]) -> None:
        """Add a family for engines of this process.

        A class written for vLLM's layers does not run here: what counts is a subclass of
        `quire.models.decoder.DecoderForCausalLM`, which is checked when a model is loaded.

        Args:
            model_arch: What `config.json` gives in `architectures`.
            model_cls: The class, or `"package.module:Class"`.

        Raises:
            ConfigError: the architecture has a family.
        """
        from quire.models.registry import MODELS

        MODELS.register(model_arch, model_cls)
