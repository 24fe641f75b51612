"""Mixture of experts by native code. Promises are those of the reference; a row's bits depend on that row alone."""

import torch
from torch import Tensor

from quire.kernels import native
from quire.kernels.moe.records import Routing
from quire.kernels.moe.reference import experts as experts

ADDRESSES = 6  # of an expert in int8: packed, scales, sums of gate | up, then of down


def logits(x: Tensor, weight: Tensor) -> Tensor:
    """x [T, H], weight [E, H] -> [T, E] float32."""
    out = native.empty(x.shape[0], weight.shape[0])
    native.check_floats(x, weight, out)
    native.call(
        "router_logits",
        (
            x.data_ptr(), x.stride(0), x.shape[0], x.shape[1],
            weight.data_ptr(), weight.stride(0), weight.shape[0], out.data_ptr(),
        ),
        (x, weight, out),
    )  # fmt: skip
    return out


def choose(logits: Tensor, num_experts: int, top_k: int, renormalize: bool) -> Routing:
    """As the reference."""
    tokens, width = logits.shape
    chosen, weights = native.empty(tokens, top_k, dtype=torch.int32), native.empty(tokens, top_k)
    gates = native.empty(tokens) if width > num_experts else None
    native.check_floats(logits)
    native.call(
        "choose_experts",
        (
            logits.data_ptr(), width, tokens, num_experts, top_k, int(renormalize),
            chosen.data_ptr(), weights.data_ptr(), native.address(gates),
        ),
        (logits, chosen, weights, gates),
    )  # fmt: skip
    return Routing(chosen, weights, gates)


def combine(results: Tensor, routing: Routing, residual: Tensor, shared: Tensor | None) -> Tensor:
    """As the reference; results [T, k, H]."""
    out = native.empty(*residual.shape)
    native.check_floats(results, residual, shared, out)
    gates = routing.gates if shared is not None else None
    native.call(
        "combine_experts",
        (
            results.data_ptr(), results.shape[0], results.shape[1], results.shape[2], routing.weights.data_ptr(),
            native.address(gates), native.address(shared), 0 if shared is None else shared.stride(0),
            residual.data_ptr(), residual.stride(0), out.data_ptr(),
        ),
        (results, routing.weights, gates, shared, residual, out),
    )  # fmt: skip
    return out


def int8_experts(
    x: Tensor,  # [T, H] fp32
    addresses: Tensor,  # [E, ADDRESSES] int64, of tensors that the caller keeps
    inner: int,  # F, a multiple of 16
    routing: Routing,
    residual: Tensor,  # [T, H]
    shared: Tensor | None = None,  # [T, H]
) -> Tensor:  # [T, H]
    """As `experts`, each expert's matrices as `int8_linear` packs them; reads those of chosen experts only."""
    tokens, hidden = x.shape
    top_k = routing.experts.shape[1]
    rows, gated = native.empty(tokens * top_k, hidden), native.empty(tokens * top_k, inner)
    results = native.empty(tokens, top_k, hidden)
    order = native.empty(tokens * top_k + addresses.shape[0] + 1, dtype=torch.int32)
    native.check_floats(x)
    native.check_indices(torch.int64, addresses)
    native.check_indices(torch.int32, routing.experts)
    native.call(
        "int8_experts",
        (
            x.data_ptr(), x.stride(0), tokens, hidden, inner, addresses.data_ptr(), addresses.shape[0], top_k,
            routing.experts.data_ptr(), order.data_ptr(), rows.data_ptr(), gated.data_ptr(), results.data_ptr(),
        ),
        (x, addresses, routing.experts, order, rows, gated, results),
    )  # fmt: skip
    return combine(results, routing, residual, shared)
