"""The first script of every tutorial."""

from vllm import LLM, SamplingParams

prompts = [
    "Hello, my name is",
    "The president of the United States is",
    "The capital of France is",
    "The future of AI is",
]
sampling_params = SamplingParams(temperature=0.8, top_p=0.95, seed=7)


def main():
    llm = LLM(
        model="facebook/opt-125m",
        tensor_parallel_size=1,
        trust_remote_code=True,
        dtype="float32",
        gpu_memory_utilization=0.9,
        enforce_eager=True,
        disable_log_stats=None,
        max_num_seqs=None,
    )
    outputs = llm.generate(prompts, sampling_params, lora_request=None)
    print("-" * 60)
    for output in outputs:
        print(f"Prompt:    {output.prompt!r}\nOutput:    {output.outputs[0].text!r}")
    assert len(outputs) == 4 and all(len(o.outputs[0].token_ids) <= 16 for o in outputs)


if __name__ == "__main__":
    main()
