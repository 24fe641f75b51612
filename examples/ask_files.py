"""Answer a question from files, and say where the answer is from."""

import tempfile
from pathlib import Path

from quire import Retriever

FILES = {
    "grok.txt": "Grok-0 is a prototype language model that xAI trained with 33 billion parameters. It approaches "
    "LLaMA 2 (70B) on standard benchmarks, and uses half of its training resources.",
    "bread.txt": "Bread is baked at about 230 degrees.",
}


def main() -> None:
    with tempfile.TemporaryDirectory() as folder, Retriever(use_tqdm=False) as retriever:
        for name, text in FILES.items():
            Path(folder, name).write_text(text)
        retriever.add(folder)
        answer = retriever.ask("How many parameters does Grok-0 have?")
        print(answer.text)
        for source in answer.sources:
            print(f"  from {Path(source.file).name}, {source.position}, score {source.score:.2f}")


if __name__ == "__main__":
    main()
