"""Checkpoints in an S3 bucket, of a server on this machine (moto's), by s3fs; where these are installed."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint.resuming import Resumable, run, save_at_end
from checkpoint.test_full import ALONE, RECIPE
from checkpoint.test_sharded import assert_equal_trees
from helpers.ranks import RankPool, ranks
from strategy.fits import assert_same

import lightning_zero
from lightning_zero.checkpoint import begin, load, locate
from lightning_zero.integration.names import STRATEGIES

s3fs = pytest.importorskip("s3fs", reason="needs s3fs")
SERVER = shutil.which("moto_server")


def access(endpoint: str) -> None:
    os.environ.update(
        AWS_ENDPOINT_URL=endpoint,
        AWS_ACCESS_KEY_ID="somebody",
        AWS_SECRET_ACCESS_KEY="secret",
        AWS_DEFAULT_REGION="us-east-1",
    )


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    if SERVER is None:
        pytest.skip("needs moto's server: pip install 'moto[server]'")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    address = f"http://127.0.0.1:{port}"
    with subprocess.Popen([SERVER, "-H", "127.0.0.1", "-p", str(port)], stderr=subprocess.DEVNULL) as server:
        before = dict(os.environ)
        try:
            access(address)
            deadline = time.monotonic() + 120
            while True:  # until it answers
                try:
                    s3fs.S3FileSystem(skip_instance_cache=True).mkdir("bucket")
                    break
                except OSError:
                    assert time.monotonic() < deadline
                    time.sleep(0.2)
            yield address
        finally:
            os.environ.clear()
            os.environ.update(before)
            server.terminate()


def saved(endpoint: str, strategy: dict[str, Any], path: str) -> Any:
    access(endpoint)
    return save_at_end(strategy, RECIPE, path)


def resumed(endpoint: str, strategy: dict[str, Any], path: str) -> Any:
    access(endpoint)
    return run(strategy, RECIPE, steps=RECIPE.steps + 2, resume=path)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # those of botocore
@pytest.mark.parametrize("form", ["full", "sharded"])
@ranks(2)
def test_a_bucket_holds_what_a_folder_holds(form: str, endpoint: str, pool: RankPool, tmp_path: Path) -> None:
    strategy = {**STRATEGIES["zero3"], "checkpoint_format": form}
    here, there = str(tmp_path / "last.ckpt"), f"s3://bucket/runs/{form}/last.ckpt"
    pool.run(saved, endpoint, strategy, here)
    for _ in range(2):
        pool.run(saved, endpoint, strategy, there)
    assert_equal_trees(load(locate(there), ALONE), load(Path(here), ALONE))
    both = (pool.run(resumed, endpoint, strategy, path) for path in (here, there))
    for ours, theirs in zip(*both, strict=True):
        assert_same(ours.weights, theirs.weights)
    module = lightning_zero.load_from_checkpoint(Resumable, there, recipe=RECIPE)
    assert_equal_trees(
        module.state_dict(), lightning_zero.load_from_checkpoint(Resumable, here, recipe=RECIPE).state_dict()
    )


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("form", ["full", "sharded"])
def test_a_file_of_many_parts(form: str, endpoint: str) -> None:
    tree = {"state_dict": {f"w{n}": torch.randn(3_000_000) for n in range(4)}}  # 48 MB, in parts of 8 MiB
    save = begin(form, tree, locate(f"s3://bucket/{form}-large.ckpt"), (), ALONE)
    save.write(ALONE)
    assert_equal_trees(load(locate(f"s3://bucket/{form}-large.ckpt"), ALONE), tree)
