"""Conversations, a template of one's own, and a bar of tqdm's kind."""

from vllm import LLM, SamplingParams


class Bar:
    made = []

    def __init__(self, total, desc, **_):
        self.total, self.done = total, 0
        Bar.made.append(self)

    def update(self, n):
        self.done += n

    def close(self):
        assert self.done == self.total


llm = LLM(model="Qwen/Qwen2.5-0.5B-Instruct", max_model_len=512)
conversation = [
    {"role": "system", "content": "You are a helpful assistant"},
    {"role": "user", "content": "Hello"},
    {"role": "assistant", "content": "Hello! How can I assist you today?"},
    {"role": "user", "content": "What is the capital of France?"},
]
sampling_params = SamplingParams(temperature=0, max_tokens=8)
outputs = llm.chat(conversation, sampling_params, False)
batch = llm.chat([conversation] * 3, sampling_params, use_tqdm=Bar)
assert [o.outputs[0].text for o in batch] == [outputs[0].outputs[0].text] * 3
assert [bar.total for bar in Bar.made] == [3]

template = "{% for m in messages %}{{ m['content'] }} {% endfor %}"
own = llm.chat(conversation, sampling_params, use_tqdm=False, chat_template=template)
assert own[0].prompt.startswith("You are a helpful assistant Hello")

tokenizer = llm.get_tokenizer()
text = tokenizer.apply_chat_template(conversation, tokenize=False, add_generation_prompt=True)
ids = tokenizer.apply_chat_template(conversation, tokenize=True, add_generation_prompt=True)
assert isinstance(text, str) and isinstance(ids, list)
again = llm.generate({"prompt_token_ids": ids}, sampling_params, use_tqdm=False)
assert again[0].outputs[0].text == outputs[0].outputs[0].text

stops = [tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids(tokenizer.eos_token)]
stopped = llm.generate(text, SamplingParams(temperature=0, stop_token_ids=stops), use_tqdm=False)
assert stopped[0].outputs[0].token_ids and tokenizer(text, add_special_tokens=False).input_ids
