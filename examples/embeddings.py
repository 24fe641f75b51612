"""Embed texts with the built-in encoder and rank them by cosine similarity."""

from quire import Embedder

QUERY = "How is attention memory managed?"
TEXTS = [
    "The KV cache is divided into blocks of a fixed size.",
    "Bread is baked at about 230 degrees.",
    "Blocks are reference counted and shared between sequences.",
]


def main() -> None:
    with Embedder() as embedder:
        vectors = embedder.embed([QUERY, *TEXTS], use_tqdm=False)  # [4, 384], each of length 1
    similarities = vectors[1:] @ vectors[0]
    for similarity, text in sorted(zip(similarities, TEXTS, strict=True), reverse=True):
        print(f"{similarity:6.3f}  {text}")


if __name__ == "__main__":
    main()
