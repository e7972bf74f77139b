"""The checksum of data from those of its parts, which several ranks compute (as zlib's ``crc32_combine``).

A CRC-32 is a remainder modulo a polynomial over GF(2): appending n bytes multiplies it by x^(8n). Numbers hold the
coefficients of polynomials, that of x^0 in the highest bit.
"""

from __future__ import annotations

from functools import cache

_POLYNOMIAL = 0xEDB88320
_ONE, _X = 1 << 31, 1 << 30


def combine(first: int, second: int, length: int) -> int:
    """The CRC-32 of two runs of bytes, one after the other, from theirs and the ``length`` of the second."""
    return _multiply(_power_of_x(8 * length), first) ^ second


def _multiply(a: int, b: int) -> int:
    product, bit = 0, _ONE
    while a:
        if a & bit:
            product ^= b
            a ^= bit
        bit >>= 1
        b = (b >> 1) ^ (_POLYNOMIAL if b & 1 else 0)
    return product


def _power_of_x(exponent: int) -> int:
    result, bit = _ONE, 0
    while exponent >> bit:
        if exponent >> bit & 1:
            result = _multiply(_square(bit), result)
        bit += 1
    return result


@cache
def _square(times: int) -> int:
    """x, squared so many times."""
    if times == 0:
        return _X
    root = _square(times - 1)
    return _multiply(root, root)
