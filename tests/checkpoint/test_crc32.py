"""Checksums of parts make up that of the whole."""

from __future__ import annotations

import zlib

from hypothesis import given
from hypothesis import strategies as st

from lightning_zero.checkpoint.crc32 import combine


@given(st.binary(max_size=300), st.binary(max_size=300))
def test_two_parts(first: bytes, second: bytes) -> None:
    assert combine(zlib.crc32(first), zlib.crc32(second), len(second)) == zlib.crc32(first + second)


def test_long_parts() -> None:
    first, second = bytes(range(256)) * 4099, bytes(1 << 24)
    assert combine(zlib.crc32(first), zlib.crc32(second), len(second)) == zlib.crc32(first + second)
