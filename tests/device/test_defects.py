"""Each property of the simulated device, broken on purpose, fails a test of its own."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from device import sim, test_clock, test_collectives, test_memory, test_schedules
from device.where import DevicePool

pytestmark = pytest.mark.simulated

missing_wait, mistake = (
    test_schedules.test_a_missing_wait_is_found,
    test_schedules.test_a_mistake_is_found_in_every_schedule,
)
# By property, the tests that fail without it. (That the host cannot touch the device's memory has both sides in
# `test_the_host_cannot_touch_the_devices_memory`.)
FAILS: dict[str, list[Callable[[torch.device], object]]] = {
    "no_poison": [
        partial(mistake, program=test_schedules.fills_what_it_allocates),
        partial(missing_wait, program=test_schedules.reads_what_has_arrived),
    ],
    "no_events": [
        partial(missing_wait, program=test_schedules.reads_another_stream),
        partial(missing_wait, program=test_schedules.reuses_a_staging_buffer),
    ],
    "no_copy_waits": [test_schedules.test_a_blocking_copy_is_its_own_wait],
    "no_record_stream": [partial(missing_wait, program=test_schedules.frees_what_another_stream_reads)],
    "no_pinned_care": [test_memory.test_freed_pinned_memory_is_kept_until_copies_have_read_it],
    "no_unpin_check": [partial(missing_wait, program=test_schedules.unpins_after_the_copy)],
    "no_limit": [test_memory.test_a_small_device_runs_out_of_memory],
    "no_pageable_count": [
        partial(mistake, program=test_schedules.pins_what_it_copies_asynchronously),
        test_memory.test_waits_and_pageable_bytes_are_counted_by_call_site,
    ],
    "no_wait_count": [test_memory.test_waits_and_pageable_bytes_are_counted_by_call_site],
    "no_time": [test_clock.test_virtual_time_knows_overlap_and_no_schedule],
}
OF_COLLECTIVES = ("no_caller_waits", "no_work_waits")


@pytest.mark.device
@pytest.mark.parametrize(
    ("defect", "number"), [(defect, n) for defect, tests in FAILS.items() for n in range(len(tests))]
)
def test_a_broken_device_fails_a_test_of_its_own(device: torch.device, defect: str, number: int) -> None:
    setattr(sim.install().defects(), defect, True)
    with pytest.raises((AssertionError, RuntimeError, pytest.fail.Exception)):
        FAILS[defect][number](device)


def broken(defect: str, program: Callable[[], Any]) -> Any:
    setattr(sim.install().defects(), defect, True)
    return program()


@pytest.mark.device
def test_broken_collectives_fail_a_test_of_their_own(device_pool2: DevicePool) -> None:
    assert device_pool2.run(broken, "no_caller_waits", test_collectives.follows_its_caller) == [False, False]
    with pytest.raises(AssertionError):
        test_collectives.assert_right(*device_pool2.run(broken, "no_work_waits", test_collectives.every_collective))


@pytest.mark.device
def test_every_property_that_can_be_broken_is_listed(device: torch.device) -> None:
    assert sorted([*FAILS, *OF_COLLECTIVES]) == sorted(sim.defects())
