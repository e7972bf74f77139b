"""Tokens of text as training data: random windows for training, and all held-out windows for validation.

Both loaders split one global batch over the ranks, so that step t uses the same tokens at any world size.
"""

import hashlib
import math
import random
import sysconfig
from collections.abc import Collection, Iterator
from pathlib import Path

import lightning as L
import torch
from tokenizer import encode, load_tokenizer
from torch import Tensor

from lightning_zero.config import micro_batch_size

VAL_TOKENS = 4096  # per validation batch, limited because each token has a score for every entry of the vocabulary
IGNORED = -100  # target of a position beyond the end of the text; cross_entropy ignores it
FOLLOWED = {"context": "model.context", "epoch_steps": "trainer.max_steps"}  # the options that these default to
NOT_LIBRARY = {"__pycache__", "site-packages", "dist-packages", "test", "tests", "idle_test"}


class RandomWindows:
    """Random windows, drawn from a generator that is seeded by (seed, step), so that its only state is the step.

    An iteration begins at the current position and yields as many batches as an epoch has. Lightning takes fewer if
    `limit_train_batches` is set or if it resumes within an epoch; it counts them itself.

    Args:
        tokens: 1D uint8 or uint16, the text.
        context: Inputs per window.
        batch_size: Windows per optimizer step, over all ranks and micro-batches.
        steps: Optimizer steps per epoch.
        seed: Determines the windows, together with the step.
        rank: This rank, which gets its part of each batch.
        world_size: Number of ranks.
        accumulate: Micro-batches per optimizer step.
    """

    def __init__(
        self,
        tokens: Tensor,
        context: int,
        batch_size: int,
        steps: int,
        seed: int,
        rank: int = 0,
        world_size: int = 1,
        accumulate: int = 1,
    ) -> None:
        self.micro_batch = micro_batch_size(batch_size, world_size, accumulate)
        self.tokens, self.context, self.batch_size, self.seed = tokens, context, batch_size, seed
        self.steps, self.accumulate = steps, accumulate
        self.rank = rank
        self.position = 0  # number of micro-batches yielded since the run began

    def __len__(self) -> int:
        """Micro-batches per epoch. Without a length Lightning would fetch one batch ahead of the state."""
        return self.steps * self.accumulate

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for _ in range(len(self)):
            step, part = divmod(self.position, self.accumulate)
            self.position += 1
            yield self._micro_batch(step, part)

    def _micro_batch(self, step: int, part: int) -> tuple[Tensor, Tensor]:
        draw = random.Random(f"{self.seed}/{step}")
        starts = [draw.randrange(len(self.tokens) - self.context) for _ in range(self.batch_size)]
        first = (self.rank * self.accumulate + part) * self.micro_batch
        offsets = torch.tensor(starts[first : first + self.micro_batch])[:, None]
        windows = self.tokens[offsets + torch.arange(self.context + 1)].long()
        return windows[:, :-1], windows[:, 1:]

    def state_dict(self) -> dict[str, int]:
        step, part = divmod(self.position, self.accumulate)
        return {"step": step, "micro_batch": part}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["step"] * self.accumulate + state["micro_batch"]


