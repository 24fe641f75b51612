"""Logit bias and bans: edits of single logits, and bit masks over whole rows. All in place.

A ban is minus infinity added, so edits of one token commute and a ban outlives any bias or penalty.
"""

import numpy as np
import torch
from torch import Tensor

from quire.sampling.columns import BadSequences, RowEdits, RowFlag
from quire.sampling.records import SampleRequests, TokenMask, on_device

MANY_IDS = 4096  # of one row; lists up to this length are joined for one addition


def apply_edits(logits: Tensor, flags: np.ndarray, requests: SampleRequests) -> None:
    """Everything that rows ask for beside penalties; flags [S] are the rows' RowFlags."""
    _add_listed(logits, flags, requests)
    _ban_sequences(logits, np.flatnonzero(flags & RowFlag.BAD_SEQUENCES), requests)
    indices = np.flatnonzero(flags & RowFlag.ALLOWED)
    if len(indices):
        bits = np.stack([_edits(requests, index).allowed_bits for index in indices.tolist()])
        apply_mask(logits, TokenMask(indices, bits))
    if requests.mask is not None:
        apply_mask(logits, requests.mask)


def apply_mask(logits: Tensor, mask: TokenMask) -> None:
    """Bans the tokens whose bits are clear, in the mask's rows."""
    if not len(mask.indices):
        return
    device, vocab_size = logits.device, logits.shape[1]
    if device.type == "cpu":
        _mask_on_host(logits, mask)
        return
    # bytes, lowest bits first, so that the unpacked bits take no more room than booleans
    packed = on_device(np.ascontiguousarray(mask.bits, dtype="<u4").view(np.uint8), device)
    allowed = (packed[:, :, None] >> torch.arange(8, dtype=torch.uint8, device=device)) & 1
    banned = allowed.view(len(packed), -1)[:, :vocab_size] == 0
    if len(mask.indices) == len(logits) and (mask.indices == np.arange(len(logits))).all():
        logits.masked_fill_(banned, -torch.inf)
        return
    indices = on_device(mask.indices, device)
    logits[indices] = logits[indices].masked_fill_(banned, -torch.inf)


def _mask_on_host(logits: Tensor, mask: TokenMask) -> None:
    """The same in a tenth of the time: numpy is quick with bits and with bytes that say where to write."""
    packed = ~np.ascontiguousarray(mask.bits, dtype="<u4").view(np.uint8)
    banned = np.unpackbits(packed, axis=1, count=logits.shape[1], bitorder="little").view(np.bool_)
    values = logits.detach().numpy()  # the same memory
    for index, row in zip(mask.indices.tolist(), banned, strict=True):
        np.copyto(values[index], -np.inf, where=row)


def _add_listed(logits: Tensor, flags: np.ndarray, requests: SampleRequests) -> None:
    """Biases, one-token bad words, and the stop tokens of rows that are not long enough yet: one addition."""
    vocab_size = logits.shape[1]
    targets: list[np.ndarray] = []
    values: list[np.ndarray] = []
    for index in np.flatnonzero(flags & RowFlag.EDITED).tolist():
        edits = _edits(requests, index)
        targets.append(edits.bias_ids + index * vocab_size)
        values.append(edits.bias_values)
    for index in np.flatnonzero(flags & RowFlag.MIN_TOKENS).tolist():
        stop_ids = _edits(requests, index).stop_ids
        if len(stop_ids) > MANY_IDS:
            logits[index].index_fill_(0, on_device(stop_ids, logits.device), -torch.inf)
            continue
        targets.append(stop_ids + index * vocab_size)
        values.append(np.full(len(stop_ids), -np.inf, np.float32))
    if targets:
        device = logits.device
        added = on_device(np.concatenate(values), device)
        logits.view(-1).index_add_(0, on_device(np.concatenate(targets), device), added)


def _ban_sequences(logits: Tensor, indices: np.ndarray, requests: SampleRequests) -> None:
    """Bans a bad word's last token where the row's tokens, prompt included, end with the ones before it."""
    if not len(indices):
        return
    by_length: dict[int, list[tuple[int, BadSequences]]] = {}
    for index in indices.tolist():
        for words in _edits(requests, index).bad_sequences:
            by_length.setdefault(words.prefixes.shape[1], []).append((index, words))
    for length, members in by_length.items():
        _ban_length(logits, length, members, requests)


def _ban_length(
    logits: Tensor, length: int, members: list[tuple[int, BadSequences]], requests: SampleRequests
) -> None:
    """The same for words of `length` tokens and one more, by the index of their row."""
    device, vocab_size = logits.device, logits.shape[1]
    each = np.repeat([index for index, _ in members], [len(words.last_ids) for _, words in members])
    last_places = np.concatenate([words.last_ids for _, words in members]) + each * vocab_size
    whole = np.stack([last_places, requests.rows[each], requests.positions[each]])
    target, row, position = on_device(whole, device).unbind(0)  # each [W]
    places = (position[:, None] - length + torch.arange(length, device=device)).clamp_(min=0)
    wanted = on_device(np.concatenate([words.prefixes for _, words in members]), device)  # [W, length]
    hits = (requests.token_ids[row[:, None], places] == wanted).all(dim=1) & (position >= length)
    added = torch.zeros_like(hits, dtype=logits.dtype).masked_fill_(hits, -torch.inf)
    logits.view(-1).index_add_(0, target, added)


def _edits(requests: SampleRequests, index: int) -> RowEdits:
    edits = requests.columns.edits[requests.rows[index]]
    assert edits is not None, "a row's flags promise its edits"
    return edits
