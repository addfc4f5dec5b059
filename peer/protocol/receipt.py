"""Receipts: a signed statement of what one peer has contributed to a run, with the certified rounds that prove it.

The file has one line of JSON for the statement and one for each certificate, so that each can be read by eye.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from typing import Literal

from peer.errors import ProtocolError
from peer.protocol.identity import Identity, verify
from peer.protocol.lineage import Certificate, SignatureHex
from peer.protocol.manifest import Digest, PeerIdText, Spec
from peer.protocol.records import Count, Seconds, SpecT, dump_json, parse_json

RECEIPT_DOMAIN = "receipt"


class Statement(Spec):
    """What a receipt says.

    Attributes:
        rounds, tokens: committed rounds that hold a contribution of the peer, and its tokens in them.
        of_rounds, of_tokens: those of the whole chain.
        lineage_id: of the chain's tip.
        certificates: SHA-256 of the lines that follow.
        signed_at: wall-clock seconds.
    """

    kind: Literal["atoll receipt 1"] = "atoll receipt 1"
    run_id: Digest
    peer_id: PeerIdText
    rounds: Count
    tokens: Count
    of_rounds: Count
    of_tokens: Count
    lineage_id: Digest
    certificates: Digest
    signed_at: Seconds


class SignedStatement(Spec):
    """The first line of a receipt."""

    statement: Statement
    signer: PeerIdText
    signature: SignatureHex


def certificate_lines(chain: Iterable[Certificate], peer_id: str) -> Iterator[bytes]:
    """A line for each round that holds a contribution of the peer. Raises ProtocolError at one that is not signed."""
    for certificate in chain:
        if certificate.link.place(peer_id) is not None:
            certificate.check()
            yield dump_json(certificate) + b"\n"


def sign_receipt(identity: Identity, statement: Statement) -> bytes:
    """The first line."""
    signature = identity.sign(RECEIPT_DOMAIN, dump_json(statement)).hex()
    return dump_json(SignedStatement(statement=statement, signer=identity.peer_id, signature=signature)) + b"\n"


def check_receipt(lines: Iterator[bytes]) -> SignedStatement:
    """The statement of a receipt, all of which has been checked.

    Raises:
        ProtocolError: says what does not hold.
    """
    signed = _canonical(SignedStatement, next(lines, b""), "the statement")
    statement = signed.statement
    if not verify(signed.signer, RECEIPT_DOMAIN, dump_json(statement), bytes.fromhex(signed.signature)):
        raise ProtocolError(f"the statement is not what {signed.signer} has signed")
    digest, rounds, tokens, last = hashlib.sha256(), 0, 0, -1
    for number, line in enumerate(lines, 2):
        digest.update(line)
        certificate = _canonical(Certificate, line, f"line {number}")
        link = certificate.link
        place = link.place(statement.peer_id)
        if link.run_id != statement.run_id or place is None or link.round <= last:
            raise ProtocolError(f"line {number} is no further round of this peer in this run")
        certificate.check()
        rounds, tokens, last = rounds + 1, tokens + link.roster[place].tokens, link.round
    if digest.hexdigest() != statement.certificates:
        raise ProtocolError("the certificates are not those that the statement was signed with")
    if (rounds, tokens) != (statement.rounds, statement.tokens):
        raise ProtocolError(f"the certificates hold {rounds} rounds and {tokens} tokens; the statement says "
                            f"{statement.rounds} and {statement.tokens}")  # fmt: skip
    return signed


def _canonical(schema: type[SpecT], line: bytes, what: str) -> SpecT:
    parsed = parse_json(schema, line)
    if dump_json(parsed) + b"\n" != line:
        raise ProtocolError(f"{what} is not written as it was signed")
    return parsed
