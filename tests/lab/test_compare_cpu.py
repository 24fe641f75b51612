"""The comparison of CPU engines: variants of Quire are compared with peers, not with each other."""

import argparse

import numpy as np
import torch

from quire.quant.gguf_blocks import GgufBlocks
from quire_lab.benchmarks.compare_cpu.__main__ import summarise
from quire_lab.benchmarks.large_gguf import Q4_K, Q6_K, random_blocks


def test_each_variant_of_quire_is_compared_with_the_best_peer():
    speeds = {"quire-int8": 100.0, "quire-native": 150.0, "openvino": 50.0, "llamacpp": 75.0}
    records = [{"engine": engine, "n": 1, "decode_tok_s": speed} for engine, speed in speeds.items()]
    block = summarise(records, argparse.Namespace(n=[1], engines=list(speeds)))[0]
    assert block["quire-native_to_best_peer"] == {"decode_tok_s": 2.0}
    assert block["quire-int8_to_best_peer"] == {"decode_tok_s": 100 / 75}
    assert "openvino_to_best_peer" not in block


def test_random_blocks_decode_to_weights_of_a_trained_models_size():
    for kind in (Q4_K, Q6_K):
        blocks = torch.from_numpy(random_blocks(np.random.default_rng(0), 16, 512, kind)).view(16, 2, -1)
        scheme = GgufBlocks(kind.name)
        scheme.check(blocks)
        weight = scheme.decode({"blocks": blocks}, (16, 512))
        assert 0.01 < float(weight.std()) < 0.06
        assert abs(float(weight.mean())) < 0.01
