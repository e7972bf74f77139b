"""The CIFAR-10 example: the networks, the archive and the data, and short runs of its main functions."""

from __future__ import annotations

import contextlib
import csv
import hashlib
import importlib
import io
import json
import re
import sys
import tarfile
from collections.abc import Iterator
from importlib import resources
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import torch
from helpers.images import FILES, records, write_files
from helpers.ranks import RankPool, ranks
from helpers.scripts import overridden
from hydra import compose, initialize_config_dir
from hydra.utils import instantiate
from lightning.pytorch.callbacks import ModelCheckpoint
from omegaconf import DictConfig, OmegaConf

from lightning_zero import load_from_checkpoint

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "cifar10"
MODULES = ("archive", "data", "model", "pictures", "report", "train", "predict")
OFFLINE = "http://127.0.0.1:9/cifar-10-binary.tar.gz"  # the port of the discard service, where nothing listens


@contextlib.contextmanager
def example_modules() -> Iterator[SimpleNamespace]:
    """The example's modules by name; other examples have modules of the same names."""
    sys.path.insert(0, str(EXAMPLE))
    try:
        yield SimpleNamespace(**{name: importlib.import_module(name) for name in MODULES})
    finally:
        sys.path.remove(str(EXAMPLE))
        for name in MODULES:
            sys.modules.pop(name, None)


@pytest.fixture(scope="module")
def cifar10() -> Iterator[SimpleNamespace]:
    with example_modules() as modules:
        yield modules


def composed(*overrides: str, run_dir: str = "run", primary: str = "train") -> DictConfig:
    with initialize_config_dir(str(EXAMPLE / "conf"), version_base="1.3"):
        return compose(primary, overrides=[f"run_dir='{run_dir}'", "strategy_name=test", *overrides])


@pytest.fixture(scope="module")
def plain() -> DictConfig:
    """The configuration without overrides."""
    return composed()


# -- configuration --


@pytest.mark.parametrize("group", ["model", "data", "experiment", "callbacks"])
def test_every_option_composes_and_resolves(group: str) -> None:
    paths = list((EXAMPLE / "conf" / group).glob("*.yaml"))
    assert paths
    for path in paths:
        OmegaConf.resolve(composed(f"{group}={path.stem}"))


def test_the_experiment_is_deepspeeds_tutorial(cifar10: SimpleNamespace) -> None:
    cfg = composed("experiment=tutorial", "strategy=zero2_offload")
    optimizer = {"lr": 1e-3, "betas": [0.8, 0.999], "eps": 1e-8, "weight_decay": 3e-7}
    # To the optimizer's learning rate.
    scheduler = {"min_lr": 0.0, "max_lr": None, "warmup_steps": 1000, "warmup_type": "log"}
    assert {key: cfg.optimizer[key] for key in optimizer} == optimizer
    assert cfg.optimizer._target_ == "torch.optim.Adam"
    assert {key: cfg.scheduler[key] for key in scheduler} == scheduler
    assert (cfg.data.batch_size, cfg.data.val_fraction, cfg.trainer.gradient_clip_val) == (16, 0.0, 1.0)
    assert (cfg.strategy.offload_optimizer, cfg.model.network, cfg.trainer.max_epochs) == ("cpu", "tutorial", 2)


def test_choices_beside_the_experiment_win() -> None:
    cfg = composed("experiment=tutorial", "callbacks=none", "model=resnet18", "scheduler=cosine")
    assert (cfg.callbacks, cfg.model.network, cfg.scheduler.warmup_steps) == ({}, "resnet18", None)


def test_the_primary_configuration_lists_every_option() -> None:
    package = Path(str(resources.files("lightning_zero.conf")))
    text = (EXAMPLE / "conf" / "train.yaml").read_text()
    listed = re.findall(r"^  - (\w+): \w+ # (?:.*: )?([\w ]+)$", text, re.MULTILINE)
    assert len(listed) == 10
    for group, names in listed:
        files = [path for conf in (package, EXAMPLE / "conf") for path in (conf / group).glob("*.yaml")]
        assert sorted(names.split()) == sorted(path.stem for path in files), group


