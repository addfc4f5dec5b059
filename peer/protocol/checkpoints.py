"""Checkpoints: the tips that an organiser has followed live, signed. No peer goes back behind the newest one."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Annotated

from pydantic import Field

from peer.errors import ProtocolError
from peer.protocol.chain import id_of
from peer.protocol.fork_choice import ForkRule, ForkVerdict
from peer.protocol.identity import Identity
from peer.protocol.lineage import Certificate
from peer.protocol.manifest import Digest
from peer.protocol.records import Count, Seconds, dump_json, open_sealed, parse_json, seal
from peer.protocol.spec import Message

CHECKPOINT_DOMAIN = "checkpoint"


class Checkpoint(Message):
    """One tip of one run.

    Attributes:
        round: links from genesis to the tip, at least one.
        serial: grows with each checkpoint of a key; an older one never replaces a newer one.
        signed_at: wall-clock seconds, as the organiser's clock shows them.
    """

    run_id: Digest
    round: Annotated[int, Field(ge=1, lt=2**53)]
    lineage_id: Digest
    serial: Count
    signed_at: Seconds

    def on(self, chain: Sequence[Certificate], first_round: int = 0) -> bool | None:
        """Whether a chain from genesis leads through this tip; None if it is too short to tell.

        Args:
            first_round: so many of its links are left away, all before this tip.
        """
        place = self.round - 1 - first_round
        return id_of(chain, place) == self.lineage_id if place < len(chain) else None


def seal_checkpoint(identity: Identity, checkpoint: Checkpoint) -> bytes:
    """Checkpoint -> signed record bytes."""
    return seal(identity, CHECKPOINT_DOMAIN, dump_json(checkpoint))


def open_checkpoint(blob: bytes, run_id: str, keys: Collection[str]) -> tuple[str, Checkpoint]:
    """Signed record bytes -> (signer's peer id, checkpoint).

    Raises:
        ProtocolError: malformed, of another run, or not signed by one of `keys`.
    """
    signer, payload = open_sealed(CHECKPOINT_DOMAIN, blob)
    if signer not in keys:
        raise ProtocolError(f"checkpoint of {signer}, which the manifest does not name")
    checkpoint = parse_json(Checkpoint, payload)
    if checkpoint.run_id != run_id:
        raise ProtocolError(f"checkpoint of run {checkpoint.run_id[:12]}, not {run_id[:12]}")
    return signer, checkpoint


def choose(
    rule: ForkRule, newest: Checkpoint | None, ancestor: Sequence[Certificate], own: Sequence[Certificate],
    other: Sequence[Certificate],
) -> ForkVerdict:  # fmt: skip
    """`ForkRule.judge`, unless the newest checkpoint lies on one of the two chains and not on the other. One that is on
    neither decides nothing between two groups that both resumed from before it.

    A newcomer starts at the newest checkpoint or beyond it.
    """
    if newest is None or newest.round <= len(ancestor):
        return rule.judge(ancestor, own, other)
    mine, theirs = newest.on(own, len(ancestor)), newest.on(other, len(ancestor))
    if theirs:
        return ForkVerdict.FOLLOW
    newcomer = not ancestor and not own
    leaves = theirs is False and mine is not False
    return ForkVerdict.KEEP if mine or leaves or newcomer else rule.judge(ancestor, own, other)
