"""A script written for vllm. Run: quire run --model quire-demo examples/hello_vllm.py"""

from vllm import LLM, SamplingParams

prompts = ["Hello, my name is", "The capital of France is"]
sampling_params = SamplingParams(temperature=0.8, top_p=0.95, seed=1)


def main() -> None:
    llm = LLM(model="facebook/opt-125m")
    for output in llm.generate(prompts, sampling_params):
        print(f"Prompt: {output.prompt!r}, Generated text: {output.outputs[0].text!r}")


if __name__ == "__main__":
    main()
