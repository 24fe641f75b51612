"""`quire show MODEL`: what a model is, from its description alone."""

import argparse
import json

from quire.bench.capacity import Device, plan_capacity
from quire.bench.table import aligned, in_bytes
from quire.cli.flags import add_model_argument, engine_settings
from quire.cli.parser import Parser
from quire.cli.start import described_source
from quire.core.config import EngineConfig


def add_arguments(parser: Parser) -> None:
    add_model_argument(parser)
    parser.add_argument("--revision", help="branch, tag or commit of a hub model")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(arguments: argparse.Namespace) -> int:
    config = EngineConfig.of(**engine_settings(arguments))
    source = described_source(config)
    plan = plan_capacity(config, source, Device("this machine", False, None, 0.0, 0.0, ""))
    weights, model = plan.weights, plan.model
    bits = 8 * weights.num_bytes / weights.num_parameters
    record = {
        "model": source.name,
        "architecture": model.architecture,
        "parameters": weights.num_parameters,
        "layers": model.num_layers,
        "context": plan.max_model_len,
        "vocabulary": model.vocab_size,
        "quantization": plan.format_name,
        "bits": round(bits, 2),
        "weights_bytes": weights.num_bytes,
        "kv_bytes_per_token": plan.kv_bytes_per_token,
        "chat_template": "chat_template" in source.tokenizer_config(),
    }
    if arguments.json:
        print(json.dumps(record, indent=2))
        return 0
    rows = [
        ["model", source.name],
        ["architecture", f"{model.architecture}, {model.num_layers} layers"],
        ["parameters", f"{weights.num_parameters / 1e6:,.0f} M"],
        ["context", f"{plan.max_model_len:,} tokens"],
        ["vocabulary", f"{model.vocab_size:,} tokens"],
        ["quantization", f"{plan.format_name} on a CPU, {bits:.2f} bits for each parameter"],
        ["weights", in_bytes(weights.num_bytes)],
        ["kv cache", f"{in_bytes(plan.kv_bytes_per_token)} a token"],
        ["chat template", "yes" if record["chat_template"] else "no"],
    ]
    print(aligned(rows))
    return 0