# -- model --


@pytest.mark.parametrize(("network", "parameters"), [("tutorial", 62_006), ("resnet18", 11_173_962)])
def test_networks_have_the_published_parameter_counts(cifar10: SimpleNamespace, network: str, parameters: int) -> None:
    with torch.device("meta"):
        model = instantiate(composed(f"model={network}").model)
        assert sum(p.numel() for p in model.parameters()) == parameters
        assert model(torch.empty(2, 3, 32, 32)).shape == (2, 10)


def test_an_unknown_network_is_refused(cifar10: SimpleNamespace) -> None:
    with pytest.raises(ValueError, match=r"model\.network=resnet50 must be one of tutorial, resnet18"):
        cifar10.model.Classifier("resnet50")


# -- archive --


@pytest.fixture
def official(tmp_path: Path) -> SimpleNamespace:
    """An archive of the official layout, as a URL, with its checksum."""
    path = tmp_path / "server" / "cifar-10-binary.tar.gz"
    path.parent.mkdir()
    with tarfile.open(path, "w:gz") as tar:
        for number, name in enumerate([*FILES, "batches.meta.txt", "readme.html"]):
            content = records(3 + 2 * number, number) if name in FILES else b"text"
            member = tarfile.TarInfo(f"cifar-10-batches-bin/{name}")
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    md5 = hashlib.md5(path.read_bytes(), usedforsecurity=False).hexdigest()
    return SimpleNamespace(path=path, url=path.as_uri(), md5=md5)


def read(cifar10: SimpleNamespace, root: Path, url: str = OFFLINE, md5: str = "0") -> Any:
    return cifar10.data.CIFAR10(str(root), url, md5, batch_size=2)


def test_the_archive_is_downloaded_verified_and_read(
    cifar10: SimpleNamespace, official: SimpleNamespace, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = tmp_path / "new" / "cifar-10"
    data = read(cifar10, root, official.url, official.md5)
    assert sorted(path.name for path in root.iterdir()) == sorted(FILES)
    assert [path.name for path in root.parent.iterdir() if path != root] == [".cifar-10.lock"]
    assert "Downloading" in capsys.readouterr().err

    assert len(data.train) == 3 + 5 + 7 + 9 + 11  # any number of records per file, odd ones too
    assert len(data.test) == 13
    content = records(3, 0)
    assert data.train.labels[:3].tolist() == [0, 1, 2]
    assert bytes(data.train.pixels[0].flatten().tolist()) == content[1:3073]
    red, green = data.test.pixels[4, 0], data.test.pixels[4, 1]  # channels first, rows first
    start = 4 * 3073 + 1
    assert red[0].tolist() == list(records(13, 5)[start : start + 32])
    assert green[1].tolist() == list(records(13, 5)[start + 1024 + 32 : start + 1024 + 64])

    official.path.unlink()
    again = read(cifar10, root, official.url, official.md5)  # without a download
    assert torch.equal(again.train.pixels, data.train.pixels)


def test_a_damaged_download_is_refused_and_leaves_nothing(
    cifar10: SimpleNamespace, official: SimpleNamespace, tmp_path: Path
) -> None:
    official.path.write_bytes(official.path.read_bytes()[:-1])
    root = tmp_path / "new" / "cifar-10"
    with pytest.raises(ValueError, match=rf"has MD5 [0-9a-f]{{32}}, expected {official.md5}.*data\.root="):
        read(cifar10, root, official.url, official.md5)
    assert [path.name for path in root.parent.iterdir()] == [".cifar-10.lock"]


def test_a_link_to_an_empty_folder_is_filled_and_the_checksum_may_be_in_capitals(
    cifar10: SimpleNamespace, official: SimpleNamespace, tmp_path: Path
) -> None:
    (tmp_path / "target").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "target")
    assert len(read(cifar10, tmp_path / "link", official.url, official.md5.upper()).test) == 13
    assert (tmp_path / "link").is_symlink()
    assert sorted(path.name for path in (tmp_path / "target").iterdir()) == sorted(FILES)


