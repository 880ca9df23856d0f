"""Whether tensors still hold what they held, whatever wrote to them in between. Imports torch.

Version counters do not tell: writes through ``weight.data``, numpy, a buffer that was given as ``weight.data``, and in
inference mode leave them as they are. So the bytes themselves are looked at:

- all of them, of tensors up to :data:`WHOLE`, against a copy. This is exact;
- of larger ones each call looks at up to 4200 words of 8 bytes, evenly spread (see :func:`sample_stride`), and compares a
  checksum; the next call looks at others. Contents that are others throughout are noticed at once, and so is a write
  of a stretch as long as the distance between two of these words: 1 KB up to 4 MB, then a 2000th of the tensor at
  most. A smaller one, that counts no version either, is noticed when its place comes: half a distance within three
  calls, one byte after as many calls at most as there are words in a distance (127 up to 4 MB, 1021 of 22 MB).

Cost (AVX512, one thread, between products, which leave nothing in the caches): 3 us for 128 KB, 15 us for
2 MB, 50 us for 8 MB, 75 us for 22 MB; products with one row take 240, 940 and 2500. A whole comparison of 2 MB takes
150 us, of 22 MB 16 ms, and would need a copy. Where other processes use the same caches,
two to three times these. Neither torch nor its modes and tracers see any of it.
"""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Iterable
from typing import Any

import numpy
import torch

WHOLE = 128 * 1024
"""Bytes up to which a tensor is compared as a whole."""

_WORD = 8
_MOST_WORDS = 4200
_STRIDES = (127, 251, 509, 1021, 2039, 4093)  # prime, so that no column of a matrix is met more often than others
_GOLDEN = 0.618
_IDENTITY = "_patches_identity"

# Called with the interpreter lock held: giving it up takes longer than a comparison.
_memcmp = ctypes.PyDLL("msvcrt" if os.name == "nt" else None).memcmp


class Contents:
    """The contents of some tensors at the time when this was made."""

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        """Take the contents of ``tensors``, contiguous and on the CPU, and keep no reference to them."""
        self._parts = [_Whole(t) if t.nbytes <= WHOLE or t.nbytes % _WORD else _Sampled(t) for t in tensors]

    def are_those_of(self, tensors: Iterable[torch.Tensor]) -> bool:
        """Tell whether ``tensors``, as many as there were, lie where they lay and hold what they held."""
        for part, tensor in zip(self._parts, tensors):
            if not part.is_in(tensor):
                return False
        return True


class _Whole:
    """The bytes of a small tensor."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._address, self._nbytes = tensor.data_ptr(), tensor.nbytes
        self._copy = ctypes.create_string_buffer(ctypes.string_at(self._address, self._nbytes), self._nbytes)
        self._arguments = ctypes.c_void_p(self._address), self._copy, ctypes.c_size_t(self._nbytes)

    def is_in(self, tensor: torch.Tensor) -> bool:
        # That a tensor lies there says that the bytes may be read.
        return tensor.data_ptr() == self._address and tensor.nbytes == self._nbytes and _memcmp(*self._arguments) == 0


class _Sampled:
    """A checksum for each of the samples that make up a large tensor, and which is next."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._address, self._nbytes, self._version = tensor.data_ptr(), tensor.nbytes, _version(tensor)
        # Tells this storage from another that was given the same address after it.
        self._identity = vars(tensor.untyped_storage()).setdefault(_IDENTITY, object())
        memory: Any = (ctypes.c_ubyte * self._nbytes).from_address(self._address)
        self._words = numpy.frombuffer(memory, dtype=numpy.int64)
        self._stride = sample_stride(self._nbytes)
        self._step = int(self._stride * _GOLDEN)  # the next words lie in the widest gap that former calls left
        self._factors = _odd_numbers(-(-len(self._words) // self._stride))
        self._checksums = [self._checksum(i) for i in range(self._stride)]
        self._next = 0

    def is_in(self, tensor: torch.Tensor) -> bool:
        if (
            tensor.data_ptr() != self._address
            or tensor.nbytes != self._nbytes
            or _version(tensor) != self._version
            or vars(tensor.untyped_storage()).get(_IDENTITY) is not self._identity
        ):
            return False
        i = self._next
        self._next = (i + self._step) % self._stride
        return self._checksum(i) == self._checksums[i]

    def _checksum(self, i: int) -> int:
        """Return the sum of the words of sample ``i``, each times an odd number of its own, modulo 2**64.

        A change of one word changes it for sure, one of several in all but very few cases.
        """
        sample = self._words[i :: self._stride]
        return int(sample.dot(self._factors[: len(sample)]))


def sample_stride(nbytes: int) -> int:
    """Return the distance of the words that one call looks at, in words."""
    words = nbytes // _WORD
    return next((stride for stride in _STRIDES if words <= stride * _MOST_WORDS), _STRIDES[-1])


def _version(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version  # inference tensors count none


@functools.cache
def _odd_numbers(count: int) -> numpy.ndarray:
    return numpy.random.default_rng(count).integers(-(2**62), 2**62, count, dtype=numpy.int64) * 2 + 1
