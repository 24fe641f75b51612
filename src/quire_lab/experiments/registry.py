"""Which experiments there are. A module is imported when its experiment is chosen: most of them need torch."""

import difflib
import importlib
from typing import NamedTuple

from quire.core.errors import ConfigError
from quire_lab.report.experiment import Experiment


class Listed(NamedTuple):
    module: str  # has EXPERIMENT
    about: str  # one line for `quire bench lab list`


# in the order of the report: what memory and batches are, then what they cost, then whole workloads
EXPERIMENTS = {
    "numbers": Listed("quire_lab.experiments.numbers", "rules of thumb, measured on this machine"),
    "precision": Listed(
        "quire_lab.experiments.precision", "number formats: error, divergence, equal tokens, bytes, speed"
    ),
    "kvcache": Listed("quire_lab.experiments.kvcache", "generating with and without a KV cache"),
    "roofline": Listed("quire_lab.experiments.roofline", "what bounds decoding: reading memory or computing"),
    "waste": Listed(
        "quire_lab.experiments.waste", "how KV memory is spent under paging and three reservations"
    ),
    "batching": Listed(
        "quire_lab.experiments.batching", "static, dynamic and continuous batches over time and load"
    ),
    "sharing": Listed("quire_lab.experiments.sharing", "blocks that parallel samples and beams share"),
    "blocksize": Listed(
        "quire_lab.experiments.blocksize", "latency and attention time for blocks of 1 to 256 tokens"
    ),
    "preempt": Listed(
        "quire_lab.experiments.preempt", "when memory runs out: swapping against computing again"
    ),
    "prefix": Listed(
        "quire_lab.experiments.prefix", "what remembering prompts saves: a system prompt, chats"
    ),
    "replicas": Listed(
        "quire_lab.experiments.replicas", "replicas against tensor parallelism by model size (simulated)"
    ),
    "routing": Listed(
        "quire_lab.experiments.routing", "which replica gets a request: four policies (simulated)"
    ),
    "placement": Listed(
        "quire_lab.experiments.placement", "many models on groups of GPUs against replicas (simulated)"
    ),
    "adapters": Listed(
        "quire_lab.experiments.adapters", "many adapters: batched together, or merged one by one"
    ),
    "tuning": Listed("quire_lab.experiments.tuning", "a format taught by prompts, examples and fine-tuning"),
    "flash": Listed("quire_lab.experiments.flash", "attention's gradients: whole matrices against tiles"),
    "zero": Listed("quire_lab.experiments.zero", "training on ranks: bytes of each, measured and computed"),
    "search": Listed(
        "quire_lab.experiments.search", "exact vector search against a graph (HNSW): recall, distances, time"
    ),
    "rag": Listed(
        "quire_lab.experiments.rag", "XQuAD's questions: passages found, answers with and without them"
    ),
    "batched": Listed(
        "quire_lab.experiments.batched", "requests that fit at once, by how memory is given (simulated)"
    ),
    "rate": Listed("quire_lab.experiments.rate", "latency against request rate for every policy (simulated)"),
    "characterize": Listed(
        "quire_lab.experiments.characterize", "batching and paging over models, devices and rates (simulated)"
    ),
    "slices": Listed(
        "quire_lab.experiments.slices", "MIG slices: published cases, and a fleet of 54 models (simulated)"
    ),
    "gpu-sharing": Listed(
        "quire_lab.experiments.gpu_sharing", "what a neighbour on the same GPU or the same cores costs"
    ),
    "trace": Listed(
        "quire_lab.experiments.trace", "an hour's conversations replayed: the service level held (simulated)"
    ),
}


def find(name: str) -> Experiment:
    """ConfigError with the closest names if there is none of this name."""
    if name not in EXPERIMENTS:
        near = difflib.get_close_matches(name, [*EXPERIMENTS, "all", "list"], n=1)
        hint = f"did you mean {near[0]}?" if near else "`quire bench lab list` shows them"
        raise ConfigError(f"there is no experiment {name!r}: {hint}")
    found: Experiment = importlib.import_module(EXPERIMENTS[name].module).EXPERIMENT
    return found
