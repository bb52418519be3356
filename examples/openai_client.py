"""Ask a running server. Run: pip install openai; python examples/openai_client.py [URL]"""

import sys

try:
    from openai import APIConnectionError, OpenAI
except ImportError:
    sys.exit("This example needs the OpenAI client: pip install openai")


def main(url: str) -> None:
    client = OpenAI(base_url=f"{url}/v1", api_key="none")
    stream = client.chat.completions.create(
        model=client.models.list().data[0].id,
        messages=[{"role": "user", "content": "What is the capital of France?"}],
        max_tokens=32,
        temperature=0,
        stream=True,
    )
    for chunk in stream:
        if chunk.choices:
            print(chunk.choices[0].delta.content or "", end="", flush=True)
    print()


if __name__ == "__main__":
    url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000"
    try:
        main(url)
    except APIConnectionError:
        sys.exit(f"No server answers at {url}: start one with `quire serve`")
