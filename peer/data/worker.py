"""A process that makes segments: `python -m peer.data.worker`, orders in and answers out as lines of JSON.

It imports neither torch nor transformers, reads each lane's shard in one pass as long as orders follow one another, and
ends when its trainer does.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import sys
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from peer.data.encode import TextEncoder, encoder_of
from peer.data.problems import SourceBusy
from peer.data.segments import SegmentHeader, SegmentRule, write_segment
from peer.data.shards import Problems, Shard, shard_rows, stretch_rows
from peer.errors import UserError


class Beginning(BaseModel):
    """The first line: the `TextEncoder.document`, and the headers that go to the hub."""

    encoder: dict[str, Any]
    hub_headers: dict[str, str]


class Order(BaseModel):
    """Make a segment. Orders of one lane are worked off one after the other."""

    model_config = ConfigDict(frozen=True)
    number: int
    lane: int
    path: str
    shard: Shard
    rule: SegmentRule
    cursor: int


class Answer(BaseModel):
    """Of an order: the header, or why there is none now (`busy`), or why there cannot be one (`failed`)."""

    number: int
    header: SegmentHeader | None = None
    busy: str | None = None
    failed: str | None = None


class Maker(threading.Thread):
    """Works off the orders of one lane."""

    def __init__(self, encoder: TextEncoder, headers: Mapping[str, str], answers: queue.SimpleQueue[Answer]) -> None:
        super().__init__(daemon=True)
        self.orders: queue.SimpleQueue[Order] = queue.SimpleQueue()
        self._encoder, self._headers, self._answers = encoder, headers, answers
        self._rows: Iterator[tuple[Any, int]] | None = None
        self._at: tuple[Shard, SegmentRule, int | None] | None = None
        self._problems = Problems()

    def run(self) -> None:
        while True:
            self._answers.put(self._answer(self.orders.get()))

    def _read(self, order: Order) -> Iterator[tuple[Any, int]]:
        rule, problems = order.rule, self._problems
        if rule.stretch is not None:
            (file,), folder = order.shard, Path(order.path).parent
            return stretch_rows(file, rule.column, rule.stretch, self._headers, problems, folder)
        return shard_rows(order.shard, rule.column, order.cursor, self._headers, problems)

    def _answer(self, order: Order) -> Answer:
        try:
            follows = self._at == (order.shard, _any_owner(order.rule), order.cursor)
            if self._rows is None or not follows or order.rule.stretch is not None:
                self._problems = Problems()
                self._rows = self._read(order)
            header = write_segment(Path(order.path), self._rows, order.rule, self._encoder, self._problems)
            self._at = (order.shard, _any_owner(order.rule), header.next)
            return Answer(number=order.number, header=header)
        except SourceBusy as error:
            self._rows = None
            return Answer(number=order.number, busy=str(error))
        except UserError as error:
            return Answer(number=order.number, failed=f"{error.what}; {error.hint}")
        except Exception as error:
            self._rows = None
            return Answer(number=order.number, failed=f"{type(error).__name__}: {error}")


def _any_owner(rule: SegmentRule) -> SegmentRule:
    """What decides which rows follow."""
    return rule.model_copy(update={"passed_over": False})


def main() -> None:
    """Until standard input ends."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # a terminal sends them to all; the trainer ends this process
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # lanes are threads already
    beginning = Beginning.model_validate_json(sys.stdin.readline())
    encoder = encoder_of(beginning.encoder)
    answers: queue.SimpleQueue[Answer] = queue.SimpleQueue()
    threading.Thread(target=_write, args=(answers,), daemon=True).start()
    makers: dict[int, Maker] = {}
    for line in sys.stdin:
        order = Order.model_validate(json.loads(line))
        if order.lane not in makers:
            makers[order.lane] = Maker(encoder, beginning.hub_headers, answers)
            makers[order.lane].start()
        makers[order.lane].orders.put(order)
    os._exit(0)


def _write(answers: queue.SimpleQueue[Answer]) -> None:
    try:
        while True:
            sys.stdout.write(answers.get().model_dump_json() + "\n")
            sys.stdout.flush()
    except OSError:
        os._exit(0)


if __name__ == "__main__":
    main()
