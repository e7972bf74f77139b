"""Runs a program on a pseudo-terminal, reads its output and sends it keys."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import termios
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Self

ENTER, DOWN, UP, CLEAR = "\r", "\x1b[B", "\x1b[A", "\x15"
_CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b[()][A-Z0-9]|\r")


class Terminal:
    """A context that runs a program on a pseudo-terminal of 200 columns.

    Args:
        command: the program and its arguments.
        folder: its working folder.
        patience: seconds to wait for expected output.
    """

    def __init__(self, command: Sequence[str], folder: Path, patience: float = 60.0) -> None:
        self.command, self.folder, self.patience = command, folder, patience
        self.printed = ""  # without control sequences
        self._seen = 0

    def __enter__(self) -> Self:
        self._master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 60, 200, 0, 0))
        # There is no terminal to answer requests for the cursor's position.
        environment = os.environ | {"TERM": "xterm", "PROMPT_TOOLKIT_NO_CPR": "1", "COLUMNS": "200"}
        self._process = subprocess.Popen(
            self.command,
            cwd=self.folder,
            env=environment,
            stdin=slave,
            stdout=slave,
            stderr=slave,
            start_new_session=True,
        )
        os.close(slave)
        return self

    def __exit__(self, *error: object) -> None:
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()
        os.close(self._master)

    def expect(self, text: str) -> None:
        """Reads until `text` occurs in output after the last expected text."""
        end = time.monotonic() + self.patience
        while (at := self.printed.find(text, self._seen)) < 0:
            assert self._read(end - time.monotonic()), f"{text!r} does not come after {self.printed[-2000:]}"
        self._seen = at + len(text)

    def type(self, keys: str) -> None:
        """Presses keys."""
        os.write(self._master, keys.encode())

    def answer(self, question: str, keys: str = ENTER) -> None:
        """Waits for a question and presses keys."""
        self.expect(question)
        self.type(keys)

    def exit_code(self) -> int:
        """Reads until the program ends."""
        end = time.monotonic() + self.patience
        while self._read(end - time.monotonic()):
            pass
        return self._process.wait(10)

    def _read(self, seconds: float) -> bool:
        """Reads output that comes within `seconds`; False if there is none or the program has ended."""
        if not select.select([self._master], [], [], max(0.0, seconds))[0]:
            return False
        try:
            data = os.read(self._master, 65536)
        except OSError:  # the other side is closed
            return False
        self.printed += _CONTROL.sub("", data.decode(errors="replace"))
        return bool(data)
