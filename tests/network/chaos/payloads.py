"""Encoded slices, and what is said and shown in audits, for the campaign of hostile bytes."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from peer.outer.compress.base import Payload
from peer.outer.compress.registry import compressor
from peer.protocol.evidence import Evidence
from peer.protocol.records import dump_json, parse_json
from peer.swarm.trust.verdict import RightError
from tests.network.chaos.parser import Parser
from tests.outer.reference import reduced
from tests.swarm.runs import contributions, make_state
from tests.swarm.workshop import Workshop

CODECS = ("int8", "fp32", "fp16", "bf16", "int4", "fp4", "int2", "sign")
ELEMENTS = 300


def payloads() -> list[Parser]:
    """Encoded slices of contributions and updates: whatever is accepted must be finite."""
    vector = 0.01 * torch.randn(ELEMENTS)

    def decoder(name: str) -> Callable[[bytes], Any]:
        codec = compressor(name)

        def decode(data: bytes) -> Any:
            values = codec.decode(data, ELEMENTS)
            if not bool(values.isfinite().all()) or values.shape != (ELEMENTS,):
                raise AssertionError(f"{name} let through what is not finite")
            return True

        return decode

    found = [
        Parser(f"payload {name}", decoder(name), (compressor(name).encode(vector),), share=0.3) for name in CODECS
    ]
    state = make_state(ELEMENTS)

    def update(data: bytes) -> Any:
        return state.split_update(data, [1, 1]).digest()

    whole = reduced(state, contributions(state, 2, 1), [1, 1]).payload
    return [*found, Parser("update", update, (whole,), share=0.5)]


def evidence(seed: int) -> list[Parser]:
    """What is said and shown of an honest reducer with error feedback: it must convict nobody."""
    shop = Workshop(seed, numel=1500, elements=512)
    for _ in range(4):
        roster = shop.gather(others=2)
        shop.commit(roster, shop.reduce(roster))
    document, honest = shop.evidence(shop.reduce(shop.gather(others=2)), 0)
    sizes = [len(payload) for payload in honest]

    def judged(evidence: Evidence, shown: Sequence[Payload]) -> Any:
        try:
            verdict = shop.judge.judge(evidence, shown)
        except RightError:
            return True
        raise AssertionError(f"an honest reducer is convicted: it {verdict.offence}")

    def said(data: bytes) -> Any:
        return judged(parse_json(Evidence, data), honest)

    def shown(data: bytes) -> Any:
        ends = list(itertools.accumulate(sizes))
        return judged(document, [data[end - size : end] for end, size in zip(ends, sizes, strict=True)])

    return [
        Parser("evidence", said, (dump_json(document),), share=0.2),
        Parser("what an audit shows", shown, (b"".join(honest),), share=0.1),
    ]
