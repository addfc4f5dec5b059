"""G9, in this process: every parser of bytes from strangers, fed changed versions of valid input and noise.

A parser may refuse in its own way (`ProtocolError`, `UserError` where its contract says so) or return. Any other
exception is a crash, more than a second for one input is a hang, and what is signed must not be believed once it has
been changed.
"""

from __future__ import annotations

import os
import random
import signal
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.network.chaos.corpus import parsers
from tests.network.chaos.observe import process
from tests.network.chaos.parser import Parser

HANG_S = 1.0  # of processor time: a busy machine is no hang
GIVE_UP_S = 60.0
TELL_EVERY = 20_000
MAX_KEPT = 20


class HungError(BaseException):
    """Not an Exception, so that no parser can swallow it."""


@contextmanager
def watched() -> Iterator[None]:
    """Interrupts an input that never ends. In the main thread only."""

    def interrupt(*_: object) -> None:
        raise HungError

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)


def mutated(rng: random.Random, valid: bytes, other: bytes) -> bytes:
    """One to four random changes."""
    data = bytearray(valid)
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        MUTATIONS[rng.randrange(len(MUTATIONS))](rng, data, other)
    return bytes(data)


def _flip(rng: random.Random, data: bytearray, _: bytes) -> None:
    if data:
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)


def _set(rng: random.Random, data: bytearray, _: bytes) -> None:
    if data:
        data[rng.randrange(len(data))] = rng.choice((0, 0x7F, 0x80, 0xFF, rng.randrange(256), *b'"{}[],:-9e\\'))


def _cut(rng: random.Random, data: bytearray, _: bytes) -> None:
    start = rng.randrange(len(data) + 1)
    del data[start : start + rng.choice((1, 2, 8, len(data)))]


def _insert(rng: random.Random, data: bytearray, _: bytes) -> None:
    place = rng.randrange(len(data) + 1)
    data[place:place] = rng.choice(WORDS) if rng.random() < 0.7 else rng.randbytes(rng.choice((1, 4, 64)))


def _repeat(rng: random.Random, data: bytearray, _: bytes) -> None:
    start = rng.randrange(len(data) + 1)
    piece = data[start : start + rng.choice((1, 8, 64))]
    data[start:start] = piece * rng.choice((1, 2, 50))


def _splice(rng: random.Random, data: bytearray, other: bytes) -> None:
    data[rng.randrange(len(data) + 1) :] = other[rng.randrange(len(other) + 1) :]


def _number(rng: random.Random, data: bytearray, _: bytes) -> None:
    """Another number where one is."""
    digits = [place for place, byte in enumerate(data) if 48 <= byte <= 57]
    if digits:
        place = rng.choice(digits)
        data[place : place + 1] = rng.choice(NUMBERS)


MUTATIONS = (_flip, _flip, _set, _cut, _insert, _repeat, _splice, _number)
NUMBERS = (b"-1", b"0", b"1e999", b"9" * 20, b"9" * 5000, b"0.5", b"NaN", b"-0", b"18446744073709551616", b"1e-400")
WORDS = (
    b"null", b"true", b"[]", b"{}", b'""', b"NaN", b"Infinity", b"[" * 500, b'{"a":' * 200, b"\x00", b"\xff\xfe",
    b"\\ud800", b'"\\u0000"', b"&a [*a,*a]", b"!!python/object:os.system", b"<<: *a", b"ATL1", b"\n---\n", b"\xf0\x9f",
)  # fmt: skip


class Fuzzer:
    """Counts what inputs do to a parser."""

    def __init__(self) -> None:
        self.inputs: Counter[str] = Counter()
        self.accepted: Counter[str] = Counter()
        self.crashes: list[str] = []
        self.forgeries: list[str] = []
        self.slowest_s = 0.0

    def feed(self, parser: Parser, data: bytes) -> None:
        """One input."""
        self.inputs[parser.name] += 1
        began = time.thread_time()
        signal.setitimer(signal.ITIMER_REAL, GIVE_UP_S)
        try:
            meaning = parser.parse(data)
        except parser.refuses:
            meaning = None
        except (Exception, HungError) as error:
            where = traceback.format_exception_only(error)[-1].strip()
            self.crashes.append(f"{parser.name}: {where[:200]} on {data[:200]!r}")
            meaning = None
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0.0)
        took_s = time.thread_time() - began
        self.slowest_s = max(self.slowest_s, took_s)
        if took_s > HANG_S:
            self.crashes.append(f"{parser.name}: took {took_s:.1f} s on {len(data)} bytes: {data[:200]!r}")
        if meaning is not None:
            self.accepted[parser.name] += 1
            if parser.signed and meaning not in parser.meanings:
                self.forgeries.append(f"{parser.name}: {data[:200]!r}")

    def counts(self, growth_mb: float) -> dict[str, Any]:
        """So far."""
        return {
            "inputs_fuzzed": self.inputs.total(),
            "inputs_per_parser": dict(self.inputs),
            "inputs_accepted": dict(self.accepted),
            "crashes": len(self.crashes),
            "what_crashed": self.crashes[:MAX_KEPT],
            "forgeries_accepted": len(self.forgeries),
            "what_was_forged": self.forgeries[:MAX_KEPT],
            "largest_input_s": round(self.slowest_s, 3),
            "largest_fuzz_memory_growth_mb": round(growth_mb, 1),
        }


def run(
    seed: int, budget: int, *, minutes: float = 60.0, tell: Callable[[dict[str, Any]], None] = lambda _: None
) -> dict[str, Any]:
    """Feed `budget` inputs, as far as the minutes allow; -> counts. In the main thread only."""
    with tempfile.TemporaryDirectory(prefix="atoll-fuzz-") as folder:
        return _fuzz(random.Random(seed), parsers(seed, Path(folder)), budget, minutes, tell)


def _fuzz(
    rng: random.Random, kinds: list[Parser], budget: int, minutes: float, tell: Callable[[dict[str, Any]], None]
) -> dict[str, Any]:
    fuzzer = Fuzzer()
    weights = [parser.share for parser in kinds]
    me = process(os.getpid())
    assert me is not None
    for parser in kinds:  # what is never accepted as it is would be fuzzed to no effect
        for valid in parser.valid:
            assert parser.parse(valid) is not None, parser.name
    deadline, before = time.monotonic() + 60 * minutes, me.rss_bytes
    with watched():
        for count in range(budget):
            (parser,) = rng.choices(kinds, weights)
            if rng.random() < 0.1:
                data = rng.randbytes(rng.choice((0, 1, 12, 80, 300, 5000)))
            else:
                data = mutated(rng, rng.choice(parser.valid), rng.choice(parser.valid))
            fuzzer.feed(parser, data)
            if count % TELL_EVERY == TELL_EVERY - 1:
                tell(fuzzer.counts((me.rss_bytes - before) / 1e6))
                if time.monotonic() > deadline:
                    break
    return fuzzer.counts((me.rss_bytes - before) / 1e6)
