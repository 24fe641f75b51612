"""Logits to tokens: each row by its own parameters, the whole batch in one pass."""

from quire.sampling.columns import DeviceColumns, SamplingColumns
from quire.sampling.logprobs import logprob_entries, prompt_logprobs
from quire.sampling.records import LogprobTensors, Sampled, SampleRequests, TokenMask
from quire.sampling.sampler import Sampler

__all__ = [
    "DeviceColumns",
    "LogprobTensors",
    "SampleRequests",
    "Sampled",
    "Sampler",
    "SamplingColumns",
    "TokenMask",
    "logprob_entries",
    "prompt_logprobs",
]
