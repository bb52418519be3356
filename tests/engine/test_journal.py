"""What the journal must remember to finish a request elsewhere."""

from __future__ import annotations

from quire.core.output import EngineCoreOutput
from quire.engine.frontend.journal import Journal
from quire.engine.messages import EngineCoreRequest
from quire.outputs import FinishReason
from quire.params import SamplingParams


def request(name: str, outputs: list[int] | None = None) -> EngineCoreRequest:
    return EngineCoreRequest(
        name, name, 0, [1, 2, 3], SamplingParams(seed=7), 0.0, output_token_ids=outputs or []
    )


def test_replay_carries_the_output_so_far_as_output() -> None:
    journal = Journal()
    journal.open([request("a"), request("b", [9])])
    journal.record([EngineCoreOutput("a", [4]), EngineCoreOutput("b", [5, 6])])
    journal.record([EngineCoreOutput("a", [7])])
    replayed = {r.request_id: r for r in journal.replay()}
    assert replayed["a"].output_token_ids == [4, 7]
    assert replayed["b"].output_token_ids == [9, 5, 6]
    assert replayed["a"].prompt_token_ids == [1, 2, 3]
    assert replayed["a"].sampling_params.seed == 7


def test_ended_requests_are_forgotten_and_unknown_outputs_dropped() -> None:
    journal = Journal()
    journal.open([request("a"), request("b"), request("c")])
    done = EngineCoreOutput("a", [4], finish_reason=FinishReason.STOP)
    stray = EngineCoreOutput("gone", [1])
    journal.record([done, stray])
    journal.close(["b", "never"])
    assert [r.request_id for r in journal.replay()] == ["c"]
    assert len(journal) == 1


def test_replaying_does_not_alias_the_journal() -> None:
    journal = Journal()
    journal.open([request("a")])
    journal.replay()[0].output_token_ids.append(99)
    assert journal.replay()[0].output_token_ids == []
