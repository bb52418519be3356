"""A request that was swapped out to a real second tier, as its trace and explain tell it."""

from __future__ import annotations

import pytest

from otlp_receivers import GrpcReceiver
from patience import PATIENCE
from quire import LLM, SamplingParams
from quire.observability.traces import tracer as tracing


def test_a_swapped_request_has_its_span_and_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracing, "CLOSE_SECONDS", PATIENCE)
    receiver = GrpcReceiver()
    params = SamplingParams(max_tokens=60, ignore_eos=True, temperature=0)
    prompts = [[300 + 40 * i + j for j in range(40)] for i in range(4)]
    with LLM(
        num_gpu_blocks_override=14,
        max_model_len=128,
        enable_prefix_caching=False,
        swap_space=0.01,
        preemption_mode="swap",
        otlp_traces_endpoint=receiver.endpoint,
    ) as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False)
        told = {output.request_id: llm.explain(output.request_id)[0] for output in outputs}
    receiver.close()
    seen = receiver.seen
    swapped = seen.named("swapped_out")
    assert swapped, "nobody was swapped out"
    for span in swapped:
        assert span.attributes["quire.reason"] == "blocks"
        assert span.attributes["quire.preemption.mode"] == "swap"
        assert span.attributes["quire.blocks_given_up"] > 0
    for name, explanation in told.items():
        root = seen.root(name)
        children = [s for s in seen.children(root) if s.name != "first_token"]
        assert sum(s.seconds for s in children) == pytest.approx(root.seconds, abs=1e-5)
        away = [s for s in children if s.name == "swapped_out"]
        assert not any(s.attributes.get("quire.recomputed") for s in children)
        tokens = 1 + sum(s.attributes["quire.tokens"] for s in children if s.name == "decode_step")
        assert tokens == 60
        parts = [p for p in explanation.parts if p.cause == "preempted"]
        assert len(parts) == len(away)
        assert all("swapped out" in part.text for part in parts)
        decoded = sum(p.steps for p in explanation.parts if p.cause.startswith("decode"))
        assert decoded == 59 and not any(p.cause == "recomputed" for p in explanation.parts)
