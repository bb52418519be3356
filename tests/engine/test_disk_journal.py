"""The journal of a process that ended, as the next one reads it; and disks that fail."""

from __future__ import annotations

import asyncio
import errno
import os
import random
import resource
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from patience import PATIENCE, wait_for
from quire.core.output import EngineCoreOutput
from quire.engine.frontend.disk import disk_journal
from quire.engine.frontend.disk import writer as writing
from quire.engine.frontend.disk.disk_journal import DiskJournal, JournalOptions
from quire.engine.frontend.disk.folder import JournalFolder
from quire.engine.frontend.disk.records import HEADER_BYTES
from quire.engine.frontend.disk.stored import StoredStream, read_file
from quire.engine.messages import EngineCoreRequest
from quire.errors import ConfigError, StartupError
from quire.outputs import FinishReason
from quire.params import SamplingParams

SECRET = list(b"xylophonic-marmalade")
IDENTITY = {"model": "toy"}


def accept(journal: DiskJournal, name: str, prompt: list[int], n: int = 1, seed: int = 7) -> None:
    params = SamplingParams(seed=seed, n=n, temperature=1)
    requests = [EngineCoreRequest(f"{i}_{name}", name, i, prompt, params, 0.0) for i in range(n)]
    processed = SimpleNamespace(requests=requests, seed=seed, params=params)
    journal.accepted(cast(Any, SimpleNamespace(request_id=name, processed=processed)))


def tokens_of(stream: StoredStream) -> list[int]:
    return [t for step in stream.steps for one in step for t in one.token_ids]


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """What `written` waits for is written, however busy the machine is."""
    monkeypatch.setattr(disk_journal, "WRITTEN_SECONDS", PATIENCE)


@pytest.fixture
def folder(tmp_path: Path) -> str:
    return str(tmp_path / "journal")


@pytest.fixture
def made() -> Iterator[list[DiskJournal]]:
    found: list[DiskJournal] = []
    yield found
    for journal in found:
        journal.close()


def start(made: list[DiskJournal], folder: str, **options: Any) -> DiskJournal:
    journal = DiskJournal(JournalOptions(folder, **options))
    made.append(journal)
    journal.begin(IDENTITY)
    return journal


def left(folder: str, key: bytes | None = None) -> list[StoredStream]:
    files = sorted(Path(folder).glob("*.journal"))
    return [stream for path in files for stream in read_file(path, key).streams]


async def test_streams_of_a_process_that_ended(made: list[DiskJournal], folder: str) -> None:
    """Hundreds of streams with a thousand tokens each, some ended and some forgotten."""
    journal = start(made, folder)
    rng, expected = random.Random(1), {}
    for i in range(300):
        journal.expect(f"s{i}", b"opening %d" % i, [f"r{i}"])
        accept(journal, f"r{i}", [i, i + 1], n=1 + i % 3, seed=i)
        expected[f"s{i}"] = list[int]()
    accept(journal, "other", [1])
    for _ in range(1000):
        outputs = [EngineCoreOutput("0_other", [5])]
        for i in range(300):
            token = rng.randrange(2**17)
            expected[f"s{i}"].append(token)
            outputs.append(EngineCoreOutput(f"{i % (1 + i % 3)}_r{i}", [token]))
        journal.stepped(outputs, None)
    for i in range(0, 300, 3):
        journal.end(f"s{i}")
    for i in range(0, 300, 2):
        journal.forget(f"s{i}")
        del expected[f"s{i}"]
    await journal.written()
    streams = {stream.stream_id: stream for stream in left(folder)}
    assert {name: tokens_of(stream) for name, stream in streams.items()} == expected
    one = streams["s5"]
    assert (one.opening, one.prompts[0].token_ids, one.prompts[0].seed) == (b"opening 5", [5, 6], 5)
    assert one.ended_at is None and streams["s3"].ended_at is not None


