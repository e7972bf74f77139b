"""The checksum that tells whether user code changed a slice behind torch's back."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_zero.sharding.checksum import checksum

DTYPES = st.sampled_from([torch.float64, torch.float32, torch.bfloat16, torch.float16])


@given(dtype=DTYPES, start=st.integers(0, 9), count=st.integers(0, 40), data=st.data())
def test_a_changed_element_changes_it_wherever_the_slice_lies(
    dtype: torch.dtype, start: int, count: int, data: st.DataObject
) -> None:
    values = torch.arange(1, 61, dtype=torch.float64).to(dtype)
    part = values[start : start + count]
    before = checksum(part)
    assert before.dtype == torch.int64
    assert torch.equal(checksum(part.clone()), before) or values.itemsize < 8  # positions inside of eight bytes count
    values[start + count :] = 0  # outside
    values[:start] = 0
    assert torch.equal(checksum(part), before)
    if count:
        index = data.draw(st.integers(0, count - 1))
        part[index] = -part[index]
        assert not torch.equal(checksum(part), before)
