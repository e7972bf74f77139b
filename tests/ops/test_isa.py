"""The choice of the instruction set, and the extension on its own, without torch."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import pytest
from ops.problems import fresh

from lightning_zero import ops
from lightning_zero.ops import _C

# Loads the extension by path, updates seventeen numbers, prints the bits.
STANDALONE = """
import importlib.util, sys
from array import array
spec = importlib.util.spec_from_file_location("_C", sys.argv[1])
_C = importlib.util.module_from_spec(spec)
spec.loader.exec_module(_C)
isa = _C.resolve_isa(sys.argv[2])
memory = [array("f", [0.1 * (i + k) for i in range(17)]) for k in range(4)]
param, exp_avg, exp_avg_sq, grad = (a.buffer_info()[0] for a in memory)
arrays = _C.UpdateArrays(
    count=17, param=param, param_dtype=_C.DType.float32, remainder=0, copy_out=0, copy_dtype=_C.DType.bfloat16,
    copy_ties=_C.Ties.even, grad=grad, grad_dtype=_C.DType.float32, states=[exp_avg, exp_avg_sq],
    state_dtype=_C.DType.float32,
    scales=[],
)
_C.adam(
    isa=isa, arrays=arrays, key=_C.RoundingKey(seed=0, step=3, index=0), threads=1, lr=1e-3, beta1=0.9, beta2=0.999,
    eps=1e-8, weight_decay=0.1, step=3, grad_scale=0.3, decoupled=True, amsgrad=False,
)
assert "torch" not in sys.modules
print(isa, b"".join(a.tobytes() for a in memory).hex())
"""


def standalone(isa: str, *launcher: str) -> subprocess.CompletedProcess[str]:
    command = [*launcher, sys.executable, "-I", "-c", STANDALONE, str(_C.__file__), isa]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=240)


@pytest.mark.parametrize("isa", ops.supported_isas())
def test_the_environment_chooses(isa: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LIGHTNING_ZERO_ISA", isa)
    assert fresh("isa").isa() == isa


def test_empty_means_unset_and_the_fastest_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LIGHTNING_ZERO_ISA", "")
    assert fresh("isa").isa() == ops.supported_isas()[-1]
    monkeypatch.delenv("LIGHTNING_ZERO_ISA")
    assert fresh("isa").isa() == ops.supported_isas()[-1]


@pytest.mark.parametrize("value", ["sse9", "AVX2", " scalar"])
def test_an_unknown_name_is_refused_when_ops_is_imported(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LIGHTNING_ZERO_ISA", value)
    with pytest.raises(ValueError, match=f"instruction set '{value}' is not available.*scalar.*unset it"):
        fresh("isa")


@pytest.mark.slow
def test_an_unknown_name_is_refused_when_the_package_is_imported() -> None:
    result = subprocess.run(
        [sys.executable, "-P", "-c", "import lightning_zero.ops"],  # -P: not from the current folder
        env={**os.environ, "LIGHTNING_ZERO_ISA": "sse9"},
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    assert result.returncode == 1
    assert "ValueError: instruction set 'sse9' is not available" in result.stderr


def test_supported_sets_are_compiled_ones_and_scalar_is_always_there() -> None:
    compiled, supported = ops.compiled_isas(), ops.supported_isas()
    assert compiled[0] == supported[0] == "scalar"
    assert [isa for isa in compiled if isa in supported] == list(supported)


def test_the_extension_works_without_torch() -> None:
    results = {isa: standalone(isa) for isa in ops.supported_isas()}
    for isa, result in results.items():
        assert result.returncode == 0, result.stderr
        assert result.stdout.split()[0] == isa
    assert len({result.stdout.split()[1] for result in results.values()}) == 1


@pytest.mark.skipif(shutil.which("qemu-x86_64") is None, reason="needs qemu-x86_64")
@pytest.mark.skipif("avx2" not in ops.compiled_isas(), reason="needs an x86-64 build")
@pytest.mark.parametrize(("cpu", "isa"), [("qemu64", "scalar"), ("Haswell", "avx2")])
def test_an_older_cpu_runs_its_own_kernel_with_the_same_bits(cpu: str, isa: str) -> None:
    result = standalone("", "qemu-x86_64", "-cpu", cpu)
    assert result.returncode == 0, result.stderr
    assert result.stdout == f"{isa} {standalone('scalar').stdout.split()[1]}\n"
    refused = standalone("avx512", "qemu-x86_64", "-cpu", cpu)
    assert "ValueError: instruction set 'avx512' is not available" in refused.stderr
