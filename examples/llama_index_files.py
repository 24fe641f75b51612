"""LlamaIndex: a query engine over a vector store of the server. Start `quire serve` first; needs llama-index-core and
llama-index-llms-openai-like."""

import os

import openai
from llama_index.core.query_engine import RetrieverQueryEngine
from llama_index.core.retrievers import BaseRetriever
from llama_index.core.schema import NodeWithScore, QueryBundle, TextNode
from llama_index.llms.openai_like import OpenAILike

URL = os.environ.get("QUIRE_URL", "http://127.0.0.1:8000")
TEXT = b"Grok-0 is a prototype language model that xAI trained with 33 billion parameters."


class StoreRetriever(BaseRetriever):
    def __init__(self, client: openai.OpenAI, store_id: str) -> None:
        super().__init__()
        self._search = lambda text: client.vector_stores.search(store_id, query=text, max_num_results=3)

    def _retrieve(self, query: QueryBundle) -> list[NodeWithScore]:
        return [
            NodeWithScore(
                node=TextNode(text=hit.content[0].text, metadata={"file": hit.filename}), score=hit.score
            )
            for hit in self._search(query.query_str)
        ]


def main() -> None:
    client = openai.OpenAI(base_url=f"{URL}/v1", api_key="any")
    store = client.vector_stores.create(name="notes")
    client.vector_stores.files.upload_and_poll(
        vector_store_id=store.id, file=("grok.txt", TEXT), poll_interval_ms=50
    )
    name = client.models.list().data[0].id
    model = OpenAILike(api_base=f"{URL}/v1", api_key="any", model=name, is_chat_model=True, temperature=0)
    engine = RetrieverQueryEngine.from_args(StoreRetriever(client, store.id), llm=model)
    answer = engine.query("How many parameters does Grok-0 have?")
    print(answer)
    print("source:", answer.source_nodes[0].metadata["file"])


if __name__ == "__main__":
    main()
