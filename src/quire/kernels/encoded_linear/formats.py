"""Packed layouts of the CUDA products: which scheme is which integer format, and packing in plain torch."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from quire.kernels.encoded_linear.books import CODES
from quire.kernels.encoded_linear.codes import codes_of

ROWS = 128  # of a block: eight tiles of 16 rows
TILE = 16
CHUNK = 64  # columns of a tile
LANES = 32
PIECE = 4096  # rows that are packed at a time
INTEGER, BYTES, BOOK, FLOAT8, FLOAT8_ROWS = 4, 8, 40, 80, 81  # `code`: also 5 and 6 bits
ROWS_OF_FLOAT8 = "fp8-rows"  # what FLOAT8_ROWS is called: a weight that is not packed


Layout = dict[str, tuple[tuple[int, ...], tuple[torch.dtype, ...]]]  # shapes and possible types


@dataclass(frozen=True)
class Format:
    """As decode.cuh defines it."""

    code: int
    group: int  # columns of a group; 0: one scale per row
    zero: int = 0
    mins: bool = False
    superblocks: bool = False
    codes: tuple[float, ...] = ()
    scales: tuple[torch.dtype, ...] = (torch.float16,)

    @property
    def groups(self) -> int:
        """Of a tile."""
        return 0 if not self.group else max(1, CHUNK // self.group)

    @property
    def words(self) -> int:
        """32-bit words per lane and tile."""
        return {BOOK: 4, FLOAT8: 8, FLOAT8_ROWS: 8}.get(self.code, self.code)

    def raw_words(self, scales: torch.dtype) -> int:
        """32-bit words of scales and minimums per lane and tile."""
        if self.superblocks:
            return 3 + self.mins
        per_group = 2 if scales is torch.float32 else 1
        return self.groups * per_group * (1 + self.mins)

    @property
    def column_multiple(self) -> int:
        if self.code == FLOAT8_ROWS:
            return 2 * CHUNK
        return 256 if self.superblocks else max(CHUNK, self.group)

    @property
    def by_16(self) -> bool:
        """Whether the columns of a step follow one another (decode.cuh)."""
        return self.groups == 4


@cache
def parse(scheme: str) -> Format | None:
    """The format of a scheme by its name; None: there is no product for it."""
    name = re.fullmatch(r"int4-g(\d+)(z?)p?", scheme)
    if name and _divides(int(name[1])):
        kinds = (torch.float16, torch.bfloat16, torch.float32)
        zeros = bool(name[2])
        return Format(INTEGER, int(name[1]), zero=0 if zeros else 8, mins=zeros, scales=kinds)
    name = re.fullmatch(r"(nf4|fp4|fp4bnb)-b(\d+)(n?)", scheme)
    if name and _divides(int(name[2])):
        kind = torch.float16 if name[3] else torch.float32
        return Format(BOOK, int(name[2]), codes=CODES[name[1]], scales=(kind,))
    name = re.fullmatch(r"(int8|fp8)-(?:channel|\d+x(\d+))", scheme)
    if name and _divides(int(name[2] or 0)):
        code = BYTES if name[1] == "int8" else FLOAT8
        return Format(code, int(name[2] or 0), scales=(torch.float32,))
    if scheme == ROWS_OF_FLOAT8:
        return Format(FLOAT8_ROWS, 0, scales=(torch.float32,))
    return GGUF.get(scheme)


def _divides(group: int) -> bool:
    return group in (0, 16, 32, 64, 128, 256, 512)


GGUF = {
    "gguf-q4_0": Format(INTEGER, 32, zero=8),
    "gguf-q4_1": Format(INTEGER, 32, mins=True),
    "gguf-q8_0": Format(BYTES, 32),
    "gguf-q4_k": Format(INTEGER, 32, mins=True, superblocks=True, scales=(torch.uint8,)),
    "gguf-q5_k": Format(5, 32, mins=True, superblocks=True, scales=(torch.uint8,)),
    "gguf-q6_k": Format(6, 16, zero=32, superblocks=True, scales=(torch.uint8,)),
}


def layout(scheme: str, num_rows: int, num_columns: int) -> Layout:
    """Packed tensors: shapes and possible types."""
    kind = parse(scheme)
    assert kind is not None
    blocks, chunks = -(-num_rows // ROWS), num_chunks(num_columns)
    high = kind.code - 4 if kind.code in (5, 6) else 0
    parts: Layout = {"packed": ((blocks, chunks, 8, LANES * (kind.words - high) * 4), (torch.uint8,))}
    if high:
        parts["high"] = ((blocks, chunks, 8, LANES * high * 4), (torch.uint8,))
    if kind.superblocks:
        parts["scales"] = ((blocks, chunks, ROWS, 4), kind.scales)
        parts["mins"] = ((blocks, chunks // 4, ROWS, 1 + kind.mins), (torch.float16,))
        return parts
    parts["scales"] = ((blocks, chunks * CHUNK // kind.group if kind.group else 1, ROWS), kind.scales)
    if kind.mins:
        parts["mins"] = parts["scales"]
    return parts


def num_chunks(num_columns: int) -> int:
    """Of a packed row: kernels take two at a time, and an odd last one is followed by one of zeros."""
    return -(-num_columns // (2 * CHUNK)) * 2


def pack(scheme: str, parts: Mapping[str, Tensor], shape: tuple[int, int]) -> dict[str, Tensor]:
    """Stored tensors -> packed ones."""
    kind = parse(scheme)
    assert kind is not None
    pieces = []
    codes = codes_of(scheme, parts)
    for first in range(0, shape[0], PIECE):
        last = min(first + PIECE, shape[0])
        q, scales, mins = codes(first, last)
        if shape[1] % (2 * CHUNK):
            q = torch.nn.functional.pad(q.view(torch.uint8), (0, CHUNK))
            if kind.group:
                extra = CHUNK // kind.group
                scales = _longer(scales, extra)
                mins = None if mins is None else _longer(mins, extra)
        codes_packed = _pack_codes(kind, _padded(q))
        piece = {name: _by_blocks(part) for name, part in codes_packed.items()}
        piece["scales"] = _pack_scales(kind, _padded(scales))
        if mins is not None:
            piece["mins"] = (
                _by_tiles(_padded(mins)) if kind.superblocks else _pack_scales(kind, _padded(mins))
            )
        pieces.append(piece)
    return {name: torch.cat([piece[name] for piece in pieces]) for name in pieces[0]}


def _by_blocks(tiles: Tensor) -> Tensor:
    """[tiles, chunks, bytes] -> [blocks, chunks, 8, bytes]."""
    return tiles.view(-1, 8, *tiles.shape[1:]).transpose(1, 2).contiguous()


def _longer(rows: Tensor, extra: int) -> Tensor:
    """With `extra` groups of scale zero."""
    return torch.cat((rows, rows.new_zeros(rows.shape[0], extra)), dim=1)


def _padded(rows: Tensor) -> Tensor:
    """Whole blocks of rows."""
    missing = -rows.shape[0] % ROWS
    return rows if not missing else torch.cat((rows, rows.new_zeros(missing, *rows.shape[1:])))


def _split(kind: Format, q: Tensor) -> Tensor:
    """[n, K] -> [tiles, chunks, lane's row, t, step, h, r, e], as decode.cuh names columns and rows."""
    tiles, chunks = q.shape[0] // TILE, q.shape[1] // CHUNK
    if kind.by_16:  # column = 16 * step + 4 * t + 2 * h + e
        return q.view(tiles, 2, 8, chunks, 4, 4, 2, 2).permute(0, 3, 2, 5, 4, 6, 1, 7)
    # column = 32 * (step / 2) + 8 * t + 4 * (step % 2) + 2 * h + e
    split = q.view(tiles, 2, 8, chunks, 2, 4, 2, 2, 2).permute(0, 3, 2, 5, 4, 6, 7, 1, 8)
    return split.reshape(tiles, chunks, 8, 4, 4, 2, 2, 2)


def _pack_codes(kind: Format, q: Tensor) -> dict[str, Tensor]:
    split = _split(kind, q.view(torch.uint8))
    tiles, chunks = split.shape[:2]
    if kind.code in (BYTES, FLOAT8):  # two words per step; lanes read two steps at a time
        halves = split.reshape(tiles, chunks, LANES, 2, 16).transpose(2, 3)
        return {"packed": halves.reshape(tiles, chunks, -1)}
    low = split & 15
    if kind.code == BOOK:  # a byte is the pair of one register, r + 2 * h
        pairs = low[..., 0] | (low[..., 1] << 4)
        return {"packed": pairs.reshape(tiles, chunks, -1)}
    # nibble of register r + 2 * h and element e at bit 4 * (r + 2 * h) + 16 * e: byte h + 2 * e
    nibbles = (low[..., 0, :] | (low[..., 1, :] << 4)).transpose(-1, -2)
    packed = {"packed": nibbles.reshape(tiles, chunks, -1)}
    high = split >> 4
    if kind.code == 6:  # at bit 8 * (step % 2) + 2 * (r + 2 * h) + 16 * e of word step / 2
        byte = (
            high[..., 0, 0, :] | high[..., 0, 1, :] << 2 | high[..., 1, 0, :] << 4 | high[..., 1, 1, :] << 6
        )
        packed["high"] = _bytes(byte, tiles, chunks)
    if kind.code == 5:  # at bit 4 * step + r + 2 * h + 16 * e
        four = (
            high[..., 0, 0, :] | high[..., 0, 1, :] << 1 | high[..., 1, 0, :] << 2 | high[..., 1, 1, :] << 3
        )
        pairs = four.reshape(tiles, chunks, LANES, 2, 2, 2)
        byte = pairs[..., 0, :] | pairs[..., 1, :] << 4  # [.., step / 2, e]
        packed["high"] = byte.transpose(-1, -2).reshape(tiles, chunks, -1)
    return packed


def _bytes(byte: Tensor, tiles: int, chunks: int) -> Tensor:
    """[.., step, e] -> word step / 2, byte step % 2 + 2 * e."""
    pairs = byte.reshape(tiles, chunks, LANES, 2, 2, 2)  # step / 2, step % 2, e
    return pairs.transpose(-1, -2).reshape(tiles, chunks, -1)


def _pack_scales(kind: Format, scales: Tensor) -> Tensor:
    if kind.superblocks:  # bytes [n, chunks, 4]
        return _by_tiles(scales)
    kept = scales if scales.dtype in kind.scales else scales.to(kind.scales[0])
    return _by_tiles(kept)


def _by_tiles(rows: Tensor) -> Tensor:
    """[n, groups, ...] -> [blocks, groups, 128, ...]; rows of a tile as 0, 8, 1, 9, ..., 15, since a lane reads two."""
    tiles = rows.view(-1, 8, 2, 8, *rows.shape[1:])  # block, tile, r, row, groups
    return tiles.movedim(4, 1).transpose(3, 4).reshape(-1, rows.shape[1], ROWS, *rows.shape[2:])


def decode(scheme: str, packed: Mapping[str, Tensor], shape: tuple[int, int]) -> Tensor:
    """Packed tensors -> float32 [num_rows, num_columns]: the reference of the kernels."""
    kind = parse(scheme)
    assert kind is not None
    num_rows, num_columns = shape
    padded = num_chunks(num_columns) * CHUNK
    values = _codes_again(kind, packed).float()
    if kind.codes:
        table = torch.tensor(kind.codes, device=values.device)
        values = table[values.long()]
    elif kind.code < BYTES:
        values -= kind.zero
    scales, mins = _whole_scales(kind, packed)
    groups = values.view(values.shape[0], scales.shape[1], -1) * scales[:, :, None]
    if mins is not None:
        groups = groups - mins[:, :, None]
    return groups.reshape(-1, padded)[:num_rows, :num_columns]


def _whole_scales(kind: Format, packed: Mapping[str, Tensor]) -> tuple[Tensor, Tensor | None]:
    """float32 [rows, groups] each."""
    scales, mins = packed["scales"], packed.get("mins")
    if not kind.superblocks:
        return _rows_again(scales.float()), None if mins is None else _rows_again(mins.float())
    assert mins is not None
    halves = _rows_again(mins.float()).repeat_interleave(4, 1)  # [rows, chunks, 1 or 2]
    rows = _rows_again(scales)
    if not kind.mins:
        return (rows.view(torch.int8).float() * halves).flatten(1), None
    steps = rows.float()
    return (steps[..., :2] * halves[..., :1]).flatten(1), (steps[..., 2:] * halves[..., 1:]).flatten(1)


def _rows_again(tiles: Tensor) -> Tensor:
    pairs = tiles.view(*tiles.shape[:2], 8, 8, 2, *tiles.shape[3:])  # block, groups, tile, row, r
    return pairs.transpose(3, 4).movedim(1, 4).reshape(-1, tiles.shape[1], *tiles.shape[3:])


def _codes_again(kind: Format, packed: Mapping[str, Tensor]) -> Tensor:
    """The inverse of `_pack_codes`: [rows, columns]."""
    main = packed["packed"].transpose(1, 2).flatten(0, 1)
    tiles, chunks = main.shape[:2]
    if kind.code in (BYTES, FLOAT8):
        split = (
            main.reshape(tiles, chunks, 2, LANES, 16).transpose(2, 3).reshape(tiles, chunks, 8, 4, 4, 2, 2, 2)
        )
    elif kind.code == BOOK:
        bytes_ = main.reshape(tiles, chunks, 8, 4, 4, 2, 2)
        split = torch.stack((bytes_ & 15, bytes_ >> 4), dim=-1)
    else:
        bytes_ = main.reshape(tiles, chunks, 8, 4, 4, 2, 2).transpose(-1, -2)  # step, h, e
        split = torch.stack((bytes_ & 15, bytes_ >> 4), dim=-2)
        if "high" in packed:
            split = split | (_high_again(kind, packed["high"].transpose(1, 2).flatten(0, 1)) << 4)
    if kind.by_16:
        q = split.permute(0, 6, 2, 1, 4, 3, 5, 7)
    else:
        wide = split.reshape(tiles, chunks, 8, 4, 2, 2, 2, 2, 2)
        q = wide.permute(0, 7, 2, 1, 4, 3, 5, 6, 8)
    q = q.reshape(tiles * TILE, chunks * CHUNK)
    if kind.code == BYTES:
        return q.view(torch.int8)
    return q.view(torch.float8_e4m3fn) if kind.code == FLOAT8 else q


def _high_again(kind: Format, high: Tensor) -> Tensor:
    """[tiles, chunks, row, t, step, h, r, e]."""
    tiles, chunks = high.shape[:2]
    if kind.code == 6:
        byte = high.reshape(tiles, chunks, 8, 4, 2, 2, 2).transpose(-1, -2).reshape(tiles, chunks, 8, 4, 4, 2)
        values = torch.stack([(byte >> shift) & 3 for shift in (0, 2, 4, 6)], dim=-2)
    else:
        byte = high.reshape(tiles, chunks, 8, 4, 2, 2).transpose(-1, -2)  # step / 2, e
        four = torch.stack((byte & 15, byte >> 4), dim=-2).reshape(tiles, chunks, 8, 4, 4, 2)
        values = torch.stack([(four >> shift) & 1 for shift in range(4)], dim=-2)
    return values.view(tiles, chunks, 8, 4, 4, 2, 2, 2)  # the register is r + 2 * h
