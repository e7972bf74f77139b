"""What a rank learns from the notes of others, when it has waited for one of them in vain."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist

from lightning_zero.limits import has_ended, process_name
from lightning_zero.sharding import Board, Subject

HOSTS = ("node0", "node0", "node1", "node1")


@pytest.fixture
def boards(monkeypatch: pytest.MonkeyPatch) -> list[Board]:
    monkeypatch.setattr("lightning_zero.sharding.board._SECONDS_TO_NOTE", 0.1)
    store = dist.HashStore()
    return [Board(rank, 4, store, hosts=HOSTS) for rank in range(4)]


class DeafStore:
    """As the store of a node that is cut off: it never answers."""

    def __init__(self) -> None:
        self.asked = 0
        self.over = threading.Event()

    def check(self, keys: list[str]) -> bool:
        self.asked += 1
        self.over.wait(30.0)
        return False

    def set(self, key: str, value: str) -> None:
        self.check([key])


def test_ranks_are_named_by_node_where_there_are_several(boards: list[Board]) -> None:
    assert boards[0].describe([1, 2, 3]) == "rank 1 on node0 and ranks 2, 3 on node1"
    assert Board(0, 2, hosts=("node0", "node0")).describe([0, 1]) == "ranks 0, 1"
    boards[3].put(Subject.FAILURE, "ValueError: no")
    assert boards[0].explain() == "rank 3 on node1 failed: ValueError: no"


def test_who_waits_for_a_rank_that_waits_itself_blames_the_last_in_the_row(boards: list[Board]) -> None:
    boards[1].put(Subject.WAIT, "3")
    boards[0].put(Subject.WAIT, "1")
    assert boards[2].find_missing(0) == [3]


def test_ranks_that_wait_for_each_other_blame_nobody(boards: list[Board]) -> None:
    for rank in range(3):
        boards[rank].put(Subject.WAIT, str((rank + 1) % 4))
    assert boards[3].find_missing(0) == []


def test_who_waits_for_all_blames_those_that_noted_nothing(boards: list[Board]) -> None:
    boards[1].put(Subject.WAIT, "-")
    assert boards[0].find_missing(None) == [2, 3]


def test_a_rank_whose_process_has_ended_is_not_waited_for_and_one_that_lives_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("lightning_zero.sharding.board._SECONDS_TO_NOTE", 600.0)
    place, _, _ = process_name().rpartition(" ")
    with subprocess.Popen([sys.executable, "-P", "-c", "input()"], stdin=subprocess.PIPE) as other:
        processes = (process_name(), f"{place} {other.pid}")
        store = dist.HashStore()
        alone, first, second = (
            Board(rank, 2, store, name, (), processes) for rank, name in ((0, "a"), (0, "b"), (1, "b"))
        )
        threading.Timer(0.2, second.put, [Subject.WAIT, "0"]).start()
        assert first.find_missing(1, ended=True) == []
        assert not has_ended(processes[1])
        other.kill()  # nobody has asked for its exit code yet
        assert alone.find_missing(1, ended=True) == [1]
    assert has_ended(processes[1])
    assert not has_ended(f"another {place} {other.pid}")


def test_a_store_that_never_answers_is_asked_once(boards: list[Board], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_zero.sharding.board._SECONDS_TO_ANSWER", 0.1)
    deaf = DeafStore()
    monkeypatch.setattr(boards[2], "_store", deaf)
    started = time.monotonic()
    for _ in range(3):
        assert boards[2].explain().startswith("the store of rank 0 on node0 does not answer: that node")
    boards[2].put(Subject.FAILURE, "ValueError: no")
    assert boards[2].find_missing(0) == [0]
    assert boards[2].find_missing(None) == []
    assert time.monotonic() - started < 10.0
    assert deaf.asked == 1
    deaf.over.set()


def test_ranks_agree_where_all_give_the_same_vote(boards: list[Board], monkeypatch: pytest.MonkeyPatch) -> None:
    """And each gets the answer that another has got, also a rank that comes when the others have given up."""

    def ask(question: str, *votes: str) -> list[bool]:
        with ThreadPoolExecutor(4) as pool:
            return [*pool.map(lambda board, vote: board.agree(question, lambda: vote), boards, votes)]

    assert ask("one", "here", "here", "here", "here") == [True] * 4
    assert ask("two", "here", "here", "here", "there") == [False] * 4
    assert ask("three", "here", "here", "", "here") == [False] * 4
    monkeypatch.setattr("lightning_zero.sharding.board._SECONDS_TO_AGREE", 0.1)
    assert ask("four", "here", "here", "here") == [False] * 3
    assert not boards[3].agree("four", lambda: "here")
    not_yet = iter([None, "here"])
    assert Board(0, 1, dist.HashStore()).agree("five", lambda: next(not_yet))
    assert [Board().agree("six", lambda vote=vote: vote) for vote in ("here", "")] == [True, False]