class HeldOutWindows:
    """Consecutive windows, the same in every iteration; all ranks get the same number of batches.

    Args:
        tokens: 1D uint8 or uint16, the held-out text.
        context: Inputs per window; the last window is padded.
        batch_size: Windows per batch of one rank.
        limit: Use only this many windows, evenly spread; None for all windows.
        rank: This rank, which gets its part of the windows.
        world_size: Number of ranks.
    """

    def __init__(
        self,
        tokens: Tensor,
        context: int,
        batch_size: int,
        limit: int | None = None,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        self.tokens, self.context, self.batch_size = tokens, context, batch_size
        available = math.ceil((len(tokens) - 1) / context)
        count = min(limit or available, available)
        self.starts = [available * i // count * context for i in range(count)]
        self.rank, self.world_size = rank, world_size

    def __len__(self) -> int:
        return math.ceil(len(self.starts) / (self.batch_size * self.world_size))

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for index in range(len(self)):
            first = (index * self.world_size + self.rank) * self.batch_size
            starts = self.starts[first : first + self.batch_size]
            # A rank without windows left still runs a forward, since at stage 3 the others wait for it.
            yield self._batch(starts or [len(self.tokens)])

    def _batch(self, starts: list[int]) -> tuple[Tensor, Tensor]:
        positions = torch.tensor(starts)[:, None] + torch.arange(self.context + 1)
        windows = self.tokens[positions.clamp(max=len(self.tokens) - 1)].long()
        beyond = positions[:, 1:] >= len(self.tokens)
        return windows[:, :-1], windows[:, 1:].masked_fill(beyond, IGNORED)


class WindowedData(L.LightningDataModule):
    """Training and held-out tokens, and the two loaders.

    The text is read when the object is made, so that a wrong path ends the program before ranks are started.

    Args:
        context: Inputs per window.
        batch_size: Sequences per optimizer step, over all ranks and micro-batches.
        val_batch_size: Sequences per validation batch of a rank; None for as many as fit into 4,096 tokens, at least 1.
        val_windows: Validate on this many windows, evenly spread; None for all windows.
        epoch_steps: Optimizer steps per epoch.
        seed: Seed of the training windows.
        tokenizer: Kind of the tokens: `bytes` or `gpt2`.
        vocab: Folder of the tokenizer's files; None downloads them.
    """

    def __init__(
        self,
        *,
        context: int,
        batch_size: int,
        epoch_steps: int,
        val_batch_size: int | None = None,
        val_windows: int | None = None,
        seed: int = 0,
        tokenizer: str = "bytes",
        vocab: str | None = None,
    ) -> None:
        super().__init__()
        sizes = {"context": context, "batch_size": batch_size, "epoch_steps": epoch_steps}
        sizes |= {"val_batch_size": val_batch_size, "val_windows": val_windows}
        for name, value in sizes.items():
            if value is not None and value < 1:
                option = FOLLOWED.get(name, f"data.{name}")
                raise ValueError(f"data.{name}={value} must be at least 1: set {option} to a positive number.")
        self.context, self.batch_size, self.epoch_steps = context, batch_size, epoch_steps
        self.val_batch_size = val_batch_size or max(1, VAL_TOKENS // context)
        self.val_windows, self.seed = val_windows, seed
        self.tokenizer = load_tokenizer(tokenizer, vocab)
        self.train, self.held_out = self.read()  # 1D uint8 or uint16
        for name, tokens in (("training", self.train), ("held-out", self.held_out)):
            if len(tokens) <= context:
                raise ValueError(
                    f"The {name} part of the text has {len(tokens)} tokens, but a window needs {context + 1}: "
                    "use a longer text or a smaller model.context."
                )

    def read(self) -> tuple[Tensor, Tensor]:
        """The tokens for training, and those for validation."""
        raise NotImplementedError

    @property
    def tokens_per_step(self) -> int:
        return self.batch_size * self.context

    def train_dataloader(self) -> RandomWindows:
        rank, world_size = self.trainer.global_rank, self.trainer.world_size
        accumulate = self.trainer.accumulate_grad_batches
        return RandomWindows(
            self.train,
            self.context,
            self.batch_size,
            self.epoch_steps,
            self.seed,
            rank,
            world_size,
            accumulate,
        )

    def val_dataloader(self) -> HeldOutWindows:
        rank, world_size = self.trainer.global_rank, self.trainer.world_size
        return HeldOutWindows(self.held_out, self.context, self.val_batch_size, self.val_windows, rank, world_size)


class StdlibData(WindowedData):
    """The Python sources of the running interpreter's standard library: real text on every machine.

    A tenth of the files, chosen by a hash of their path, is held out. The arguments are those of `WindowedData`.
    """

    def read(self) -> tuple[Tensor, Tensor]:
        root = Path(sysconfig.get_path("stdlib"))
        train, held_out = bytearray(), bytearray()
        for path in text_files(root, "*.py", without=NOT_LIBRARY):
            name = path.relative_to(root).as_posix().encode()
            part = held_out if hashlib.sha256(name).digest()[0] < 26 else train
            part += path.read_bytes()
        return encode(self.tokenizer, train), encode(self.tokenizer, held_out)


class TextData(WindowedData):
    """A text file or a folder of text files; the last tenth is held out. `options` are those of `WindowedData`."""

    def __init__(self, path: str, **options) -> None:
        self.path = Path(path).expanduser()
        super().__init__(**options)

    def read(self) -> tuple[Tensor, Tensor]:
        files = [self.path] if self.path.is_file() else text_files(self.path)
        text = bytearray().join(file.read_bytes() for file in files)
        if not text:
            raise ValueError(f"data.path={self.path} is empty: expected a text; choose another path.")
        tokens = encode(self.tokenizer, text)
        split = held_out_from(len(tokens))
        return tokens[:split], tokens[split:]


class TokenData(WindowedData):
    """`train.bin` and `val.bin` in the format of nanoGPT and `prepare.py`: memory-mapped uint16, never read as a whole.

    Args:
        path: Folder of the files.
        options: Other arguments of `WindowedData`.
    """

    def __init__(self, path: str, **options) -> None:
        self.path = Path(path).expanduser()
        super().__init__(**options)

    def read(self) -> tuple[Tensor, Tensor]:
        train, held_out = memory_map(self.path / "train.bin"), memory_map(self.path / "val.bin")
        for name, tokens in (("train.bin", train), ("val.bin", held_out)):
            if (largest := int(tokens[:1_000_000].int().max())) >= self.tokenizer.vocab_size:
                raise ValueError(
                    f"{self.path / name} has the token {largest}, but the tokenizer has {self.tokenizer.vocab_size}: "
                    "set data.tokenizer to the one that wrote the file, such as gpt2."
                )
        return train, held_out


def memory_map(path: Path) -> Tensor:
    """The uint16 numbers in a file, in the machine's byte order: 1D, read when they are used."""
    if not path.is_file():
        raise ValueError(f"{path} does not exist: check data.path, or write the file by examples/gpt2/prepare.py.")
    size = path.stat().st_size
    if not size or size % 2:
        raise ValueError(f"{path} has {size} bytes: expected uint16 tokens, two bytes each; write the file anew.")
    return torch.from_file(str(path), shared=False, size=size // 2, dtype=torch.uint16)


def held_out_from(count: int) -> int:
    """The index at which the last tenth of `count` tokens begins."""
    return count * 9 // 10


def text_files(root: Path, pattern: str = "*", without: Collection[str] = ()) -> list[Path]:
    """The files below a folder that match `pattern`, in a fixed order, except those in folders named in `without`."""
    if not root.is_dir():
        raise ValueError(f"{root} does not exist: expected a file or a folder of text; check data.path.")
    files = [path for path in root.rglob(pattern) if path.is_file()]
    files = [path for path in files if not set(without) & set(path.relative_to(root).parts)]
    if not files:
        raise ValueError(f"{root} has no {pattern} files: expected at least one; choose another data.path.")
    return sorted(files, key=lambda path: path.relative_to(root).as_posix())
