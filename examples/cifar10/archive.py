"""The binary version of CIFAR-10: downloads and verifies it, and reads its records, which contain no pickled code."""

import fcntl
import hashlib
import tarfile
import tempfile
import urllib.request
from collections.abc import Iterator
from http.client import HTTPException
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

TRAIN_FILES = tuple(f"data_batch_{number}.bin" for number in range(1, 6))
TEST_FILE = "test_batch.bin"
FILES = (*TRAIN_FILES, TEST_FILE)
RECORD = 1 + 3 * 32 * 32  # bytes: a label, then the pixels, channels first
TIMEOUT = 30  # seconds without an answer of the server before the download fails


def prepare(root: Path, url: str, md5: str) -> None:
    """Download the six files into a folder, unless it has them.

    If several processes prepare the same folder at the same time, one downloads and the others wait.

    Args:
        root: The folder. It is either complete or does not exist, even after an interrupted download.
        url: Address of the official `cifar-10-binary.tar.gz`.
        md5: Its checksum, in hexadecimal digits.
    """
    if not missing_files(root):
        return
    try:
        root.parent.mkdir(parents=True, exist_ok=True)
        lock = (root.parent / f".{root.name}.lock").open("w")
    except OSError as error:
        raise ValueError(f"data.root={root} does not exist and cannot be made ({error}): name another one.") from error
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if missing_files(root):
            download(root, url, md5)


def missing_files(root: Path) -> list[str]:
    """The names of the missing files; raises if the folder exists but lacks some of the files."""
    missing = [name for name in FILES if not (root / name).is_file()]
    if missing and (root.is_file() or (root.is_dir() and any(root.iterdir()))):
        raise ValueError(
            f"data.root={root} has no {missing[0]}: expected a folder with {', '.join(FILES)}, or none, to download "
            "them. Name another one by data.root=..., or use data=synthetic."
        )
    return missing


def download(root: Path, url: str, md5: str) -> None:
    """Fetch, verify and unpack the archive in a temporary folder, which gets its name when it is complete."""
    with tempfile.TemporaryDirectory(dir=root.parent, prefix=f".{root.name}-") as folder:
        archive, files = Path(folder, "archive.tar.gz"), Path(folder, "files")
        digest = hashlib.md5(usedforsecurity=False)
        with archive.open("wb") as file:
            for chunk in read_from(url, root):
                digest.update(chunk)
                file.write(chunk)
        if digest.hexdigest() != md5.lower():
            raise ValueError(
                f"{url}: the download has MD5 {digest.hexdigest()}, expected {md5}: it is damaged or another file. "
                "Try again, or download it by other means and name its unpacked folder by data.root=..."
            )
        unpack(archive, files)
        files.replace(root)


def read_from(url: str, root: Path) -> Iterator[bytes]:
    """The contents of an address, one MiB at a time, with a progress bar."""
    try:
        with urllib.request.urlopen(url, timeout=TIMEOUT) as response:
            total = int(response.headers.get("Content-Length", 0)) or None
            with tqdm(desc=f"Downloading {url}", total=total, unit="B", unit_scale=True) as bar:
                while chunk := response.read(1 << 20):
                    bar.update(len(chunk))
                    yield chunk
    except (OSError, HTTPException) as error:
        reason = getattr(error, "reason", error)
        raise ValueError(
            f"{root} has no CIFAR-10, and {url} cannot be downloaded ({reason}): name a folder that has the binary "
            "version by data.root=..., or use data=synthetic, which needs no files."
        ) from error


def unpack(archive: Path, folder: Path) -> None:
    """Write the six files of an archive into a new folder; other entries of the archive are ignored."""
    folder.mkdir()
    with tarfile.open(archive) as tar:
        members = {Path(member.name).name: member for member in tar if member.isfile()}
        if missing := [name for name in FILES if name not in members]:
            raise ValueError(
                f"The archive has no {missing[0]}: expected CIFAR-10's binary version with {', '.join(FILES)}. "
                "Change data.url and data.md5."
            )
        for name in FILES:
            source = tar.extractfile(members[name])
            (folder / name).write_bytes(source.read())


def read_records(path: Path) -> tuple[Tensor, Tensor]:
    """Read images (N 3 32 32, uint8) and labels (N, int64) from a file with any number of records."""
    content = bytearray(path.read_bytes())
    if not content or len(content) % RECORD:
        raise ValueError(
            f"{path} has {len(content)} bytes, which is no multiple of {RECORD}, the size of an image with its label: "
            "the file is truncated or of another kind. Replace it."
        )
    records = torch.frombuffer(content, dtype=torch.uint8).view(-1, RECORD)
    labels = records[:, 0].long()
    if (largest := int(labels.max())) > 9:
        raise ValueError(f"{path} has the label {largest}, expected 0 to 9: it is no file of CIFAR-10. Replace it.")
    return records[:, 1:].unflatten(1, (3, 32, 32)), labels
