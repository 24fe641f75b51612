"""Adapters that a device packs: pieces hold every matrix once, numbers that are not finite are found before."""

import pytest
import torch

from quire.kernels.lora.records import A_CODE, A_OFFSET, B_OFFSET, CODES
from quire.kernels.lora_pack import reference
from quire.kernels.lora_pack.pieces import ALIGNMENT, COLUMNS, ROWS, cut, first_wrong
from quire.kernels.registry import alternatives
from tests.kernels.lora_cases import pack_case

needs_triton = pytest.mark.skipif("triton" not in alternatives("lora_pack"), reason="needs Triton")


@pytest.mark.parametrize("largest", [30_000, 50_000, 1 << 20])
def test_pieces_hold_every_number_once(largest: int) -> None:
    source, places, _ = pack_case(torch.float32, torch.float32)
    pieces = cut(places, largest)
    assert (len(pieces) > 1) == (largest < len(source))
    assert sum(int((p.tiles[:, ROWS] * p.tiles[:, COLUMNS]).sum()) for p in pieces) * 4 == len(source)
    for piece in pieces:
        assert piece.first % ALIGNMENT == 0
        assert piece.last - piece.first <= largest


def test_what_cannot_travel_is_packed_here() -> None:
    _, places, _ = pack_case(torch.float32, torch.float32)
    assert cut(places, 1000) == ()  # a matrix larger than a piece
    places.sites[1, A_OFFSET] += 2  # where no float32 can be loaded
    assert cut(places, 1 << 20) == ()


@needs_triton
def test_several_pieces_give_the_same_tiles() -> None:
    from quire.kernels.lora_pack.triton import place

    source, places, size = pack_case(torch.float16, torch.float32)
    expected, actual = torch.zeros(size, dtype=torch.uint8), torch.zeros(size, dtype=torch.uint8)
    reference.pack(source, places, expected, torch.float32)
    for piece in cut(places, 20_000):
        numbers = source[piece.first : piece.last].clone().view(piece.given)
        place(
            numbers,
            torch.from_numpy(piece.tiles),
            int(piece.tiles[:, COLUMNS].max()),
            actual.view(torch.float32),
        )
    assert torch.equal(actual, expected)


@pytest.mark.parametrize("number", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("given", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_numbers_that_are_not_finite_are_found(given: torch.dtype, number: float) -> None:
    source, places, _ = pack_case(given, torch.float16)
    assert first_wrong(source, places, torch.float16) == -1
    for site, column in ((0, A_OFFSET), (2, B_OFFSET), (4, B_OFFSET)):
        broken, first = source.clone(), int(places.sites[site, column])
        broken[first : first + given.itemsize] = torch.tensor([number]).to(given).view(torch.uint8)
        assert first_wrong(broken, places, torch.float16) == 2 * site + (column == B_OFFSET)


def test_numbers_too_large_for_the_model_are_found_and_other_tensors_do_not_matter() -> None:
    source, places, _ = pack_case(torch.float32, torch.float16)
    large = source.clone()
    large[int(places.sites[3, A_OFFSET]) :][:4] = torch.tensor([-1e6]).view(torch.uint8)
    assert first_wrong(large, places, torch.float32) == -1
    assert first_wrong(large, places, torch.float16) == 6
    beside = torch.cat((source, torch.tensor([float("nan")]).view(torch.uint8)))  # of the base, say
    assert first_wrong(beside, places, torch.float16) == -1
    places.sites[0, A_CODE] = CODES[torch.float16]  # mixed: half of its bytes are some other numbers
    assert first_wrong(torch.zeros_like(source), places, torch.float16) == -1
