"""How a model's output is parsed: by the parsers that the operator names, or by those whose syntax
is in its chat template; and what a request with tools or reasoning may ask of that model.

A template that shows earlier calls and reasoning to the model writes them in the model's syntax, so
its marks tell which parsers fit. Knows no HTTP API.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from msgspec import structs

from quire.config import ServerConfig
from quire.errors import InvalidRequest
from quire.params import SamplingParams
from quire.serving.decode import show
from quire.serving.engine_protocol import TokenizerLike
from quire.serving.forced_calls import call_grammar, can_force, held_tools, refuse_strict
from quire.serving.free_reasoning import marks_of_parser, reasoning_before
from quire.serving.parsers.json_calls import JsonCalls
from quire.serving.parsing import (
    PARSERS,
    REASONING_PARSERS,
    OutputParser,
    ParserSetup,
    Parsing,
    ReplyRules,
)
from quire.serving.tools import ToolUse
from quire.thinking import PROMPT_END, ThinkingMarks
from quire.tokenizer.thinking import REASONING_MARKS, first_that_fits

OFF: Final = "none"
"""Stands for no parser."""

TOOL_MARKS: Final[tuple[tuple[str, tuple[str, ...]], ...]] = (
    ("openai", ("<|channel|>", "<|message|>")),
    ("kimi_k2", ("<|tool_calls_section_begin|>",)),
    ("deepseek_v3", ("<｜tool▁call▁begin｜>", "```json")),
    ("deepseek_v31", ("<｜tool▁call▁begin｜>",)),
    ("mistral", ("[TOOL_CALLS]",)),
    ("glm45", ("<arg_key>",)),
    ("qwen3_xml", ("<function=",)),
    ("internlm", ("<|action_start|>",)),
    ("phi4_mini_json", ("functools[",)),
    ("phi4_mini_json", ("<|/tool_call|>",)),
    ("phi4_mini_json", ("<|/tool|>",)),
    ("granite", ("<|tool_call|>",)),
    ("granite-20b-fc", ("<function_call>",)),
    ("llama4_pythonic", ("<|python_start|>",)),
    ("llama4_pythonic", ("<|header_start|>",)),
    ("hermes", ("<tool_call>",)),
    ("llama3_json", ("<|start_header_id|>", '"parameters"')),
    ("llama3_json", ("<|python_tag|>",)),
    ("pythonic", ("[func_name1(",)),
    ("json", ()),
)  # fmt: skip
"""Tool parsers, and what a template has that writes their syntax: all of the strings. The first row
that fits counts."""

EFFORTS: Final = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
"""Values of `reasoning_effort`, as vLLM has them."""
_SWITCHES: Final = ("enable_thinking", "thinking")
_VARIABLES: Final = frozenset(("reasoning_effort", *_SWITCHES))
_TOOLS: Final = re.compile(r"\btools\b")
# A variable of its own, not a message's field of that name.
_TOLD: Final = re.compile(rf"(?<![.\w'\"])(?:{'|'.join(sorted(_VARIABLES))})\b")


@dataclass(frozen=True, slots=True)
class ModelParsers:
    """The parsers of one model."""

    kinds: tuple[type[OutputParser], ...] = ()
    """In the order in which they read: reasoning, then calls. One class may do both."""
    names: str = ""
    """Their names, for people."""
    auto_tools: bool = True
    """Whether clients may leave it to the model to call tools."""
    shows_tools: bool = True
    """Whether the chat template shows tools to the model."""
    told: frozenset[str] = _VARIABLES
    """The variables about reasoning that the template reads."""
    in_reasoning: bool = False
    """Whether forms hold from the first token on, and leave no room for reasoning before them."""

    def check_tools(self, use: ToolUse) -> None:
        """Refuse tools that would have no effect.

        Raises:
            InvalidRequest: the template does not show them, or the operator allows no free choice.
        """
        if not use.offered:
            return
        if not self.shows_tools:
            raise InvalidRequest(
                "tools: the chat template of this model does not show tools, so the model would "
                "not know of them. Another template can be given with --chat-template.",
                param="tools",
            )
        if use.choice.mode == "auto" and not self.auto_tools:
            raise InvalidRequest(
                'tool_choice "auto" needs a server with --enable-auto-tool-choice; this one was '
                "started with --no-enable-auto-tool-choice.",
                param="tool_choice",
            )

    def variables(self, effort: str | None, given: Mapping[str, Any] | None) -> dict[str, Any]:
        """The template's variables: those given, and those that tell the reasoning effort.

        Args:
            effort: One of `EFFORTS`; `none` turns reasoning off, any other turns it on.
            given: `chat_template_kwargs`, which take precedence.

        Raises:
            InvalidRequest: there is no such effort, or the template cannot be told.
        """
        variables = dict(given or {})
        if effort is None:
            return variables
        if effort not in EFFORTS:
            raise InvalidRequest(
                f"reasoning_effort must be one of {', '.join(EFFORTS)}, got {show(effort)}.",
                param="reasoning_effort",
            )
        if not self.told and effort != OFF:
            raise InvalidRequest(
                "reasoning_effort: the chat template of this model takes none of "
                f"{', '.join(sorted(_VARIABLES))}, so it cannot be told how much to reason, "
                f"got {show(effort)}.",
                param="reasoning_effort",
            )
        tells = {"reasoning_effort": effort, **dict.fromkeys(_SWITCHES, effort != OFF)}
        return {name: tells[name] for name in tells if name in self.told} | variables

    def mark_thinking(self, params: SamplingParams, prompt: str = "") -> SamplingParams:
        """Parameters with the marks around the reasoning, if a budget of it needs them.

        Args:
            params: The request's.
            prompt: As the template rendered it, where there is a template.

        Raises:
            InvalidRequest: no parser in force knows such marks.
        """
        if params.thinking_token_budget is None:
            return params
        marks = marks_of_parser(_reasoning_of(self.kinds), prompt)
        if marks is None:
            raise InvalidRequest(
                "thinking_token_budget needs a model whose reasoning has known marks; the parsers "
                f"in force are {self.names or OFF} (--reasoning-parser), got "
                f"{params.thinking_token_budget}.",
                param="thinking_token_budget",
            )
        return params.replace(thinking_marks=marks)

    def can_limit(self, tokenizer: TokenizerLike) -> bool:
        """Whether reasoning can be held to a budget: marks are known, and tokens of their own."""
        if self.marks is None:
            return False
        marks = (self.marks.opening, self.marks.closing)
        firsts = [tokenizer.encode(mark, add_special_tokens=False)[:1] for mark in marks]
        return all(first and first[0] in tokenizer.added_ids for first in firsts)

    @property
    def marks(self) -> ThinkingMarks | None:
        """What is written around the reasoning; `None`: not known."""
        return marks_of_parser(_reasoning_of(self.kinds))

    def may_reason(self, variables: Mapping[str, Any]) -> bool:
        """Whether the model may begin to reason by itself, given the template's variables: not
        where a variable that the template reads turns reasoning off."""
        return all(variables.get(name) is not False for name in _SWITCHES if name in self.told)

    def parsing(
        self,
        prompt: str,
        use: ToolUse,
        params: SamplingParams,
        tokenizer: TokenizerLike,
        *,
        reasoning: bool = True,
        may_reason: bool = True,
    ) -> tuple[Parsing, SamplingParams]:
        """How the output of one request is parsed, and its parameters, changed so that parsers see
        special tokens that are marks of their syntax.

        Args:
            prompt: As the template rendered it.
            use: The request's tools.
            params: The request's parameters.
            tokenizer: The model's.
            reasoning: Whether the reply has the reasoning.
            may_reason: Whether the model may begin to reason by itself; see `may_reason`.
        """
        params = self.mark_thinking(params, prompt)
        kinds = [kind for kind in self.kinds if use.offered or not kind.needs_tools]
        if use.constrains:
            kinds, params = self._constrained(kinds, use, params, tokenizer)
        params = self._after_reasoning(kinds, prompt, params, use, may_reason)
        special: dict[str, int] = {}
        if params.skip_special_tokens:
            known = tokenizer.special_tokens
            shown = [mark for kind in kinds for mark in kind.special_tokens]
            special = {mark: known[mark] for mark in shown if mark in known}
        if special:
            params = params.replace(shown_special_ids=sorted(special.values()))
        setup = ParserSetup(prompt, use.offered, frozenset(special), held_tools(use))
        rules = ReplyRules(reasoning, use.choice.parallel)
        parsing = Parsing(kinds, setup, rules)
        marks = marks_of_parser(_reasoning_of(kinds), prompt)
        if marks is not None:
            ids = tokenizer.encode(marks.closing, add_special_tokens=False)
            parsing.thoughts_end = ids[0] if len(ids) == 1 else None
        return parsing, params

    def in_prompts(
        self, params: SamplingParams, prompts: Sequence[Sequence[int]], tokenizer: TokenizerLike
    ) -> SamplingParams:
        """Parameters for prompts that no template made: a form holds from where the reasoning ends
        if all of them end with the mark that opens it, and otherwise from the first token on."""
        form, marks = params.structured_outputs, self.marks
        if form is None or form.reasoning is not None or marks is None or self.in_reasoning:
            return params
        for ids in prompts:
            end = tokenizer.decode(list(ids[-PROMPT_END:]), skip_special_tokens=False)
            if not end.rstrip().endswith(marks.opening):
                return params
        kind = _reasoning_of(self.kinds)
        reasoning = reasoning_before(kind, marks.opening, may_open=False)
        return params.replace(structured_outputs=structs.replace(form, reasoning=reasoning))

    def _constrained(
        self,
        kinds: list[type[OutputParser]],
        use: ToolUse,
        params: SamplingParams,
        tokenizer: TokenizerLike,
    ) -> tuple[list[type[OutputParser]], SamplingParams]:
        """The parsers and parameters of a request whose calls a grammar forces."""
        if params.structured_outputs is not None:
            raise InvalidRequest(
                "A reply cannot be made of calls of tools and have a form of its own: tool_choice "
                "required or named, a part of the tools, and strict tools exclude response_format "
                "and structured_outputs.",
                param="tool_choice",
            )
        vocabulary = tokenizer.special_tokens
        calls = next((kind for kind in kinds if kind.call_syntax(vocabulary) is not None), None)
        if use.choice.mode == "auto":
            if calls is None:
                refuse_strict()
        elif calls is None or not can_force(use, calls, vocabulary):
            # The model's own syntax cannot say it, or is not known: a list of JSON objects.
            kinds = [*(kind for kind in kinds if not kind.needs_tools), JsonCalls]
            calls = JsonCalls
        grammar = call_grammar(use, calls, vocabulary)
        if grammar is None:
            return kinds, params
        return kinds, params.replace(structured_outputs=grammar)

    def _after_reasoning(
        self,
        kinds: Sequence[type[OutputParser]],
        prompt: str,
        params: SamplingParams,
        use: ToolUse,
        may_reason: bool,
    ) -> SamplingParams:
        """Parameters whose form, if they have one, holds from where the reasoning ends."""
        form = params.structured_outputs
        if form is None or form.reasoning is not None or self.in_reasoning:
            return params
        kind = _reasoning_of(kinds)
        reasoning = reasoning_before(kind, prompt, may_open=may_reason)
        if reasoning is None:
            return params
        if use.constrains:  # calls are messages of their own, which nothing begins but they
            reasoning = structs.replace(reasoning, answer="")
        return params.replace(structured_outputs=structs.replace(form, reasoning=reasoning))


def _reasoning_of(kinds: Sequence[type[OutputParser]]) -> type[OutputParser] | None:
    """The parser of reasoning, if there is one."""
    return next((kind for kind in kinds if kind.thoughts is not None), None)


def choose_parsers(config: ServerConfig, templates: Sequence[str]) -> ModelParsers:
    """The parsers of a model with these chat templates.

    Raises:
        ConfigError: a parser that was named does not exist.
    """
    text = "\n".join(templates)
    shows = not templates or _TOOLS.search(text) is not None
    tools = config.tool_call_parser or (first_that_fits(TOOL_MARKS, text) if shows else OFF)
    reasoning = config.reasoning_parser or first_that_fits(REASONING_MARKS, text)
    found = [] if reasoning == OFF else [REASONING_PARSERS.get(reasoning)]
    if tools != OFF:
        found.append(PARSERS.get(tools))
    return ModelParsers(
        tuple(dict.fromkeys(found)),
        f"tool calls: {tools}, reasoning: {reasoning}",
        config.enable_auto_tool_choice,
        shows,
        frozenset(_TOLD.findall(text)) if templates else _VARIABLES,
        config.enable_in_reasoning,
    )
