"""The scheduler's tests are tested: each rule below is broken in a copy of the source, and the
tests named beside it must fail."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

MUTANTS = {
    "a hit may cover the last token": (
        "kv/manager.py",
        "request.num_readable_tokens // self.block_size",
        "request.num_tokens // self.block_size",
        "test_scheduler.py",
    ),
    "a copied hit may cover the last token": (
        "kv/manager.py",
        "min(num_hit + self.block_size, request.num_readable_tokens)",
        "min(num_hit + self.block_size, request.num_tokens)",
        "test_scheduler.py",
    ),
    "shared blocks are not counted": (
        "kv/pool.py",
        "block.ref_cnt += 1",
        "block.ref_cnt += 0",
        "test_block_pool.py",
    ),
    "the oldest request is the victim": (
        "policies.py",
        "return running[-1]",
        "return running[0]",
        "test_scheduler.py",
    ),
    "the head of a request is evicted before its tail": (
        "kv/holding.py",
        "return reversed(self.tables[0])",
        "return iter(self.tables[0])",
        "test_block_pool.py",
    ),
    "free hits are counted as room": (
        "kv/manager.py",
        "num_new * len(self.windows) + num_revived >",
        "num_new * len(self.windows) >",
        "test_block_pool.py",
    ),
    "a victim's registered blocks stay findable": (
        "rules/preempt.py",
        "books.kv.uncache_from(victim, victim.num_computed_tokens)",
        "pass",
        "test_scheduler.py",
    ),
    "readers of a failed prefix go on": (
        "rules/update.py",
        "return {*result.failed, *_recompute_readers(books, suspect)}",
        "return set(result.failed)",
        "test_scheduler.py",
    ),
    "rejected drafts count as computed": (
        "rules/update.py",
        "request.num_computed_tokens -= count - accepted",
        "pass",
        "test_spec_slots.py",
    ),
    "drafts are cached before they are verified": (
        "kv/manager.py",
        "min(total, request.num_tokens)",
        "total",
        "test_spec_slots.py",
    ),
    "a demoted block is taken before it is written": (
        "kv/swap.py",
        "self._moving.append(parked)",
        "self._tier.unpin([parked])",
        "test_swap.py",
    ),
    "what could not be written is trusted": (
        "kv/swap.py",
        "self._tier.forget_blocks(parked)\n        lost",
        "lost",
        "test_swap.py",
    ),
    "what could not be read is read again": (
        "rules/update.py",
        "swap.forget_blocks([src for src, dst in batch.swap_in if dst in unread])",
        "pass",
        "test_swap.py",
    ),
    "an ended request keeps its place in the tier": (
        "books.py",
        "self.kv.swap.drop(request.request_id)",
        "pass",
        "test_swap.py",
    ),
    "a chunk leaves no record": (
        "rules/continue_running.py",
        "if num_new != 1 or computed < request.num_prompt_tokens:",
        "if False:",
        "test_state_machine.py",
    ),
    "a quiet decode may be the last": (
        "request.py",
        "= self.length_limit - 2",
        "= self.length_limit - 1",
        "test_scheduler.py",
    ),
    "a quiet decode may give the first output": (
        "request.py",
        "if num_computed <= self.num_prompt_tokens or",
        "if num_computed < self.num_prompt_tokens or",
        "test_scheduler.py",
    ),
    "a quiet decode may complete a repetition": (
        "request.py",
        " or self.repetitions is not None:",
        ":",
        "test_repetition.py",
    ),
    "what was counted of another output counts": (
        "repetition.py",
        "if self._seen != last:",
        "if self._seen > last:",
        "test_repetition.py",
    ),
    "a repetition ends what is still too short": (
        "stop.py",
        "and request.num_output_tokens >= params.min_tokens",
        "",
        "test_repetition.py",
    ),
    "the prompt counts as repeated": (
        "repetition.py",
        "at = tokens[end], max(self._start, end - self._longest)",
        "at = tokens[end], max(0, end - self._longest)",
        "test_repetition.py",
    ),
    "a sample that is not back counts as there": (
        "plan.py",
        "or len(request.all_token_ids) != after",
        "",
        "test_scheduler.py",
    ),
    "a window gives up a block too early": (
        "../config/kv_groups.py",
        "max(0, num_computed - window + 1) // block_size",
        "max(0, num_computed - window + 2) // block_size",
        "test_groups.py",
    ),
    "blocks behind a window are kept": (
        "kv/manager.py",
        "elif self.tables.windowed:",
        "elif False:",
        "test_groups.py",
    ),
    "a window's hit may lack its first block": (
        "../config/kv_groups.py",
        "return cdiv(window - 1, block_size)",
        "return (window - 1) // block_size",
        "test_groups.py",
    ),
    "a hit of one group counts for all": (
        "kv/hits.py",
        "end = _common_end(pool, needs, hashes, end)",
        "pass",
        "test_groups.py",
    ),
    "groups read each other's blocks": (
        "kv/hits.py",
        "pool.find_run(hashes[first:end], group)",
        "pool.find_run(hashes[first:end])",
        "test_groups.py",
    ),
    "room is reckoned for one group": (
        "kv/manager.py",
        "num_new * len(self.windows) + num_revived >",
        "num_new + num_revived >",
        "test_groups.py",
    ),
    "what left a window is trusted after a failure": (
        "kv/manager.py",
        "suspect += pool.uncache_all(block_hash, group)",
        "pass",
        "test_groups.py",
    ),
    "an evicted block's follower is lost": (
        "kv/pool.py",
        "self._children[group].add(follower.parent, follower)",
        "pass",
        "test_groups.py",
    ),
    "what this step computes can be copied already": (
        "kv/pool.py",
        "if origin.ready_at <= self.step:",
        "if True:",
        "test_partial_blocks.py",
    ),
}

RUN_COPY = """
import sys
# An editable install names its own source tree before PYTHONPATH is asked.
sys.meta_path[:] = [f for f in sys.meta_path if not type(f).__module__.startswith("_editable")]
import pytest
sys.exit(pytest.main(sys.argv[1:]))
"""


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_is_caught(name: str, tmp_path: Path) -> None:
    file, right, wrong, tests = MUTANTS[name]
    shutil.copytree(ROOT / "src", tmp_path / "src", ignore=shutil.ignore_patterns("assets", ".*"))
    path = tmp_path / "src/quire/core" / file
    source = path.read_text("utf-8")
    assert source.count(right) == 1, f"{right!r} must stand once in core/{file}"
    path.write_text(source.replace(right, wrong), "utf-8")
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            RUN_COPY,
            "-q",
            "-x",
            "-p",
            "no:cacheprovider",
            f"tests/core/{tests}",
        ],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(tmp_path / "src"), "QUIRE_TEST_NO_SHRINK": "1"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 1, f"nothing noticed that {name}\n{done.stdout[-500:]}"
    assert "failed" in done.stdout
