"""What a token costs in the journal on disk: CPU time of the event loop and of the writer's thread,
and bytes.

`python benchmarks/journal_cost.py`: 64 streams, one token each per step.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from quire.core.output import EngineCoreOutput
from quire.engine.frontend.disk import disk_journal
from quire.engine.frontend.disk.disk_journal import DiskJournal, JournalOptions
from quire.engine.messages import EngineCoreRequest
from quire.params import SamplingParams


async def measure(streams: int, steps: int, fsync: str) -> None:
    """Print one row."""
    disk_journal.WRITTEN_SECONDS = 600.0  # type: ignore[misc]
    with tempfile.TemporaryDirectory() as folder:
        journal = DiskJournal(JournalOptions(str(Path(folder) / "journal"), fsync))
        journal.begin({})
        params = SamplingParams(seed=1)
        for i in range(streams):
            name = f"cmpl-{i:032x}"
            journal.expect(f"s{i}", b"x" * 500, [name])
            request = EngineCoreRequest(f"{name}-1", name, 0, [1] * 100, params, 0.0)
            processed = SimpleNamespace(requests=[request], seed=1, params=params)
            journal.accepted(cast(Any, SimpleNamespace(request_id=name, processed=processed)))
        await journal.written()
        before, loop_time = journal.state.num_bytes, 0.0
        cpu = time.process_time()
        for step in range(steps):
            outputs = [EngineCoreOutput(f"cmpl-{i:032x}-1", [step]) for i in range(streams)]
            start = time.thread_time()
            journal.stepped(outputs, None)
            loop_time += time.thread_time() - start
            await asyncio.sleep(0.01)
        await journal.written()
        total, tokens = time.process_time() - cpu, streams * steps
        size = journal.state.num_bytes - before
        journal.close()
    print(
        f"fsync {fsync:8} loop {1e6 * loop_time / tokens:5.2f} us/token, "
        f"process (with this script) {1e6 * total / tokens:5.2f} us/token, "
        f"{size / tokens:.0f} bytes/token"
    )


def main() -> None:
    """Measure each policy."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--steps", type=int, default=300)
    args = parser.parse_args()
    for fsync in ("never", "interval", "always"):
        asyncio.run(measure(args.streams, args.steps, fsync))


if __name__ == "__main__":
    main()
