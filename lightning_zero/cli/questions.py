"""Questions of a command, answered by its flags, by a person at a terminal, or by defaults.

If a flag is given, its question is not asked. In a terminal a person answers the other questions, with the default
preselected. Without a terminal the defaults are used, and a question without a default needs its flag.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class MissingAnswerError(ValueError):
    """A question has no answer; the message names its flag."""


@dataclass(frozen=True)
class Question(Generic[T]):
    """A question to a user.

    Attributes:
        flag: the flag that answers it, such as "--gpu".
        text: the question.
        read: converts an answer to a value, or raises a :class:`ValueError` that says what was expected.
        default: the default answer; None: there is none.
        choices: by possible answer: the text that a person sees; empty: any answer is possible.
        is_path: whether the answer is completed with names of files.
    """

    flag: str
    text: str
    read: Callable[[str], T]
    default: str | None = None
    choices: Mapping[str, str] | None = None
    is_path: bool = False


class Answers:
    """Answers from flags, and defaults for the rest.

    Args:
        given: what flags say, by their names; None: nothing.
    """

    interactive = False

    def __init__(self, given: Mapping[str, object]) -> None:
        self.given = {flag: str(value) for flag, value in given.items() if value is not None}

    def ask(self, question: Question[T]) -> T:
        """Finds the answer.

        Raises:
            MissingAnswerError: there is none.
            ValueError: the answer is not one of the question's.
        """
        answer = self.given.get(question.flag)
        if answer is None:
            answer = self._find(question)
        return question.read(answer)

    def _find(self, question: Question[Any]) -> str:
        if question.default is None:
            raise MissingAnswerError(f"{question.flag} is needed: {question.text}")
        return question.default


class TerminalAnswers(Answers):
    """Answers from flags, and from a person for the rest.

    Raises:
        ImportError: questionary is not installed.
        KeyboardInterrupt: the person gave up.
    """

    interactive = True

    def __init__(self, given: Mapping[str, object]) -> None:
        super().__init__(given)
        import questionary

        self.questionary = questionary

    def _find(self, question: Question[Any]) -> str:
        ask = self.questionary
        if question.choices:
            choices = [ask.Choice(title, value) for value, title in question.choices.items()]
            return str(ask.select(question.text, choices, default=question.default).unsafe_ask())
        kind = ask.path if question.is_path else ask.text
        asked = kind(
            question.text,
            default=question.default or "",
            validate=lambda answer: _judge(question, answer),
            validate_while_typing=False,
        )
        return str(asked.unsafe_ask())


def _judge(question: Question[Any], answer: str) -> bool | str:
    """Whether an answer can be read, or what is wrong with it."""
    try:
        question.read(answer)
    except ValueError as error:
        return str(error)
    return True


def whole(text: str) -> int:
    """Reads a number of things.

    Raises:
        ValueError: it is none, or less than 1.
    """
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if number < 1 or not number.is_integer():
        raise ValueError(f"{text!r} is not a whole number of at least 1")
    return int(number)
