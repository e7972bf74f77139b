"""Tests of `tests/engine` and `tests/strategy` that do not run on the simulated device, and why."""

from __future__ import annotations

MIXED_UP = "gloo, which moves the data there, ends a process that gets another size than it has asked for"
BESIDE = "an update beside the training fails where it is waited for, at every wait: test_update_under_forward.py"
APART = "memory of the host is apart from that of the device: what fits into the latter is in tests/device/test_auto.py"

# By the beginning of node ids.
REASONS: dict[str, str] = {
    "tests/engine/test_consistency.py::test_later_it_is_an_error_after_the_timeout": MIXED_UP,
    "tests/engine/test_consistency.py::test_a_backward_that_only_one_rank_makes[0-2": MIXED_UP,
    "tests/engine/test_disk.py::test_parameters_of_an_update_that_fails_are_of_before_or_after": BESIDE,
    "tests/engine/test_disk.py::test_gradients_of_a_bucket_of_two_optimizers_are_not_read_for_its_norms": (
        "a device sums their squares before they leave it, so that they are not read in the first step either"
    ),
    "tests/engine/test_gradients.py": "a device collects gradients in a tensor; the host reduces them as they lie",
    "tests/engine/test_loss_scale.py::test_optimizers_of_whole_parameters_skip_an_overflow_in_fp16": (
        "Muon's batches of matrices are rounded by their members there: test_two_places.py"
    ),
    "tests/engine/test_plan.py::test_a_device_that_is_not_there": "compares the plan of a CPU with that of a device",
    "tests/engine/test_update_in_backward.py::test_a_late_gradient_of_another_rank_is_an_error_on_all": (
        "the update of the first unit has not begun there when the error comes"
    ),
    "tests/engine/test_update_in_backward.py::test_an_update_that_fails_tears_the_weights": BESIDE,
    "tests/strategy/test_auto.py::test_it_is_what_it_chose": APART,
    "tests/strategy/test_auto.py::test_a_container_gets_what_fits_into_it": APART,
    "tests/strategy/test_auto.py::test_the_reasons_are_told_where_no_setting_can_run_or_none_that_can_fits": APART,
    "tests/strategy/test_auto.py::test_a_run_under_a_limit_of_the_kernel_takes_the_smaller_plan": APART,
    "tests/strategy/test_auto.py::test_layers_of_configure_model_go_where_the_choice_says": APART,
    "tests/strategy/test_compile.py::test_inductor": "inductor makes no code for the device",
    "tests/strategy/test_consistency.py::test_another_branch_on_one_rank_is_an_error_on_all[late": MIXED_UP,
    "tests/strategy/test_cpu_optimizers.py::test_without_offloading_the_cpu_is_the_device": "it is not the CPU",
    "tests/strategy/test_fabric.py::test_a_folder_of_fsdp_under_fabric_loads": (
        "torch writes it with the device's streams, which have no Python module there"
    ),
    "tests/strategy/test_master_layout.py::test_what_no_kernel_runs_is_refused[options2": (
        "what is not offloaded is not in host memory, and refused for that"
    ),
}


def reason(nodeid: str) -> str | None:
    """Why a test is skipped there; `None`: it runs."""
    found = [why for beginning, why in REASONS.items() if nodeid.startswith(beginning)]
    return found[0] if found else None
