"""Sentences per second of the built-in encoder on this CPU, beside transformers and sentence-transformers.

usage: python -m quire_lab.benchmarks.embeddings --xquad FILE [--rounds N] [--output FILE]

FILE is XQuAD's English JSON: its questions are short texts (about 15 tokens), its paragraphs long ones. Quality:
cosines with transformers in fp32, and how often a question's nearest paragraph is its own.
"""

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quire.weights.builtin import BUILTIN_ENCODER_NAME, builtin_encoder_folder

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # torch's threads must not spin on cores that others use

import numpy
import torch
import transformers

from quire import Embedder
from quire.bench.machine import describe_origin
from quire.kernels import native

BATCH = 32  # sentence-transformers' own default
MAX_TOKENS = 256
Embed = Callable[[list[str]], numpy.ndarray]


@dataclass(frozen=True)
class EmbeddingSystem:
    name: str
    embed: Embed
    torch_threads: int  # where native kernels do the work, torch keeps to one


def quire_system(name: str, quantization: str, threads: int) -> EmbeddingSystem:
    embedder = Embedder(quantization=quantization, use_tqdm=False)
    return EmbeddingSystem(name, lambda texts: embedder.embed(texts, use_tqdm=False, truncate=True), threads)


def transformers_system(folder: str, threads: int) -> EmbeddingSystem:
    """Padded batches of texts of similar length, mean over the tokens: what the model's card shows, done well."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModel.from_pretrained(folder).eval()

    @torch.inference_mode()
    def embed(texts: list[str]) -> numpy.ndarray:
        order = sorted(range(len(texts)), key=lambda i: -len(texts[i]))
        vectors = numpy.empty((len(texts), model.config.hidden_size), dtype=numpy.float32)
        for first in range(0, len(order), BATCH):
            places = order[first : first + BATCH]
            inputs = tokenizer(
                [texts[i] for i in places],
                padding=True,
                truncation=True,
                max_length=MAX_TOKENS,
                return_tensors="pt",
            )
            mask = inputs["attention_mask"].unsqueeze(-1)
            hidden = model(**inputs).last_hidden_state
            means = (hidden * mask).sum(1) / mask.sum(1)
            vectors[places] = torch.nn.functional.normalize(means).numpy()
        return vectors

    return EmbeddingSystem("transformers", embed, threads)


def sentence_transformers_system(folder: str, threads: int) -> EmbeddingSystem | None:
    try:
        from sentence_transformers import SentenceTransformer
    except ImportError:
        return None
    model = SentenceTransformer(folder, device="cpu")
    return EmbeddingSystem(
        "sentence-transformers",
        lambda texts: model.encode(texts, batch_size=BATCH, show_progress_bar=False),
        threads,
    )


def read_xquad(path: Path) -> tuple[list[str], list[str], list[int]]:
    """Questions, paragraphs, and each question's paragraph."""
    paragraphs = [one for article in json.loads(path.read_text())["data"] for one in article["paragraphs"]]
    asked = [(question["question"], at) for at, one in enumerate(paragraphs) for question in one["qas"]]
    return [text for text, _ in asked], [one["context"] for one in paragraphs], [at for _, at in asked]


def timed(system: EmbeddingSystem, texts: list[str]) -> tuple[float, numpy.ndarray]:
    torch.set_num_threads(system.torch_threads)
    started = time.perf_counter()
    vectors = system.embed(texts)
    return time.perf_counter() - started, vectors


@dataclass(frozen=True)
class EmbeddingTimes:
    seconds: list[list[float]]  # of each piece, in each round
    vectors: numpy.ndarray


def measure(
    systems: list[EmbeddingSystem], texts: list[str], piece: int, num_rounds: int
) -> dict[str, EmbeddingTimes]:
    """The systems take turns piece by piece: what else the machine does falls on all of them."""
    pieces = [texts[first : first + piece] for first in range(0, len(texts), piece)]
    seconds: dict[str, list[list[float]]] = {system.name: [[] for _ in pieces] for system in systems}
    vectors: dict[str, list[numpy.ndarray]] = {system.name: [] for system in systems}
    for system in systems:
        timed(system, pieces[0])  # threads and memory are there from now on
    for number in range(num_rounds):
        for at, part in enumerate(pieces):
            for system in systems:
                taken, embedded = timed(system, part)
                seconds[system.name][at].append(taken)
                if number == 0:
                    vectors[system.name].append(embedded)
    return {name: EmbeddingTimes(seconds[name], numpy.concatenate(vectors[name])) for name in seconds}


def summary(by_texts: dict[str, dict[str, EmbeddingTimes]], own: list[int]) -> dict[str, Any]:
    """Rates are from each piece's least time: on a machine that others use, that is the one nearest the truth."""
    result: dict[str, Any] = {}
    for system in by_texts["questions"]:
        of = {workload: measured[system] for workload, measured in by_texts.items()}
        exact = {workload: measured["transformers"].vectors for workload, measured in by_texts.items()}
        nearest = (of["questions"].vectors @ of["paragraphs"].vectors.T).argmax(axis=1)
        result[system] = {
            "texts_per_second": {
                name: len(taken.vectors) / sum(min(times) for times in taken.seconds)
                for name, taken in of.items()
            },
            "median_texts_per_second": {
                name: len(taken.vectors) / sum(statistics.median(times) for times in taken.seconds)
                for name, taken in of.items()
            },
            "least_cosine": {
                name: float((taken.vectors * exact[name]).sum(axis=1).min()) for name, taken in of.items()
            },
            "own_paragraph_nearest": float((nearest == numpy.array(own)).mean()),
        }
    return result


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--xquad", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/embeddings.json"))
    arguments = parser.parse_args()
    questions, paragraphs, own = read_xquad(arguments.xquad)
    folder, threads = str(builtin_encoder_folder()), native.default_num_threads()
    systems = [
        quire_system("quire int8", "int8", 1),
        quire_system("quire fp32", "none", threads),
        transformers_system(folder, threads),
    ]
    systems += [system for system in [sentence_transformers_system(folder, threads)] if system is not None]
    load_before = os.getloadavg()[0]
    times = {
        name: measure(systems, texts, piece, arguments.rounds)
        for name, texts, piece in (("questions", questions, 8 * BATCH), ("paragraphs", paragraphs, 2 * BATCH))
    }
    origin = describe_origin()
    origin["versions"]["transformers"] = transformers.__version__
    result = {
        **origin,
        "model": BUILTIN_ENCODER_NAME,
        "texts": {"questions": len(questions), "paragraphs": len(paragraphs)},
        "rounds": arguments.rounds,
        "batch_of_the_others": BATCH,
        "threads": threads,
        "load_average_before": load_before,
        "systems": summary(times, own),
    }
    arguments.output.write_text(json.dumps(result, indent=2) + "\n")
    for name, summed in result["systems"].items():
        print(f"{name:<22}", json.dumps(summed))


if __name__ == "__main__":
    main()
