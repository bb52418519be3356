"""Complete a list of prompts in this process. Run: python examples/offline.py"""

from quire import LLM, SamplingParams

if __name__ == "__main__":
    llm = LLM()  # the model that ships with quire; or LLM("/path/to/a/model/folder")
    params = SamplingParams(temperature=0.0, max_tokens=8)
    prompts = ["The capital of France is", "The capital of Japan is", "12 + 5 ="]
    for output in llm.generate(prompts, params):
        print(f"{output.prompt!r} -> {output.outputs[0].text!r}")
