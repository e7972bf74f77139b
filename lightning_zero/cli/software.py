"""Installed software: packages with the versions that this one needs, torch's build, GPUs and what reaches them.

`torch.utils.collect_env` is not used: it cannot be imported where torch is broken, which the doctor must be able to
say, and it answers with the text of `pip list`, `lscpu` and `nvidia-smi`, seconds later, in place of facts.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import platform
import re
import sys
import warnings
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

from lightning_zero.cgroups import read_text
from lightning_zero.numa import node_of, pci_address_of, write_cores

DISTRIBUTION = "lightning-zero"
COMPROMISED = {"lightning": ("2.6.2", "2.6.3")}
_SHOWN = ("torch", "lightning", "hydra-core", "omegaconf", "numpy")  # installed or not, in this order
_ELF_MACHINES = {0x3E: "x86_64", 0xB7: "aarch64"}
_ELF_SECTIONS = (slice(40, 48), slice(58, 60), slice(60, 62))  # of a 64-bit header
_CUT_SHORT = "a shared library that is cut short"


@dataclass(frozen=True, slots=True)
class Package:
    """An installed or missing distribution.

    Attributes:
        name: of the distribution; "python" is the interpreter.
        version: the installed one, None if there is none.
        required: the range that this package needs, "" if it states none.
        optional: whether it may be missing.
        accepted: whether it is as it must be: in the range, and not missing unless optional.
        compromised: whether this release was tampered with.
    """

    name: str
    version: str | None
    required: str
    optional: bool
    accepted: bool
    compromised: bool


@dataclass(frozen=True, slots=True)
class Torch:
    """The build of torch.

    Attributes:
        version: with the build's local part.
        commit: it was built from.
        cpu_capability: widest vectors that its own CPU kernels use.
        cuda: version of CUDA it was built for, None without.
        threads: that its CPU kernels use.
    """

    version: str
    commit: str | None
    cpu_capability: str
    cuda: str | None
    threads: int


@dataclass(frozen=True, slots=True)
class Device:
    """A GPU that this process sees.

    Attributes:
        name: the model.
        memory_bytes: all of it.
        capability: of its kernels.
        pci_address: where it is attached, if that is known.
        numa_node: the memory node there.
        numa_cores: that node's cores, as in "0-15,32-47", to which the kernels of a rank with this GPU keep where the
            process may run on others, too.
    """

    name: str
    memory_bytes: int
    capability: str
    pci_address: str | None = None
    numa_node: int | None = None
    numa_cores: str | None = None

    @property
    def near(self) -> str:
        """Cores that are near, for people."""
        return (
            "" if self.numa_node is None else f", NUMA node {self.numa_node}: kernels keep to cores {self.numa_cores}"
        )


@dataclass(frozen=True, slots=True)
class Accelerators:
    """GPUs and the ways between ranks.

    Attributes:
        available: whether torch can use CUDA.
        driver: version of the NVIDIA driver that is loaded.
        devices: the GPUs.
        nccl: version of NCCL in torch.
        gloo: whether torch has gloo.
        messages: warnings and errors of torch while it looked.
    """

    available: bool
    driver: str | None
    devices: tuple[Device, ...]
    nccl: str | None
    gloo: bool
    messages: tuple[str, ...]


def read_packages() -> list[Package]:
    """Lists Python, this package, its requirements and its optional peers, with what it says of their versions."""
    python = platform.python_version()
    try:
        info = metadata.metadata(DISTRIBUTION)
    except metadata.PackageNotFoundError:  # a source folder on the path, without an installation
        return [
            _package("python", SpecifierSet(), version=python),
            Package(DISTRIBUTION, None, "", optional=False, accepted=False, compromised=False),
            *(_package(name, SpecifierSet()) for name in _SHOWN),
        ]
    requirements = [Requirement(line) for line in metadata.requires(DISTRIBUTION) or []]
    needed = {item.name: item.specifier for item in requirements if _applies(item, "")}
    peers = {item.name: item.specifier for item in requirements if not _applies(item, "") and _applies(item, "peers")}
    return [
        _package("python", SpecifierSet(info["Requires-Python"] or ""), version=python),
        _package(DISTRIBUTION, SpecifierSet()),
        *(_package(name, needed.get(name, SpecifierSet())) for name in dict.fromkeys((*_SHOWN, *needed))),
        *(_package(name, specifier, optional=True) for name, specifier in peers.items()),
    ]


def _applies(requirement: Requirement, extra: str) -> bool:
    return requirement.marker is None or requirement.marker.evaluate({"extra": extra})


def _package(name: str, required: SpecifierSet, *, version: str | None = None, optional: bool = False) -> Package:
    if version is None:
        try:
            version = metadata.version(name)
        except metadata.PackageNotFoundError:
            return Package(name, None, str(required), optional, accepted=optional, compromised=False)
    try:
        accepted = required.contains(Version(version), prereleases=True)
    except InvalidVersion:
        accepted = False
    compromised = version in COMPROMISED.get(name, ())
    return Package(name, version, str(required), optional, accepted and not compromised, compromised)


def read_torch() -> Torch:
    """Reads the build of torch, which is imported.

    Raises:
        ImportError, OSError: it, or a library it needs, cannot be loaded.
    """
    import torch

    return Torch(
        version=str(torch.__version__),
        commit=torch.version.git_version,
        cpu_capability=torch.backends.cpu.get_cpu_capability(),
        cuda=torch.version.cuda,
        threads=torch.get_num_threads(),
    )


def read_accelerators(root: Path = Path("/")) -> Accelerators:
    """Reads GPUs, driver and communication libraries; no context is made on a GPU."""
    import torch

    devices: list[Device] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        available = torch.cuda.is_available()
        messages: list[str] = []
        try:
            for index in range(torch.cuda.device_count() if available else 0):
                properties = torch.cuda.get_device_properties(index)
                capability = f"{properties.major}.{properties.minor}"
                node = None if (address := pci_address_of(properties)) is None else node_of(address, root)
                near = (None, None) if node is None else (node.number, write_cores(node.cores))
                devices.append(Device(properties.name, properties.total_memory, capability, address, *near))
        except RuntimeError as error:  # the driver or a device refuses
            messages.append(str(error))
    messages += [str(warning.message) for warning in caught]
    distributed = torch.distributed.is_available()
    nccl = None
    if distributed and torch.distributed.is_nccl_available() and torch.version.cuda is not None:
        nccl = ".".join(str(part) for part in torch.cuda.nccl.version())
    loaded = re.search(
        r"Kernel Module\D*?\s(\d+(?:\.\d+)+)", read_text(root / "proc/driver/nvidia/version") or "", re.IGNORECASE
    )
    return Accelerators(
        available=available,
        driver=loaded[1] if loaded else None,
        devices=tuple(devices),
        nccl=nccl,
        gloo=distributed and torch.distributed.is_gloo_available(),
        messages=tuple(messages),
    )


def describe_extension() -> list[str]:
    """Describes each file where the compiled extension should be, and what is wrong with it if that shows."""
    folders = _extension_folders()
    files = _extension_files(folders)
    if not files:
        return [f"no compiled file _C* in {' or '.join(map(str, folders)) or 'any folder of the package'}"]
    return [f"{file}: {_describe_library(file)}" for file in files]


def extension_is_cut_short() -> bool:
    """Tells whether loading the extension would end the process: the system maps a library of any length."""
    return any(_fits(file) and _describe_library(file) == _CUT_SHORT for file in _extension_files(_extension_folders()))


def _extension_folders() -> list[Path]:
    spec = importlib.util.find_spec("lightning_zero.ops")
    return [Path(folder) for folder in (spec.submodule_search_locations or [] if spec else [])]


def _extension_files(folders: list[Path]) -> list[Path]:
    return sorted({file for folder in folders for file in folder.glob("_C*") if file.suffix in {".so", ".pyd"}})


def _fits(file: Path) -> bool:
    """Tells whether this Python would take the file for the extension."""
    return any(file.name == f"_C{suffix}" for suffix in importlib.machinery.EXTENSION_SUFFIXES)


def _describe_library(file: Path) -> str:
    if not _fits(file):
        return f"made for another Python than this {sys.implementation.cache_tag}"
    try:
        with file.open("rb") as stream:
            header = stream.read(64)
        size = file.stat().st_size
    except OSError as error:
        return f"cannot be read ({error.strerror})"
    if sys.platform == "linux":
        if header[:4] != b"\x7fELF":
            return "not a shared library"
        machine = _ELF_MACHINES.get(int.from_bytes(header[18:20], "little"), "another CPU")
        if machine != platform.machine():
            return f"made for {machine}; this machine is {platform.machine()}"
        # The table of sections is what a linker writes last: its place, its entries' size and their number.
        table, entry, entries = (int.from_bytes(header[part], "little") for part in _ELF_SECTIONS)
        if len(header) < 64 or table + entry * entries > size:
            return _CUT_SHORT
    return f"a shared library of {size} bytes for this Python and CPU"
