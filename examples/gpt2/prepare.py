"""Write a text as `train.bin` and `val.bin`, nanoGPT's format, for `data=tokens`.

    python examples/gpt2/prepare.py text=input.txt folder=data tokenizer=gpt2

The tokens are uint16 in the machine's byte order; the last tenth of them is held out in `val.bin`. The text is
read in pieces, so it may be larger than memory.
"""

import shutil
from pathlib import Path

import torch
from data import held_out_from
from omegaconf import DictConfig
from tokenizer import Tokenizer, encode_blocks, load_tokenizer
from tqdm import tqdm

from lightning_zero import hydra_main
from lightning_zero.config import ConfigError


@hydra_main(config_name="prepare", config_path="conf")
def main(cfg: DictConfig) -> None:
    """Write both files and print their numbers of tokens."""
    text, folder = Path(cfg.text).expanduser(), Path(cfg.folder).expanduser()
    if not text.is_file() or not text.stat().st_size:
        raise ConfigError(f"text={cfg.text} must be a file with text: change text.")
    tokenizer = load_tokenizer(cfg.tokenizer, cfg.vocab)
    folder.mkdir(parents=True, exist_ok=True)
    train, held_out = folder / "train.bin", folder / "val.bin"
    unfinished = folder / "tokens.part"  # so that an interrupted run leaves no incomplete train.bin
    count = write_tokens(tokenizer, text, unfinished)
    move_tail(unfinished, held_out, 2 * held_out_from(count))
    unfinished.replace(train)
    for path in (train, held_out):
        print(f"{path}: {path.stat().st_size // 2:,} tokens")


def write_tokens(tokenizer: Tokenizer, text: Path, path: Path) -> int:
    """Write the tokens of a text, with a progress bar, and return their number."""
    count = 0
    with (
        text.open("rb") as source,
        path.open("wb") as target,
        tqdm(total=text.stat().st_size, desc=str(text), unit="B", unit_scale=True) as bar,
    ):
        for size, tokens in encode_blocks(tokenizer, source):
            target.write(tokens.to(torch.uint16).numpy().tobytes())
            count += len(tokens)
            bar.update(size)
    return count


def move_tail(path: Path, target: Path, start: int) -> None:
    """Move the bytes of a file from `start` on to another file."""
    with path.open("r+b") as source, target.open("wb") as tail:
        source.seek(start)
        shutil.copyfileobj(source, tail)
        source.truncate(start)


if __name__ == "__main__":
    main()
