"""Converts text to tokens and back: bytes, or GPT-2's byte-pair encoding."""

import io
import re
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, Protocol

import torch
from torch import Tensor

BLOCK = 1 << 20  # number of bytes that are encoded at a time
HUB = "openai-community/gpt2"
# The names of GPT-2's vocabulary and merges: in transformers, and from OpenAI.
FILES = (("vocab.json", "merges.txt"), ("encoder.json", "vocab.bpe"))

# GPT-2 always splits a text between a character that is no white space and a following blank or newline, and between a
# letter and a digit. In UTF-8 such a position never lies inside a character, since the next byte is ASCII.
WIDE_SPACES = b"".join(b"(?<!%b)" % chr(code).encode() for code in range(0x80, 0x3001) if chr(code).isspace())
LAST_CUT = re.compile(rb".*(?:[!-~\x80-\xff]" + WIDE_SPACES + rb"(?=[ \n])|[A-Za-z](?=[0-9]))", re.DOTALL)


class Tokenizer(Protocol):
    """Converts text to tokens and back."""

    vocab_size: int

    def encode(self, text: bytes | bytearray) -> Tensor:
        """The tokens of a text: 1D, uint8 or uint16."""
        ...

    def last_cut(self, text: bytearray, start: int) -> int:
        """The last position from `start` on at which a text can be split without changing its tokens; 0 if none."""
        ...

    def decode(self, tokens: list[int]) -> str: ...


class Bytes:
    """A tokenizer for which every byte of the text is a token."""

    vocab_size = 256

    def encode(self, text: bytes | bytearray) -> Tensor:
        return torch.frombuffer(bytearray(text), dtype=torch.uint8) if text else torch.empty(0, dtype=torch.uint8)

    def last_cut(self, text: bytearray, start: int) -> int:
        return len(text)

    def decode(self, tokens: list[int]) -> str:
        return bytes(tokens).decode(errors="replace")


class GPT2:
    """GPT-2's byte-pair encoding of UTF-8 text, computed by the library `tokenizers`.

    Special tokens are not recognized in text: `<|endoftext|>` is encoded like any other text.

    Args:
        vocab: Folder with `vocab.json` and `merges.txt`, or OpenAI's `encoder.json` and `vocab.bpe`; None
            downloads them.
    """

    def __init__(self, vocab: str | None = None) -> None:
        try:
            from tokenizers import ByteLevelBPETokenizer
        except ImportError:
            raise ImportError("tokenizer=gpt2 needs the package tokenizers: pip install tokenizers") from None
        vocabulary, merges = vocabulary_files(Path(vocab).expanduser() if vocab else download())
        self._bpe = ByteLevelBPETokenizer(str(vocabulary), str(merges))
        self.vocab_size = self._bpe.get_vocab_size()
        if (largest := max(self._bpe.get_vocab().values(), default=0)) > 65_535:
            raise ValueError(
                f"{vocabulary} has the token {largest}, but uint16 ends at 65535: use a smaller vocabulary."
            )

    def encode(self, text: bytes | bytearray) -> Tensor:
        return torch.tensor(self._bpe.encode(text.decode(errors="replace")).ids, dtype=torch.uint16)

    def last_cut(self, text: bytearray, start: int) -> int:
        cut = LAST_CUT.match(text, max(0, start - 1))
        return cut.end() if cut else 0

    def decode(self, tokens: list[int]) -> str:
        return self._bpe.decode(tokens, skip_special_tokens=False)


def load_tokenizer(name: str, vocab: str | None = None) -> Tokenizer:
    """Make the tokenizer `bytes` or `gpt2`; `vocab` is the folder of the files for `gpt2`."""
    if name == "bytes":
        return Bytes()
    if name == "gpt2":
        return GPT2(vocab)
    raise ValueError(f"tokenizer={name!r} must be bytes or gpt2.")


def vocabulary_files(folder: Path) -> tuple[Path, Path]:
    """The paths of the vocabulary and the merges in a folder, under either pair of names."""
    for names in FILES:
        vocabulary, merges = (folder / name for name in names)
        if vocabulary.is_file() and merges.is_file():
            return vocabulary, merges
    pairs = " or ".join(" and ".join(names) for names in FILES)
    raise ValueError(f"vocab={folder} has no vocabulary: expected a folder with {pairs}.")


def download() -> Path:
    """The folder of GPT-2's files in the cache of `huggingface_hub`; the first call downloads them."""
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(HUB, allow_patterns=FILES[0]))
    except OSError as error:
        raise ValueError(
            f"tokenizer=gpt2 needs the vocabulary of {HUB}, which cannot be downloaded ({type(error).__name__}): put "
            f"its {' and '.join(FILES[0])} into a folder and name it as vocab (data.vocab in training)."
        ) from error


def encode_blocks(tokenizer: Tokenizer, file: BinaryIO, block: int = BLOCK) -> Iterator[tuple[int, Tensor]]:
    """Encode a file in pieces; yields for each the number of bytes and the tokens, which join to those of the text."""
    rest = bytearray()
    while data := file.read(block):
        searched = len(rest)
        rest += data
        if cut := tokenizer.last_cut(rest, searched):
            yield cut, tokenizer.encode(rest[:cut])
            del rest[:cut]
    yield len(rest), tokenizer.encode(rest)


def encode(tokenizer: Tokenizer, text: bytes | bytearray) -> Tensor:
    """Encode a text: 1D, uint8 or uint16. Besides the tokens only one piece is in memory."""
    return torch.cat([tokens for _, tokens in encode_blocks(tokenizer, io.BytesIO(text))])
