"""LangChain: an answer from a file with its source. Start `quire serve` first; needs langchain-openai."""

import os
from typing import Any

import openai
from langchain_openai import ChatOpenAI

URL = os.environ.get("QUIRE_URL", "http://127.0.0.1:8000")
TEXT = b"Grok-0 is a prototype language model that xAI trained with 33 billion parameters."


def main() -> None:
    client = openai.OpenAI(base_url=f"{URL}/v1", api_key="any")
    store = client.vector_stores.create(name="notes")
    client.vector_stores.files.upload_and_poll(
        vector_store_id=store.id, file=("grok.txt", TEXT), poll_interval_ms=50
    )
    model = ChatOpenAI(
        base_url=f"{URL}/v1",
        api_key=lambda: "any",
        model=client.models.list().data[0].id,
        temperature=0,
        use_responses_api=True,
    )
    searching = model.bind_tools([{"type": "file_search", "vector_store_ids": [store.id]}])
    answer = searching.invoke("How many parameters does Grok-0 have?")
    print(answer.text)
    text: Any = answer.content_blocks[-1]
    print("source:", text["annotations"][0]["title"])


if __name__ == "__main__":
    main()