def test_an_archive_without_one_of_the_files_is_refused(cifar10: SimpleNamespace, tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "other.tar.gz", "w:gz") as tar:
        tar.addfile(tarfile.TarInfo("data_batch_1.bin"))
    with pytest.raises(ValueError, match=r"archive has no data_batch_2\.bin: expected .*data\.url and data\.md5"):
        cifar10.archive.unpack(tmp_path / "other.tar.gz", tmp_path / "files")


def test_without_network_and_files_the_error_names_the_ways_out(cifar10: SimpleNamespace, tmp_path: Path) -> None:
    message = r"absent has no CIFAR-10, and http://127\.0\.0\.1:9/.* \(.*refused.*data\.root=.*data=synthetic"
    with pytest.raises(ValueError, match=message):
        read(cifar10, tmp_path / "absent")
    assert not (tmp_path / "absent").exists()


def test_a_folder_with_something_else_is_neither_read_nor_overwritten(
    cifar10: SimpleNamespace, official: SimpleNamespace, tmp_path: Path
) -> None:
    folder = write_files(tmp_path / "files")
    (folder / "data_batch_3.bin").unlink()
    with pytest.raises(ValueError, match=r"has no data_batch_3\.bin: expected a folder with .*data=synthetic"):
        read(cifar10, folder, official.url, official.md5)
    assert (folder / "data_batch_1.bin").read_bytes() == records(12, 0)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (records(3, 0)[:-1], r"data_batch_2\.bin has 9218 bytes, which is no multiple of 3073.*truncated"),
        (b"", r"data_batch_2\.bin has 0 bytes"),
        (b"\x0a" + bytes(3072), r"data_batch_2\.bin has the label 10, expected 0 to 9"),
    ],
)
def test_a_damaged_file_is_refused_by_name(
    cifar10: SimpleNamespace, tmp_path: Path, content: bytes, message: str
) -> None:
    folder = write_files(tmp_path / "files")
    (folder / "data_batch_2.bin").write_bytes(content)
    with pytest.raises(ValueError, match=message):
        read(cifar10, folder)


def test_the_sample_is_read(cifar10: SimpleNamespace, data_dir: Path) -> None:
    data = read(cifar10, data_dir / "cifar-10-sample")
    assert (len(data.train), len(data.test)) == (5000, 1000)
    assert data.test.labels[:5].tolist() == [3, 8, 8, 0, 6]  # cat ship ship airplane frog, as in the tutorial


# -- data --


def images(cifar10: SimpleNamespace, count: int) -> Any:
    """Images that can be told apart by their first pixel."""
    pixels = torch.zeros(count, 3, 32, 32, dtype=torch.uint8)
    pixels[:, 0, 0, 0] = torch.arange(count)
    return cifar10.data.Images(pixels, torch.arange(count) % 10)


def numbers(batches: Any) -> list[int]:
    """Which images the batches hold."""
    return [round((float(image[0, 0, 0]) + 1) * 127.5) for pixels, _ in batches for image in pixels]


def test_pixels_are_normalized_as_in_the_tutorial(cifar10: SimpleNamespace) -> None:
    pixels = torch.tensor([0, 51, 255], dtype=torch.uint8).repeat(1024).view(1, 3, 32, 32)
    batch, _ = cifar10.data.Images(pixels, torch.zeros(1)).batch(torch.tensor([0]))
    assert batch.dtype == torch.float32
    torch.testing.assert_close(batch, (pixels / 255 - 0.5) / 0.5)


