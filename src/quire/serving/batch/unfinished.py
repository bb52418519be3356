"""What is kept of a batch while it runs: a file beside the output, which a later run continues.

Every result is in it as soon as there is one, in the order in which they came, with the number of
its line and a digest of that line. Each is written in one go, so that a killed process leaves at
most one that is cut off, at the end; that one is dropped. The output itself appears only when all
lines are done, in their order. Holds in memory where each result is, not what it says.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
from pathlib import Path
from typing import BinaryIO, Final, NamedTuple

from quire.errors import ConfigError

_FIRST: Final = b"quire run-batch 1 "
"""How such a file begins; the model's name follows."""
_COPIED: Final = 2**20


class _Place(NamedTuple):
    """Where a result is, and which line it is of."""

    offset: int
    size: int
    digest: bytes


def digest_of(line: bytes) -> bytes:
    """Tells a line from others, in 16 characters."""
    return hashlib.blake2b(line, digest_size=8).hexdigest().encode()


class Unfinished:
    """The results of a run so far. Use it as a context manager: it is locked while it is open.

    Args:
        path: The file, which may hold the results of a run before.
        model: Name of the model; results of another are not continued.

    Raises:
        ConfigError: it cannot be written, another process writes it, or it is of another model.
    """

    def __init__(self, path: Path, model: str) -> None:
        self.path = path
        self._places: dict[int, _Place] = {}
        try:
            self._file: BinaryIO = open(path, "a+b", buffering=0)  # noqa: SIM115 -- held open
        except OSError as error:
            raise ConfigError(f"{path} cannot be written: {error.strerror}") from None
        try:
            self._open(model)
        except BaseException:
            self._file.close()
            raise

    def _open(self, model: str) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise ConfigError(f"another process is writing {self.path}") from None
        first = _FIRST + model.encode() + b"\n"
        self._file.seek(0)
        with open(self.path, "rb") as reader:
            found = reader.readline()
            if not found.endswith(b"\n"):  # new, or its first write was cut off
                self._file.truncate(0)
                self._file.write(first)
                self._end = len(first)
                return
            if found != first:
                raise ConfigError(
                    f"{self.path} was begun with {_told(found)}, and this is {_told(first)}; "
                    "finish it with that, or delete it"
                )
            self._end = len(found)
            for entry in reader:
                if not entry.endswith(b"\n"):
                    break
                number, digest, result = entry.split(b" ", 2)
                start = self._end + len(entry) - len(result)
                self._places[int(number)] = _Place(start, len(result), digest)
                self._end += len(entry)
        self._file.truncate(self._end)

    def __enter__(self) -> Unfinished:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def __len__(self) -> int:
        return len(self._places)

    def has(self, number: int, digest: bytes) -> bool:
        """Whether a line is done.

        Raises:
            ConfigError: the result is that of another line, so the input is not that of before.
        """
        place = self._places.get(number)
        if place is not None and place.digest != digest:
            raise ConfigError(
                f"line {number} of the input is not the one that {self.path} has a result of; give "
                "the input that it was begun with, or delete it"
            )
        return place is not None

    def add(self, number: int, digest: bytes, result: bytes) -> None:
        """Write a result down.

        Raises:
            OSError: it could not be written.
        """
        head = b"%d %b " % (number, digest)
        entry = head + result + b"\n"
        written = self._file.write(entry)
        if written != len(entry):  # no space for the rest
            self._file.truncate(self._end)
            raise OSError(f"only {written} of {len(entry)} bytes were written")
        self._places[number] = _Place(self._end + len(head), len(result) + 1, digest)
        self._end += len(entry)

    def failed(self, number: int) -> bool:
        """Whether a line that is done has no reply with a status below 400."""
        place = self._places[number]
        tail = os.pread(self._file.fileno(), 16, place.offset + place.size - 16)
        return not tail.endswith(b'"error":null}\n')

    def finish(self, output: Path, num_lines: int) -> None:
        """Make the output of the results, in the order of the lines, and delete this file.

        Args:
            output: Replaced in one go.
            num_lines: Of the input; more results than that are of another input.

        Raises:
            ConfigError: there are more, or the output cannot be written.
        """
        if self._places and max(self._places) > num_lines:
            raise ConfigError(
                f"{self.path} has a result of line {max(self._places)}, and the input has "
                f"{num_lines} lines; give the input that it was begun with, or delete it"
            )
        made = output.with_name(output.name + ".new")
        try:
            with open(made, "wb", buffering=_COPIED) as writer:
                for number in sorted(self._places):
                    place = self._places[number]
                    writer.write(os.pread(self._file.fileno(), place.size, place.offset))
                writer.flush()
                os.fsync(writer.fileno())
            os.replace(made, output)
        except OSError as error:
            with contextlib.suppress(OSError):
                made.unlink()
            raise ConfigError(f"{output} cannot be written: {error.strerror}") from None

    def delete(self) -> None:
        """The output is where it belongs."""
        self.path.unlink(missing_ok=True)


def _told(first: bytes) -> str:
    if not first.startswith(_FIRST):
        return "another program"
    return f"the model {first[len(_FIRST) :].decode('utf-8', 'replace').strip()}"
