"""A streamed chat with the openai package. Start `quire serve` first."""

import os

import openai

URL = os.environ.get("QUIRE_URL", "http://127.0.0.1:8000")


def main() -> None:
    client = openai.OpenAI(base_url=f"{URL}/v1", api_key="any")
    model = client.models.list().data[0].id
    stream = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": "What is the capital of France?"}],
        temperature=0,
        max_tokens=24,
        stream=True,
        stream_options={"include_usage": True},
    )
    print(f"{model}: ", end="")
    for chunk in stream:
        if chunk.choices:
            print(chunk.choices[0].delta.content or "", end="", flush=True)
        elif chunk.usage:  # the last chunk
            print(f"\n{chunk.usage.prompt_tokens} prompt tokens, {chunk.usage.completion_tokens} generated")


if __name__ == "__main__":
    main()
