"""Whether tensors hold what they held: what is noticed, how soon, and what is kept for it."""

from __future__ import annotations

import gc
import weakref

import pytest

torch = pytest.importorskip("torch")

from patches.operators import tensor_contents as module  # noqa: E402
from patches.operators.tensor_contents import Contents, sample_stride  # noqa: E402

SIZES = {"word": 8, "byte": 1, "whole": module.WHOLE, "sampled": module.WHOLE + 8, "large": 5 * 2**20 + 40}
SIZE = pytest.mark.parametrize("size", SIZES.values(), ids=SIZES)
SAMPLED = pytest.mark.parametrize("size", [SIZES["sampled"], SIZES["large"]], ids=["sampled", "large"])


def tensor(size: int, offset: int = 0) -> torch.Tensor:
    torch.manual_seed(0)
    return torch.randint(0, 256, (size + offset,), dtype=torch.uint8)[offset:]


def write(target: torch.Tensor, start: int, count: int) -> None:
    """Other bytes, and no version counted."""
    target.numpy()[start : start + count] ^= 255


@SIZE
@pytest.mark.parametrize("offset", [0, 1, 8], ids="offset-{}".format)
def test_what_is_as_it_was_stays_so(size, offset):
    held = tensor(size, offset)
    contents = Contents([held, held[:1]])
    assert all(contents.are_those_of([held, held[:1]]) for _ in range(600))


@SIZE
def test_other_contents_are_noticed_at_once(size):
    held = tensor(size)
    contents = Contents([held])
    held.data.copy_(held.flip(0) + 1)
    assert held._version == 0
    assert not contents.are_those_of([held])


@SIZE
def test_so_is_what_counts_a_version(size):
    held = tensor(size)
    contents = Contents([held])
    held[size // 2] += 1
    assert not contents.are_those_of([held])


@SAMPLED
def test_so_is_a_stretch_between_two_words_that_are_looked_at(size):
    held, length = tensor(size), 8 * sample_stride(size) + 7  # holds so many whole words, wherever it begins
    for start in (0, 1, 4096, 70_001, size - length):
        contents = Contents([held])
        write(held, start, length)
        assert not contents.are_those_of([held])


@SAMPLED
def test_half_of_that_is_noticed_within_three_calls(size):
    held, length = tensor(size), 8 * (sample_stride(size) // 2 + 1) + 7
    for start in (0, 1, 512, 1015, 4096, 70_001, size - length):
        contents = Contents([held])
        write(held, start, length)
        assert not all(contents.are_those_of([held]) for _ in range(3)), start


@pytest.mark.parametrize("megabytes", [1, 4, 22, 64, 128])
def test_a_call_looks_at_no_more_words_of_a_larger_tensor(megabytes):
    words = megabytes * 2**20 // 8
    assert words / sample_stride(8 * words) <= 4200


@SAMPLED
def test_one_byte_is_noticed_when_its_place_comes(size):
    held = tensor(size)
    for place in (0, 7, 8, 1015, 70_001, size // 2, size - 9, size - 1):
        contents = Contents([held])
        assert contents.are_those_of([held])
        write(held, place, 1)
        assert not all(contents.are_those_of([held]) for _ in range(sample_stride(size))), place


def test_every_byte_of_a_small_tensor_is_noticed_at_once():
    held = tensor(module.WHOLE)
    for place in (0, 1, 65_537, module.WHOLE - 1):
        contents = Contents([held])
        write(held, place, 1)
        assert not contents.are_those_of([held])


@SIZE
def test_another_place_or_length_is_another_tensor(size):
    held = tensor(size)
    contents = Contents([held])
    assert not contents.are_those_of([held.clone()])
    assert size == 1 or not contents.are_those_of([held[:-1]])


def test_memory_that_another_storage_was_given_is_another_tensor():
    memory = bytearray(module.WHOLE + 8)
    one, other = (torch.frombuffer(memory, dtype=torch.uint8) for _ in range(2))
    contents = Contents([one])
    assert contents.are_those_of([one]) and one.data_ptr() == other.data_ptr()
    assert not contents.are_those_of([other])


def test_tensors_made_in_inference_mode_count_no_versions():
    with torch.inference_mode():
        held = tensor(SIZES["sampled"])
        contents = Contents([held])
        assert contents.are_those_of([held])
        held.copy_(held.flip(0) + 1)
        assert not contents.are_those_of([held])


@SIZE
def test_nothing_of_the_tensors_is_kept(size):
    held = tensor(size)
    contents, storage = Contents([held]), weakref.ref(held.untyped_storage())
    assert contents.are_those_of([held])
    del held
    gc.collect()
    assert storage() is None


def test_random_numbers_of_the_process_stay_what_they_were():
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    Contents([tensor_without_seed(SIZES["large"])])
    assert torch.equal(torch.rand(3), expected)


def tensor_without_seed(size: int) -> torch.Tensor:
    return torch.zeros(size, dtype=torch.uint8)
