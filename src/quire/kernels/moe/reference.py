"""Mixture of experts in plain torch."""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.kernels.moe.records import AwayExperts, ClampedGate, Routing

TILE = 8  # rows of every GEMM on a CPU: one shape, so that a row's bits do not depend on how many there are


def logits(x: Tensor, weight: Tensor) -> Tensor:
    """x [T, H], weight [E, H] -> [T, E] float32."""
    return F.linear(x, weight).float()


def choose(logits: Tensor, num_experts: int, top_k: int, renormalize: bool) -> Routing:
    """logits [T, num_experts], or one column more, which is the shared expert's gate.

    Softmax over the experts, then the `top_k` largest, ties to the lowest id; `renormalize`: they sum to 1.
    """
    weights, experts = logits[:, :num_experts].softmax(dim=-1).sort(dim=-1, descending=True, stable=True)
    weights, experts = weights[:, :top_k], experts[:, :top_k]
    if renormalize:
        weights = weights / weights.sum(dim=-1, keepdim=True)
    gates = logits[:, num_experts].sigmoid() if logits.shape[1] > num_experts else None
    return Routing(experts.int().contiguous(), weights.contiguous(), gates)


def experts(
    x: Tensor,  # [T, H]
    gate_up: Tensor,  # [E, 2F, H], rows 0..F-1 gate, F..2F-1 up
    down: Tensor,  # [E, H, F]
    routing: Routing,
    residual: Tensor,  # [T, H]
    shared: Tensor | None = None,  # [T, H] the shared expert's result
    invariant: bool = False,
    clamped: ClampedGate | None = None,
    away: AwayExperts | None = None,
) -> Tensor:  # [T, H]
    """residual + each token's experts, silu(gate) * up between their two matrices, or what is `clamped`, by weight.

    Reads the weights of chosen experts only. `invariant`: a token's bits do not depend on the other tokens; on a CPU
    they never do. `away`: of some experts, which gate_up and down then lack.
    """
    results = x.new_empty(*routing.experts.shape, x.shape[1])
    for expert, tokens, places in chosen(routing):
        rows = F.pad(x[tokens], (0, 0, 0, -len(tokens) % TILE))
        tiles = []
        up_matrix, down_matrix = _matrices(expert, gate_up, down, away)
        for tile in rows.split(TILE):
            both = F.linear(tile, up_matrix)
            if clamped is None:
                gate, up = both.chunk(2, dim=-1)
                tiles.append(F.linear(F.silu(gate) * up, down_matrix))
            else:
                gated = clamped_gate(both + clamped.gate_up_bias[expert], clamped)
                tiles.append(F.linear(gated, down_matrix) + clamped.down_bias[expert])
        results[tokens, places] = torch.cat(tiles)[: len(tokens)]
    return combine(results, routing, residual, shared)


def _matrices(expert: int, gate_up: Tensor, down: Tensor, away: AwayExperts | None) -> tuple[Tensor, Tensor]:
    if away is None:
        return gate_up[expert], down[expert]
    index = int(away.places[expert])
    return (gate_up[index], down[index]) if index >= 0 else (away.gate_up[-1 - index], away.down[-1 - index])


def clamped_gate(both: Tensor, clamped: ClampedGate) -> Tensor:
    """both [T, 2F], gate | up with their biases -> [T, F]."""
    gate, up = both.chunk(2, dim=-1)
    gate = gate.clamp(max=clamped.limit)
    return gate * torch.sigmoid(clamped.alpha * gate) * (up.clamp(-clamped.limit, clamped.limit) + 1)


def chosen(routing: Routing) -> Iterator[tuple[int, Tensor, Tensor]]:
    """(expert, its tokens, the expert's place among each token's) of every expert that some token goes through."""
    for expert in routing.experts.unique().tolist():
        tokens, places = (routing.experts == expert).nonzero(as_tuple=True)
        yield expert, tokens, places


def combine(results: Tensor, routing: Routing, residual: Tensor, shared: Tensor | None) -> Tensor:
    """results [T, k, H] -> residual + their weighted sum (+ gates * shared) [T, H], summed in float32, in order."""
    total = torch.zeros_like(residual, dtype=torch.float32)
    for place in range(results.shape[1]):
        total += routing.weights[:, place, None] * results[:, place]
    if shared is not None and routing.gates is not None:
        total += routing.gates[:, None] * shared
    return (total + residual).to(residual.dtype)
