"""`LoRARequest`: scripts can create it and pass it around; a request that is given one is
refused."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class LoRARequest:
    """An adapter by name, number and folder.

    Raises:
        ValueError: `lora_int_id` is below 1.
    """

    lora_name: str
    lora_int_id: int
    lora_path: str = ""
    base_model_name: str | None = None
    tensorizer_config_dict: dict[str, object] | None = None
    load_inplace: bool = False

    def __post_init__(self) -> None:
        if self.lora_int_id < 1:
            raise ValueError(f"lora_int_id must be at least 1, got {self.lora_int_id}")

    @property
    def adapter_id(self) -> int:
        """`lora_int_id` under another name."""
        return self.lora_int_id

    @property
    def name(self) -> str:
        """The name."""
        return self.lora_name

    @property
    def path(self) -> str:
        """The folder."""
        return self.lora_path
