"""The digest by which an unmerge tells whether a base is what the merge left behind."""

from __future__ import annotations

import pytest
import torch

from patches.process.tensor_bits import _ROW, _SLAB, _known, fingerprint

WORD = 4
SIZES = (0, 1, 3, 4, 5, 8, 9, WORD * _ROW - 1, WORD * _ROW, WORD * _ROW + 1, WORD * _ROW * _SLAB + 6)


def some(size: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator)


@pytest.mark.parametrize("size", SIZES)
def test_other_bits_give_another_number(size):
    bits = some(size)
    before = fingerprint(bits)
    assert before == fingerprint(bits.clone())
    seen = {before}
    places = sorted({place for place in (0, 1, size // 2, size - 2, size - 1) if 0 <= place < size})
    for place in places:
        for bit in range(8):
            changed = bits.clone()
            changed[place] ^= 1 << bit
            seen.add(fingerprint(changed))
    assert len(seen) == 1 + 8 * len(places)


def test_changes_in_the_highest_bits_do_not_cancel():
    """A sum of words by odd factors alone would lose two of these in each other."""
    bits = some(4096)
    seen = {fingerprint(bits)}
    for place in range(0, 4096, 8):
        changed = bits.clone()
        changed[place + 3] ^= 0x80
        changed[place + 7] ^= 0x80
        seen.add(fingerprint(changed))
    assert len(seen) == 1 + 4096 // 8


def test_the_place_counts():
    bits = some(WORD * _ROW * 3)
    rows = bits.view(3, -1)
    assert (
        len({fingerprint(bits), fingerprint(rows.flip(0)), fingerprint(bits.roll(WORD)), fingerprint(bits.roll(1))})
        == 4
    )


def test_the_number_of_zeros_counts():
    assert (
        len({fingerprint(torch.zeros(size, dtype=torch.uint8)) for size in (0, 4, 8, 12, WORD * _ROW, 8 * _ROW)}) == 6
    )


@pytest.mark.parametrize("offset", [0, 1, 2, 3, 5])
def test_where_it_lies_in_memory_does_not_count(offset):
    bits = some(1003)
    padded = torch.cat([torch.zeros(offset, dtype=torch.uint8), bits])
    assert fingerprint(padded[offset:]) == fingerprint(bits)
    assert fingerprint(bits.view(17, 59).t().contiguous().t()) == fingerprint(bits)


@pytest.mark.parametrize("dtype", [torch.int8, torch.bfloat16, torch.float32, torch.float64])
def test_every_dtype_of_a_base(dtype):
    values = torch.linspace(-100, 100, 1001).to(dtype)
    assert fingerprint(values) == fingerprint(values.clone()) != fingerprint(values.flip(0))


def test_what_a_mode_makes_is_not_kept():
    from torch._subclasses.fake_tensor import FakeTensorMode

    expected = fingerprint(some(100))
    _known.clear()
    with torch.inference_mode():
        assert fingerprint(some(100)) == expected and not _known
    with FakeTensorMode(), pytest.raises(Exception, match="_local_scalar_dense"):
        fingerprint(torch.zeros(100, dtype=torch.uint8))
    assert not _known
    assert fingerprint(some(100)) == expected and list(_known) == [torch.device("cpu")]
