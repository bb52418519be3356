"""Logits processors as people write them for vLLM, by its names, and some that do harm."""

from __future__ import annotations

import torch
from vllm.config import VllmConfig
from vllm.sampling_params import SamplingParams
from vllm.v1.sample.logits_processor import (
    AdapterLogitsProcessor,
    BatchUpdate,
    LogitsProcessor,
    MoveDirectionality,
)
from vllm.v1.sample.logits_processor.builtin import process_dict_updates

from quire.errors import InvalidRequest

assert MoveDirectionality.SWAP


class OnlyToken(LogitsProcessor):
    """`target_token`: from the token `after` on, nothing else."""

    @classmethod
    def validate_params(cls, sampling_params: SamplingParams) -> None:
        target = (sampling_params.extra_args or {}).get("target_token")
        if target is not None and not isinstance(target, int):
            raise ValueError(f"target_token {target!r} is no integer; /secret/path")
        if target == 13:
            raise InvalidRequest("13 brings bad luck")

    def __init__(self, vllm_config: VllmConfig, device: torch.device, is_pin_memory: bool) -> None:
        self.targets: dict[int, tuple[int, int, list[int]]] = {}
        assert vllm_config.model_config.get_vocab_size() > 100
        assert vllm_config.scheduler_config.max_num_seqs == 1

    def is_argmax_invariant(self) -> bool:
        return False

    @staticmethod
    def _entry(params, prompt, output):
        extra = params.extra_args or {}
        target = extra.get("target_token")
        return None if target is None else (target, extra.get("after", 0), output)

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        process_dict_updates(self.targets, batch_update, self._entry)

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        for row, (target, after, output) in self.targets.items():
            if len(output) >= after:
                kept = logits[row, target].clone()
                logits[row] = float("-inf")
                logits[row, target] = kept
        return logits


class Counting(LogitsProcessor):
    """`count`: what it does depends on how often it was told of a token, and of which ones: a state
    that no single list gives."""

    def __init__(self, vllm_config, device, is_pin_memory):
        self.active = False
        self.told = 0
        self.hash = 0

    @classmethod
    def applies_to(cls, sampling_params):
        return "count" in (sampling_params.extra_args or {})

    def is_argmax_invariant(self):
        return False

    def update_state(self, batch_update):
        if batch_update is not None:
            ((_, params, prompt, self.output),) = batch_update.added
            self.active = "count" in (params.extra_args or {})
            assert not self.output and prompt
            return
        self.told += 1
        assert self.told == len(self.output), "told of each token once"
        self.hash = (self.hash * 31 + self.output[-1] + 1) % 1009

    def apply(self, logits):
        if self.active:
            logits[:, (self.hash + torch.arange(0, logits.shape[1], 7)) % logits.shape[1]] -= 3.0
        return logits


class Sharper(LogitsProcessor):
    """`sharpen`: leaves only the likeliest tokens, so it changes no greedy output."""

    def __init__(self, vllm_config, device, is_pin_memory):
        self.keep = 0

    def is_argmax_invariant(self):
        return True

    def update_state(self, batch_update):
        for _, params, _, _ in batch_update.added if batch_update else ():
            self.keep = (params.extra_args or {}).get("sharpen", 0)

    def apply(self, logits):
        if not self.keep:
            return logits
        least = torch.topk(logits, self.keep, dim=-1).values[:, -1:]
        return logits.masked_fill(logits < least, float("-inf"))


class Wrapped(AdapterLogitsProcessor):
    """`ban`: a function for each request, as before vLLM 1."""

    def is_argmax_invariant(self):
        return False

    def new_req_logits_processor(self, params):
        banned = (params.extra_args or {}).get("ban")
        if banned is None:
            return None

        def ban(prompt_ids: list[int], output_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
            logits[[*banned, *output_ids[-2:], prompt_ids[0]]] = float("-inf")
            return logits

        return ban


class Harmful(LogitsProcessor):
    """`harm`: raises, or returns what is no row of logits, at the third token."""

    def __init__(self, vllm_config, device, is_pin_memory):
        self.harm = None
        self.output = []

    @classmethod
    def validate_params(cls, sampling_params):
        if (sampling_params.extra_args or {}).get("harm") == "validate":
            raise KeyError("/secret/path")

    def is_argmax_invariant(self):
        return False

    def update_state(self, batch_update):
        if batch_update is not None:
            ((_, params, _, self.output),) = batch_update.added
            self.harm = (params.extra_args or {}).get("harm")
        elif self.harm == "update" and len(self.output) == 3:
            raise RuntimeError("/secret/path")

    def apply(self, logits):
        if len(self.output) < 3:
            return logits
        if self.harm == "raise":
            raise RuntimeError("/secret/path of an operator")
        return {
            "nan": lambda: logits * float("nan"),
            "infinite": lambda: logits.fill_(float("inf")),
            "nothing": lambda: logits.fill_(float("-inf")),
            "shape": lambda: logits[0],
            "wider": lambda: torch.cat([logits, logits], 1),
            "none": lambda: None,
            "integers": lambda: logits.long(),
        }.get(self.harm, lambda: logits)()


class NoApply(LogitsProcessor):
    """Not a whole one."""

    def __init__(self, vllm_config, device, is_pin_memory):
        pass


class NotMade(Wrapped):
    """Cannot be made."""

    def __init__(self, vllm_config, device, is_pin_memory):
        super().__init__(vllm_config, device, is_pin_memory)
        vllm_config.parallel_config.world_size  # noqa: B018


class NoProcessor:
    """Of another kind."""