async def test_any_damage_leaves_a_beginning(made: list[DiskJournal], folder: str) -> None:
    """Cut anywhere, with bits flipped anywhere: of each stream that is read, the tokens are the
    first ones that were written."""
    journal = start(made, folder)
    rng, expected = random.Random(2), {}
    for i in range(40):
        journal.expect(f"s{i}", b"opening", [f"r{i}"])
        accept(journal, f"r{i}", [i])
        expected[f"s{i}"] = [1000 * i + k for k in range(25)]
    for k in range(25):
        journal.stepped([EngineCoreOutput(f"0_r{i}", [1000 * i + k]) for i in range(40)], None)
        await journal.written()
    (path,) = Path(folder).glob("*.journal")
    whole = path.read_bytes()
    copy = Path(folder) / "copy"
    shorter = 0
    for _ in range(150):
        data = bytearray(whole[: rng.randrange(HEADER_BYTES, len(whole) + 1)])
        for _ in range(rng.randrange(4)):
            data[rng.randrange(HEADER_BYTES, max(HEADER_BYTES + 1, len(data))) - 1 : 0] = b""
            at = rng.randrange(HEADER_BYTES, len(data)) if len(data) > HEADER_BYTES else None
            if at is not None:
                data[at] ^= 1 << rng.randrange(8)
        copy.write_bytes(data)
        for stream in read_file(copy, None).streams:
            tokens = tokens_of(stream)
            assert tokens == expected[stream.stream_id][: len(tokens)]
            shorter += len(tokens) < 25
    assert shorter > 100, "nothing was damaged"


async def test_what_was_forgotten_leaves_the_file(
    made: list[DiskJournal], folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writing, "COMPACT_BYTES", 2000)
    journal = start(made, folder)
    largest = 0
    journal.expect("kept", b"opening", ["kept"])
    accept(journal, "kept", SECRET)
    for i in range(200):
        journal.expect(f"s{i}", b"opening", [f"r{i}"])
        accept(journal, f"r{i}", [i] * 20)
        journal.stepped([EngineCoreOutput(f"0_r{i}", [i]), EngineCoreOutput("0_kept", [i])], None)
        journal.forget(f"s{i}")
        await journal.written()
        largest = max(largest, journal.state.num_bytes)
    (stream,) = left(folder)
    assert stream.stream_id == "kept" and tokens_of(stream) == list(range(200))
    assert largest < 30_000
    (path,) = Path(folder).glob("*.journal")
    assert path.stat().st_size == journal.state.num_bytes


async def test_files_are_private_and_without_streams_nothing_is_left(
    made: list[DiskJournal], folder: str
) -> None:
    os.umask(umask := os.umask(0))
    os.umask(0)
    try:
        journal = start(made, folder)
        journal.expect("s", b"o", ["r"])
        accept(journal, "r", [1])
        await journal.written()
    finally:
        os.umask(umask)
    assert stat.S_IMODE(os.stat(folder).st_mode) == 0o700
    for path in Path(folder).iterdir():
        assert stat.S_IMODE(path.stat().st_mode) == 0o600, path
    journal.forget("s")
    journal.close()
    made.clear()
    assert [path.name for path in Path(folder).iterdir()] == ["lock"]


def test_a_folder_that_others_may_write_to_is_refused(tmp_path: Path) -> None:
    for mode in (0o770, 0o707, 0o722):
        tmp_path.chmod(mode)
        with pytest.raises(StartupError, match=f"got mode {mode:o}"):
            JournalFolder(str(tmp_path), waits=False)


def test_a_folder_has_one_owner(tmp_path: Path) -> None:
    code = (
        "import sys; from quire.engine.frontend.disk.folder import JournalFolder\n"
        "folder = JournalFolder(sys.argv[1], False); path, fd = folder.create()\n"
        "print(path.name, flush=True); sys.stdin.read()"
    )
    tmp_path.chmod(0o700)
    with subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    ) as other:  # fmt: skip
        assert other.stdout is not None
        name = other.stdout.readline().strip()
        with pytest.raises(StartupError, match="in use by another server"):
            JournalFolder(str(tmp_path), waits=False)
        heir = JournalFolder(str(tmp_path), waits=True)
        assert not heir.is_owner and heir.left_behind() == []
        mine, fd = heir.create()
        other.kill()
        other.wait()
        wait_for(heir.acquire)
        assert [path.name for path in heir.left_behind()] == [name], "not our own, which is locked"
        assert mine.name > name
        os.close(fd)
        heir.close()