@pytest.mark.parametrize(("world_size", "accumulate"), [(2, 1), (1, 3), (2, 3)])
def test_a_step_sees_the_same_images_however_it_is_split(
    cifar10: SimpleNamespace, world_size: int, accumulate: int
) -> None:
    data = images(cifar10, 40)
    whole = numbers(cifar10.data.ShuffledBatches(data, 12, 1))
    assert len(set(whole)) == len(whole) == 36  # an incomplete batch is left out
    by_rank = [list(cifar10.data.ShuffledBatches(data, 12, 1, r, world_size, accumulate)) for r in range(world_size)]
    steps = [
        numbers([batch for rank in by_rank for batch in rank[step * accumulate : (step + 1) * accumulate]])
        for step in range(3)
    ]
    assert [number for step in steps for number in step] == whole


def test_every_epoch_has_an_order_of_its_own_and_goes_on_from_its_state(cifar10: SimpleNamespace) -> None:
    data = images(cifar10, 40)
    loader = cifar10.data.ShuffledBatches(data, 8, 1, accumulate=2)
    epochs = [numbers(loader), numbers(loader)]
    assert epochs[0] != epochs[1]
    assert sorted(epochs[0]) == sorted(epochs[1]) == list(range(40))

    begun = cifar10.data.ShuffledBatches(data, 8, 1, accumulate=2)
    iterator = iter(begun)
    seen = numbers([next(iterator) for _ in range(3)])
    assert begun.state_dict() == {"step": 1, "micro_batch": 1}
    resumed = cifar10.data.ShuffledBatches(data, 8, 1, accumulate=2)
    resumed.load_state_dict(begun.state_dict())
    everything = epochs[0] + epochs[1]
    rest = numbers(resumed)
    assert len(rest) == 40
    assert seen + rest == everything[: len(seen) + 40]


