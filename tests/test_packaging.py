"""What the installed package contains and links."""

from __future__ import annotations

import re
import shutil
import subprocess
from importlib import metadata, resources

import pytest
from hydra import compose, initialize_config_module
from packaging.requirements import Requirement
from packaging.version import Version

import lightning_zero
from lightning_zero.ops import _C


@pytest.mark.skipif(shutil.which("ldd") is None, reason="needs ldd")
def test_the_extension_links_neither_torch_nor_cuda() -> None:
    listing = subprocess.run(["ldd", str(_C.__file__)], capture_output=True, text=True, check=True, timeout=240).stdout
    for library in ("torch", "c10", "cuda", "cudart", "python"):
        assert f"lib{library}" not in listing
    assert "not found" not in listing


def test_type_information_is_installed() -> None:
    package = resources.files(lightning_zero)
    assert package.joinpath("py.typed").is_file()
    assert package.joinpath("ops", "_C.pyi").is_file()


def test_the_stub_names_what_the_extension_has() -> None:
    stub = resources.files(lightning_zero).joinpath("ops", "_C.pyi").read_text()
    for name in vars(_C):
        if not name.startswith("_"):
            assert re.search(rf"^(def|class) {name}\b", stub, re.MULTILINE)
    assert [member.name for member in _C.DType] == ["float32", "bfloat16", "float16", "int8"]


def test_configuration_files_are_installed_and_compose() -> None:
    with initialize_config_module("lightning_zero.conf", version_base="1.3"):
        config = compose(overrides=["+trainer=cpu"])
    assert config.trainer.accelerator == "cpu"


def test_metadata_names_versions_and_licence() -> None:
    info = metadata.metadata("lightning-zero")
    assert info["License-Expression"] == "Apache-2.0"
    requirements = {
        requirement.name: requirement
        for requirement in map(Requirement, metadata.requires("lightning-zero") or [])
        if requirement.marker is None
    }
    for release in ("2.6.2", "2.6.3"):  # compromised
        assert Version(release) not in requirements["lightning"].specifier
    assert Version("1.4.0") not in requirements["hydra-core"].specifier
