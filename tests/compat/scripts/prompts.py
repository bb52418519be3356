"""Prompts of every kind, and parameters for each."""

from vllm import LLM, SamplingParams, TextPrompt, TokensPrompt
from vllm.inputs import PromptType
from vllm.logprobs import Logprob
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.sampling_params import RequestOutputKind

llm = LLM(model="facebook/opt-125m", seed=3)
ids = llm.get_tokenizer().encode("The capital of France is")
prompts: list[PromptType] = [
    "The capital of France is",
    TextPrompt(prompt="The capital of France is", multi_modal_data=None),
    TokensPrompt(prompt_token_ids=ids),
    {"prompt_token_ids": ids},
]
params = SamplingParams(temperature=0.0, max_tokens=4, logprobs=2, prompt_logprobs=1)
each = [params.clone() for _ in prompts]
each[3].max_tokens = 2
each[3].stop_token_ids = []
assert params.max_tokens == 4 and params is not each[0] and params == each[0]
outputs = llm.generate(prompts, each, use_tqdm=False, priority=0)
texts = [output.outputs[0].text for output in outputs]
assert texts[0] == texts[1] == texts[2] and texts[0].startswith(texts[3])
for output in outputs:
    assert isinstance(output, RequestOutput) and output.finished
    completion = output.outputs[0]
    assert isinstance(completion, CompletionOutput) and completion.finish_reason == "length"
    first = next(iter(completion.logprobs[0].values()))
    assert isinstance(first, Logprob) and first.rank == 1
    assert output.kv_transfer_params is None and output.encoder_prompt is None
    assert completion.lora_request is None and completion.routed_experts is None
assert RequestOutputKind.DELTA.value == 1
same = SamplingParams(
    structured_outputs=None, thinking_token_budget=None, extra_args={}, flat_logprobs=False,
    skip_clone=True,
)  # fmt: skip
assert same == SamplingParams() == SamplingParams.from_optional(temperature=None)
