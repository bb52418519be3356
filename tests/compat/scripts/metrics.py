"""Metrics of an engine, as in the metrics example."""

from vllm import LLM, SamplingParams
from vllm.v1.metrics.reader import Counter, Gauge, Histogram, Vector

llm = LLM(model="facebook/opt-125m", disable_log_stats=False)
llm.generate(["Hello, my name is"] * 2, SamplingParams(max_tokens=3), use_tqdm=False)
found = {}
for metric in llm.get_metrics():
    if isinstance(metric, (Counter, Gauge)):
        found[metric.name] = metric.value
    elif isinstance(metric, Histogram):
        found[metric.name] = metric.count
    elif isinstance(metric, Vector):
        found[metric.name] = metric.values
assert found["vllm:generation_tokens"] == 6 and found["vllm:num_requests_running"] == 0
assert found["vllm:time_to_first_token_seconds"] == 2