async def test_a_full_disk_costs_durability_and_not_service(
    made: list[DiskJournal], folder: str, caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """As far as RLIMIT_FSIZE goes a file cannot grow: write() fails with EFBIG, in the middle."""
    monkeypatch.setattr(writing, "RETRY_SECONDS", 0.0)
    caplog.set_level("INFO", logger="quire")
    journal = start(made, folder)

    def run(name: str) -> None:
        journal.expect(f"s-{name}", b"opening", [name])
        accept(journal, name, [1] * 50)

    run("before")
    await journal.written()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = journal.state.num_bytes
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (before + 30, hard))
    try:
        run("during")
        both = [EngineCoreOutput(name, [4]) for name in ("0_before", "0_during")]
        journal.stepped(both, None)
        await journal.written()
        run("gone")
        journal.forget("s-gone")
        await journal.written()
        assert not journal.state.works and journal.state.num_failures >= 1
        assert not journal.holds("s-before"), "nothing is promised now"
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, handler)
    run("after")
    journal.stepped(
        [EngineCoreOutput(f"0_{name}", [5]) for name in ("before", "during", "after")], None
    )
    await journal.written()
    assert journal.state.works and journal.holds("s-after")
    found = {stream.stream_id: tokens_of(stream) for stream in left(folder)}
    assert found == {"s-before": [], "s-during": [], "s-after": [5]}, "no token after a gap"
    said = [r.getMessage() for r in caplog.records if "journal" in r.getMessage()]
    assert len(said) == 2 and "cannot be written" in said[0] and "again" in said[1]


async def test_a_disk_that_never_works(made: list[DiskJournal], folder: str) -> None:
    journal = start(made, folder)

    def create() -> Any:
        raise OSError(errno.EROFS, "Read-only file system")

    journal._folder.create = create  # type: ignore[method-assign]
    journal.expect("s", b"opening", ["r"])
    accept(journal, "r", [1])
    await asyncio.wait_for(journal.written(), 60)
    assert not journal.state.works
    journal.close()
    made.clear()


async def test_beyond_its_size_nothing_is_written(made: list[DiskJournal], folder: str) -> None:
    journal = start(made, folder, max_bytes=1000)
    for i in range(20):
        journal.expect(f"s{i}", b"opening", [f"r{i}"])
        accept(journal, f"r{i}", [1] * 50)
        await journal.written()
    (path,) = Path(folder).glob("*.journal")
    assert path.stat().st_size <= 1000 and not journal.state.works
    assert left(folder)


@pytest.mark.parametrize("spell", [bytes, lambda key: key.hex().encode() + b"\n"])
async def test_encrypted(made: list[DiskJournal], folder: str, tmp_path: Path, spell: Any) -> None:
    key, file = os.urandom(32), tmp_path / "key"
    file.write_bytes(spell(key))
    file.chmod(0o600)
    journal = start(made, folder, key_file=str(file))
    journal.expect("s", bytes(SECRET), ["r"])
    accept(journal, "r", SECRET)
    journal.stepped([EngineCoreOutput("0_r", SECRET, finish_reason=FinishReason.STOP)], None)
    await journal.written()
    (path,) = Path(folder).glob("*.journal")
    assert bytes(SECRET) not in path.read_bytes()
    (stream,) = left(folder, key)
    assert (tokens_of(stream), stream.opening) == (SECRET, bytes(SECRET))


@pytest.mark.parametrize(
    ("content", "mode", "words"),
    [(b"short", 0o600, "must hold 32 random bytes"), (bytes(32), 0o640, "mode 640")],
)
def test_bad_key_files(tmp_path: Path, folder: str, content: bytes, mode: int, words: str) -> None:
    file = tmp_path / "key"
    file.write_bytes(content)
    file.chmod(mode)
    for path, expected in ((str(file), words), (str(tmp_path / "none"), "No such file")):
        with pytest.raises(ConfigError, match=expected):
            DiskJournal(JournalOptions(folder, key_file=path))


def test_without_the_library_a_key_file_is_refused(
    folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "cryptography", None)
    with pytest.raises(ConfigError, match=r"pip install 'quire\[journal\]'"):
        DiskJournal(JournalOptions(folder, key_file=str(tmp_path)))
