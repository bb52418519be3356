"""A conversation: its messages, and a file that keeps it.

Messages have the form of the chat API, so a saved file can be sent to a server. Knows no terminal
and no model.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from quire.errors import InvalidRequest

ROLES: Final = ("system", "user", "assistant", "tool")
_KEPT: Final = ("role", "content", "tool_calls", "tool_call_id")
MAX_FILE_BYTES: Final = 64 * 2**20


@dataclass
class Conversation:
    """Messages, in order; a system prompt comes first."""

    messages: list[dict[str, Any]] = field(default_factory=list)

    @property
    def system(self) -> str | None:
        """The system prompt."""
        first = self.messages[:1]
        return first[0]["content"] if first and first[0]["role"] == "system" else None

    def start_over(self, system: str | None) -> None:
        """Forget everything; begin again with this system prompt, or none."""
        self.messages = [{"role": "system", "content": system}] if system else []

    def say(self, role: str, text: str) -> None:
        """Add a message."""
        self.messages.append({"role": role, "content": text})

    def take_reply(self) -> dict[str, Any] | None:
        """Remove the last message if it is a reply, and return it."""
        if self.messages and self.messages[-1]["role"] == "assistant":
            return self.messages.pop()
        return None

    def take_question(self) -> str | None:
        """Remove the last message if it is the user's, and return its text. Calls of tools and
        their results after it are removed as well."""
        while self.messages and ("tool_calls" in self.messages[-1] or self._ends_with_result()):
            self.messages.pop()
        if self.messages and self.messages[-1]["role"] == "user":
            return str(self.messages.pop()["content"])
        return None

    def _ends_with_result(self) -> bool:
        return bool(self.messages[-1]["role"] == "tool")


def save(path: str, conversation: Conversation, options: dict[str, Any], model: str) -> int:
    """Write a conversation; returns the number of its messages.

    Raises:
        InvalidRequest: the file cannot be written, or holds something else.
    """
    file = Path(path).expanduser()
    if file.exists():
        try:
            load(path)
        except InvalidRequest:
            raise InvalidRequest(
                f"{path!r} exists and is no saved conversation: choose another name"
            ) from None
    data = {"model": model, "options": options, "messages": conversation.messages}
    part = file.with_name(file.name + ".part")
    try:
        part.write_text(json.dumps(data, indent=1, ensure_ascii=False) + "\n", "utf-8")
        os.replace(part, file)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise InvalidRequest(f"cannot write {path!r}: {reason}") from None
    return len(conversation.messages)


def load(path: str) -> tuple[Conversation, dict[str, Any], str]:
    """Read a conversation, its sampling options and the name of the model it was with.

    The file may also be a plain list of messages.

    Raises:
        InvalidRequest: the file cannot be read, or is no conversation.
    """
    data = _read(path)
    if isinstance(data, list):
        data = {"messages": data}
    if not isinstance(data, dict):
        raise InvalidRequest(f"{path!r} is no saved conversation")
    messages, options = data.get("messages"), data.get("options", {})
    if not isinstance(messages, list) or not isinstance(options, dict):
        raise InvalidRequest(f"{path!r} is no saved conversation: it has no list of messages")
    for number, message in enumerate(messages, 1):
        _check(path, number, message)
    kept = [{name: m[name] for name in _KEPT if name in m} for m in messages]
    return Conversation(kept), options, str(data.get("model", ""))


def _read(path: str) -> Any:
    file = Path(path).expanduser()
    try:
        if file.stat().st_size > MAX_FILE_BYTES:
            raise InvalidRequest(f"{path!r} is too large for a conversation")
        return json.loads(file.read_text("utf-8"))
    except OSError as error:
        raise InvalidRequest(f"cannot read {path!r}: {error.strerror}") from None
    except (ValueError, RecursionError):
        raise InvalidRequest(f"{path!r} is no saved conversation: it is not JSON") from None


def _check(path: str, number: int, message: Any) -> None:
    good = (
        isinstance(message, dict)
        and message.get("role") in ROLES
        and isinstance(message.get("content"), str)
        and (message["role"] != "system" or number == 1)
        and (message["role"] == "tool") == isinstance(message.get("tool_call_id"), str)
        and isinstance(message.get("tool_calls", []), list)
    )
    if not good:
        raise InvalidRequest(
            f"{path!r} is no saved conversation: message {number} needs a role (system, first of "
            "all; user; assistant; tool) and a text as its content"
        )
