"""Embeddings, as in the embed example."""

from vllm import LLM, EngineArgs, PoolingParams
from vllm.config import PoolerConfig
from vllm.utils.argparse_utils import FlexibleArgumentParser


def parse_args():
    parser = FlexibleArgumentParser()
    parser = EngineArgs.add_cli_args(parser)
    parser.set_defaults(model="intfloat/e5-small", runner="pooling", enforce_eager=True)
    return parser.parse_args()


def main(args):
    prompts = ["Hello, my name is", "The capital of France is", "The future of AI is"]
    llm = LLM(**vars(args), pooler_config=PoolerConfig(pooling_type="LAST", use_activation=True))
    outputs = llm.embed(prompts, lora_request=None, tokenization_kwargs=None, use_tqdm=False)
    for prompt, output in zip(prompts, outputs, strict=True):
        embeds = output.outputs.embedding
        print(f"Prompt: {prompt!r} \nEmbeddings: {str(embeds[:4])} (size={len(embeds)})")
        assert abs(sum(x * x for x in embeds) - 1) < 1e-3
    cut = llm.embed(prompts, tokenization_kwargs={"truncate_prompt_tokens": 2}, use_tqdm=False)
    assert [len(output.prompt_token_ids) for output in cut] == [2, 2, 2]
    raw = llm.encode(prompts, PoolingParams(), pooling_task="embed", use_tqdm=False)
    assert len(raw[0].outputs.data) == outputs[0].outputs.hidden_size
    (score,) = llm.score("one", "one", use_tqdm=False)
    assert abs(score.outputs.score - 1) < 1e-3


if __name__ == "__main__":
    args = parse_args()
    del args.pooler_config
    main(args)