class Recorder(L.LightningModule):
    """Keeps which images every batch has held."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(()))
        self.seen: list[list[int]] = []

    def training_step(self, batch: Any) -> torch.Tensor:
        self.seen.append(numbers([batch]))
        return self.weight * 1

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def trained_on(loader: Any, limit: int | None, folder: Path, start: Path | None = None) -> list[list[int]]:
    """The batches of three epochs under Lightning, which leaves a checkpoint of every step."""
    model = Recorder()
    trainer = L.Trainer(
        accelerator="cpu",
        max_epochs=3,
        limit_train_batches=limit,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[ModelCheckpoint(folder, "{step}", every_n_train_steps=1, save_top_k=-1)],
    )
    trainer.fit(model, loader, ckpt_path=start, weights_only=True)
    return model.seen


@pytest.mark.parametrize("limit", [None, 4])
def test_every_epoch_is_as_long_as_lightning_wants_it_also_when_resumed(
    cifar10: SimpleNamespace, tmp_path: Path, limit: int | None
) -> None:
    def loader() -> Any:
        return cifar10.data.ShuffledBatches(images(cifar10, 40), 8, 1)

    seen = trained_on(loader(), limit, tmp_path)
    assert len(seen) == 3 * (limit or 5)
    second = [number for batch in seen[5:10] for number in batch]  # permutation, wherever the epochs begin
    assert sorted(second) == list(range(40))
    for step in (3, limit or 5, 6):
        assert trained_on(loader(), limit, tmp_path, tmp_path / f"step={step}.ckpt") == seen[step:]


@pytest.mark.parametrize(("count", "world_size"), [(12, 1), (13, 2), (3, 2), (25, 3)])
def test_evaluation_sees_every_image_once(cifar10: SimpleNamespace, count: int, world_size: int) -> None:
    data = images(cifar10, count)
    batches = [list(cifar10.data.EvaluationBatches(data, 4, rank, world_size)) for rank in range(world_size)]
    assert len({len(mine) for mine in batches}) == 1  # as many forwards on every rank
    in_order = [batch for step in zip(*batches, strict=True) for batch in step]
    assert {len(labels) for _, labels in in_order} == {4}
    assert numbers(in_order)[:count] == list(range(count))
    labels = torch.cat([labels for _, labels in in_order])
    assert (labels >= 0).tolist() == [True] * count + [False] * (len(labels) - count)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 0}, "batch_size=0 must be at least 1"),
        ({"eval_batch_size": -1}, "eval_batch_size=-1 must be at least 1"),
        ({"batch_size": 37}, r"batch_size=37 must be at most 36, the number of training images"),
        ({"train_images": -1}, r"data\.train_images=-1 must be at least 1: set data\.train_images to a positive"),
        ({"test_images": 0}, r"data\.test_images=0 must be at least 1"),
        ({"val_fraction": 1.0}, r"val_fraction=1\.0 must be at least 0 and below 1, such as 0\.1"),
        ({"val_fraction": -0.1}, r"val_fraction=-0\.1 must be at least 0"),
    ],
)
def test_unusable_sizes_are_refused(cifar10: SimpleNamespace, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        cifar10.data.Synthetic(
            **{"train_images": 40, "test_images": 5, "batch_size": 4, "val_fraction": 0.1, **options}
        )


# -- report --


def test_images_that_only_fill_a_batch_are_not_shown(cifar10: SimpleNamespace, tmp_path: Path) -> None:
    report = cifar10.report.Report(str(tmp_path), "test", 4)
    batch = next(iter(cifar10.data.EvaluationBatches(images(cifar10, 5), 8)))
    report.on_test_batch_end(None, None, torch.zeros(8, 10), batch, 0)
    pixels, labels, probabilities = report.shown
    assert (labels.tolist(), numbers([(pixels, labels)])) == ([0, 1, 2, 3, 4], [0, 1, 2, 3, 4])
    assert probabilities.shape == (5, 10)


def test_a_class_without_test_images_has_no_accuracy(cifar10: SimpleNamespace, tmp_path: Path) -> None:
    model = cifar10.model.Classifier("tutorial")
    labels = torch.tensor([0, 1, 1])
    for metric in (model.class_accuracy, model.confusion):
        metric.update(torch.eye(10)[[0, 1, 2]], labels)
    report = cifar10.report.Report(str(tmp_path), "test", 4)
    report.on_test_epoch_end(None, model)
    assert report.class_accuracy == [1.0, 0.5] + [None] * 8
    report.test_accuracy = 2 / 3
    lines = [line.split() for line in report.table().splitlines()]
    assert lines[1:4] == [["airplane", "1", "100.0%"], ["automobile", "2", "50.0%"], ["bird", "0", "-"]]
    assert lines[-1] == ["all", "3", "66.7%"]


# -- options --


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("seed=null", "seed=None must be an integer from 0 to 4294967295"),
        ("seed=-1", "seed=-1 must be an integer from 0"),
        ("ckpt_path=/nope.ckpt", "ckpt_path='/nope.ckpt' must be an existing file or sharded folder, or null to"),
        ("ckpt_path=/", "ckpt_path='/' must be an existing file or sharded folder"),
        ("+trainer.limit_test_batches=0", r"trainer\.limit_test_batches=0 leaves nothing to report: set it to 1 or"),
        ("+trainer.limit_predict_batches=0", r"trainer\.limit_predict_batches=0 leaves nothing to report"),
        ("strategy.start_method=spawn", r"start_method=spawn keeps the results in .* at popen, or .* by torchrun"),
    ],
)
def test_unusable_options_are_refused_at_once(
    cifar10: SimpleNamespace, plain: DictConfig, monkeypatch: pytest.MonkeyPatch, override: str, message: str
) -> None:
    monkeypatch.setattr(cifar10.train, "instantiate", None)  # nothing is read or built before
    with pytest.raises(ValueError, match=message):
        cifar10.train.main.__wrapped__(overridden(plain, override))


def test_a_batch_that_does_not_divide_is_refused_before_ranks_start(cifar10: SimpleNamespace) -> None:
    cfg = composed(*SHORT, "trainer.devices=3")
    message = r"data\.batch_size=16 .* 3 ranks x 1 .* multiple of 3, such as data\.batch_size=15, or .*trainer\.devices"
    with pytest.raises(ValueError, match=message):
        cifar10.train.main.__wrapped__(cfg)


# -- short runs --

SHORT = (
    "strategy=ddp",
    "trainer=cpu",
    "trainer.max_steps=2",
    "trainer.log_every_n_steps=1",
    "trainer.enable_progress_bar=false",
    "trainer.enable_model_summary=false",
    "scheduler=none",
    "data=synthetic",
    "data.batch_size=16",
    "data.train_images=48",
    "data.test_images=21",
    "data.eval_batch_size=4",
)


def run_briefly(folder: str, devices: int, *overrides: str, script: str = "train") -> None:
    """A main function of the example on this rank."""
    Path(folder).mkdir(exist_ok=True)
    cfg = composed(*SHORT, f"trainer.devices={devices}", *overrides, run_dir=folder, primary=script)
    with example_modules() as modules:
        getattr(modules, script).main.__wrapped__(cfg)


def results(folder: Path) -> tuple[dict[str, Any], list[float]]:
    """The summary and the logged training losses."""
    with (folder / "csv" / "metrics.csv").open() as file:
        losses = [float(row["train_loss"]) for row in csv.DictReader(file) if row["train_loss"]]
    return json.loads((folder / "summary.json").read_text()), losses


def expected_probabilities(cifar10: SimpleNamespace, checkpoint: Path) -> tuple[torch.Tensor, torch.Tensor]:
    """What plain PyTorch makes of a checkpoint and the test images: probabilities and labels."""
    data = instantiate(composed(*SHORT).data)
    model = load_from_checkpoint(cifar10.model.Classifier, checkpoint).eval()
    pixels, labels = data.test.batch(torch.arange(21))
    with torch.no_grad():
        return model(pixels).softmax(dim=1), labels


@ranks(2)
def test_a_run_leaves_its_results(
    pool: RankPool, cifar10: SimpleNamespace, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    pool.run(run_briefly, str(folder), pool.world_size, "experiment=tutorial", "data.val_fraction=0")
    summary, losses = results(folder)
    assert (summary["steps"], summary["strategy"], summary["world_size"]) == (2, "test", pool.world_size)
    assert (summary["val_loss"], summary["train_loss"]) == (None, pytest.approx(sum(losses) / 2))
    assert 1e7 < summary["peak_memory_bytes"] < 1e11
    assert summary["images_per_second"] > 0

    names = {"checkpoints", "confusion.png", "csv", "loss.png", "predictions.png", "summary.json"}
    assert {path.name for path in folder.iterdir()} == names
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in folder.glob("*.png"))
    assert [path.name for path in (folder / "checkpoints").iterdir()] == ["last.ckpt"]

    printed = capsys.readouterr().out
    rows = dict(re.findall(r"^(\w+) +(\d+) +(?:[\d.]+%|-)$", printed, re.MULTILINE))
    assert list(rows) == [*cifar10.data.CLASSES, "all"]
    assert rows["all"] == "21"
    assert printed.count("summary.json:") == 1  # by rank 0 only


@ranks(2)
def test_metrics_count_every_image_once(pool: RankPool, cifar10: SimpleNamespace, tmp_path: Path) -> None:
    """21 images in batches of 4: on two ranks the last batches hold one image and seven that only fill them."""
    folder = tmp_path / "run"
    pool.run(run_briefly, str(folder), pool.world_size, "strategy=zero3", "data.val_fraction=0.5", "optimizer.lr=0.01")
    summary, _ = results(folder)
    probabilities, labels = expected_probabilities(cifar10, folder / "checkpoints" / "best.ckpt")
    right = probabilities.argmax(dim=1) == labels
    assert summary["test_accuracy"] == pytest.approx(right.float().mean().item())
    assert summary["test_loss"] == pytest.approx(torch.nn.functional.nll_loss(probabilities.log(), labels).item())
    for number, name in enumerate(cifar10.data.CLASSES):
        of_class = right[labels == number]
        expected = pytest.approx(of_class.float().mean().item(), abs=1e-4) if len(of_class) else None
        assert summary["class_accuracy"][name] == expected
    assert summary["val_loss"] is not None


@ranks(2)
@pytest.mark.parametrize("container", ["full", pytest.param("sharded", marks=pytest.mark.slow)])
def test_predictions_come_from_the_checkpoint_in_order(
    pool: RankPool, cifar10: SimpleNamespace, tmp_path: Path, container: str
) -> None:
    format_ = f"strategy.checkpoint_format={container}"
    pool.run(run_briefly, str(tmp_path / "run"), 2, "strategy=zero2_offload", format_, "optimizer.lr=0.01")
    checkpoint = tmp_path / "run" / "checkpoints" / "last.ckpt"
    options = "strategy=zero3", f"ckpt_path={checkpoint}", "model=resnet18"  # the checkpoint's network is taken
    pool.run(run_briefly, str(tmp_path / "predicted"), 2, *options, script="predict")

    probabilities, labels = expected_probabilities(cifar10, checkpoint)
    with (tmp_path / "predicted" / "predictions.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["image"] for row in rows] == [str(index) for index in range(21)]
    classes = cifar10.data.CLASSES
    assert [row["class"] for row in rows] == [classes[label] for label in labels]
    assert [row["predicted"] for row in rows] == [classes[label] for label in probabilities.argmax(dim=1)]
    for row, probability in zip(rows, probabilities.amax(dim=1).tolist(), strict=True):
        assert float(row["probability"]) == pytest.approx(probability, abs=1e-4)
    assert (tmp_path / "predicted" / "predictions.png").read_bytes().startswith(b"\x89PNG")


def test_a_part_of_the_images_can_be_predicted(pool1: RankPool, cifar10: SimpleNamespace, tmp_path: Path) -> None:
    network = cifar10.model.Classifier("tutorial")
    trainer = L.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)
    trainer.strategy.connect(network)
    trainer.save_checkpoint(tmp_path / "some.ckpt")
    options = f"ckpt_path={tmp_path}/some.ckpt", "+trainer.limit_predict_batches=2"
    pool1.run(run_briefly, str(tmp_path / "predicted"), 1, *options, script="predict")
    assert len((tmp_path / "predicted" / "predictions.csv").read_text().splitlines()) == 1 + 2 * 4


def test_predicting_from_another_programs_checkpoint_is_refused(cifar10: SimpleNamespace, tmp_path: Path) -> None:
    torch.save({"state_dict": {}}, tmp_path / "other.ckpt")
    messages = {f"{tmp_path}/other.ckpt": r"does not name a network: expected", "last": "must be an existing file"}
    for path, message in messages.items():
        with pytest.raises(ValueError, match=message):
            cifar10.predict.main.__wrapped__(composed("data=synthetic", f"ckpt_path={path}", primary="predict"))


def test_without_checkpoints_the_weights_at_the_end_are_tested(pool1: RankPool, tmp_path: Path) -> None:
    pool1.run(run_briefly, str(tmp_path / "run"), 1, "trainer.enable_checkpointing=false")
    assert 0 <= results(tmp_path / "run")[0]["test_accuracy"] <= 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "options"),
    [
        ("zero2_offload", ()),
        ("zero3", ("model=resnet18", "data.batch_size=4", "data.train_images=8", "data.test_images=3")),
    ],
)
def test_a_run_equals_ddp(pool2: RankPool, tmp_path: Path, strategy: str, options: tuple[str, ...]) -> None:
    for name in ("ddp", strategy):
        pool2.run(run_briefly, str(tmp_path / name), 2, f"strategy={name}", *options)
    ddp, ours = results(tmp_path / "ddp"), results(tmp_path / strategy)
    assert ours[1] == pytest.approx(ddp[1], abs=1e-5)
    assert ours[0]["test_loss"] == pytest.approx(ddp[0]["test_loss"], rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_sixteen_bits_train(pool1: RankPool, tmp_path: Path, precision: str) -> None:
    pool1.run(run_briefly, str(tmp_path / "run"), 1, "strategy=zero2", f"precision={precision}")
    _, losses = results(tmp_path / "run")
    assert losses == pytest.approx([torch.log(torch.tensor(10.0)).item()] * 2, rel=0.1)
