"""Which of two chains a peer follows: identities that cost nothing have no say. docs/security.md argues why.

Two chains are compared at their common ancestor. The identities that had passed probation there are *established*;
each weighs the tokens that it had contributed up to the ancestor, `capped`. A branch weighs what the established
identities that signed it weigh together. An identity that signed both branches counts for neither.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from enum import Enum

from peer.protocol.chain import ChainTally, tally_of
from peer.protocol.lineage import Certificate, chain_weight, heavier
from peer.protocol.manifest import TrustSpec

RECENT_LINKS = 10
"""An extension is held against the signers of so many links before it."""
UNSETTLED_LINKS = 30
"""Peers that have made so many links without most of the others continue without them."""
FINAL_LINKS = 1000
"""A peer gives up at most so many links of its own; further back only a checkpoint leads."""


class ForkVerdict(Enum):
    """What a peer does about a chain that it has verified."""

    FOLLOW = "follow"
    KEEP = "keep"
    WEIGHTLESS = "weightless"
    """The chain only extends the peer's own, but too few of those who were there signed it."""


@dataclass(frozen=True, kw_only=True)
class ForkRule:
    """Compares chains of one run.

    Attributes:
        probation_rounds: committed rounds after which an identity is established. Of an ancestor with fewer than
            three times as many links, a third of them.
        private: peers know each other: the chain with more committed tokens wins.
    """

    probation_rounds: int = 10
    private: bool = False

    @classmethod
    def of(cls, trust: TrustSpec) -> ForkRule:
        """The rule of a run."""
        return cls(probation_rounds=trust.probation_rounds, private=trust.mode == "private")

    def established(self, ancestor: Sequence[Certificate]) -> dict[str, int]:
        """Who has a say about what follows these links, and the tokens that each has contributed; no identity at
        genesis.
        """
        return self._contributed(tally_of(ancestor))

    def _contributed(self, tally: ChainTally, there: Set[str] | None = None) -> dict[str, int]:
        needed = max(1, min(self.probation_rounds, tally.links // 3))
        return {
            peer_id: tally.tokens[peer_id]
            for peer_id in (tally.rounds if there is None else there)  # few, where a chain has named many
            if tally.rounds[peer_id] >= needed
        }

    def judge(
        self, ancestor: Sequence[Certificate], own: Sequence[Certificate], other: Sequence[Certificate]
    ) -> ForkVerdict:
        """Whether a peer leaves its branch for the other one.

        Args:
            ancestor: the links from genesis that both chains share.
            own, other: what follows on each; verified. `own` is empty where the other chain extends the peer's own.
        """
        if not other:
            return ForkVerdict.KEEP
        if self.private:
            return self._by_tokens(own, other)
        if len(own) > FINAL_LINKS:
            return ForkVerdict.KEEP
        if not own:
            return self._extends(ancestor, other)
        weights = capped(self.established(ancestor))
        mine, theirs = signers(own), signers(other)
        kept = sum(weights.get(peer_id, 0) for peer_id in mine - theirs)
        offered = sum(weights.get(peer_id, 0) for peer_id in theirs - mine)
        if kept == offered == 0:
            return ForkVerdict.KEEP  # no one has a say: a peer stays where it took part
        first = (offered, other[0].link.id, kept, own[0].link.id)
        return ForkVerdict.FOLLOW if heavier(*first) else ForkVerdict.KEEP

    def carried(self, chain: Sequence[Certificate], known: int, *, forked: bool = False) -> int:
        """How far a chain holds: true links lend nothing to forged ones that follow them.

        Step by step, the next links hold that enough of the established weight of the last `RECENT_LINKS` has signed.

        Args:
            chain: from genesis, verified.
            known: so many of its links need no support. At genesis the first one needs none.
            forked: the peer has left the chain there: the first step is held against those that signed what follows,
                later ones against the branch alone.

        Returns:
            The number of links that hold, at least `known`.
        """
        if self.private:
            return len(chain)
        held = known = min(len(chain), max(known, 1))
        tally, first = tally_of(chain[:held]), known if forked else 0
        recent = deque(chain[max(first, held - RECENT_LINKS) : held], RECENT_LINKS)
        while True:  # a long chain lies in a file: each of its links is read twice
            there = signers(chain[known:]) if forked and held == known else listed(recent)
            weights = capped(self._contributed(tally, there))
            step = _first_support(weights, chain[held:]) if weights else 0
            if not step:
                return held
            for certificate in chain[held : held + step]:
                tally.add([certificate])
                recent.append(certificate)
            held += step

    def followed(self, ancestor: Sequence[Certificate], signed: Set[str]) -> bool:
        """Whether a peer without links of its own follows what these have signed: enough of the established that were
        there last.
        """
        if self.private or not ancestor:
            return True
        weights = capped(self._contributed(tally_of(ancestor), listed(ancestor[-RECENT_LINKS:])))
        return bool(weights) and _support(weights, signed)

    def settled(self, chain: Sequence[Certificate], known: int) -> int:
        """How many links of a chain from genesis no other branch is likely to displace: wherever one may leave it,
        those who have signed what follows hold more than half of the `capped` weight of the last `RECENT_LINKS` before.

        Args:
            known: so many are settled.
        """
        if self.private:
            return len(chain)
        known = max(known, len(chain) - UNSETTLED_LINKS)
        signed = {peer_id: place for place in range(known, len(chain)) for peer_id in chain[place].signatures}
        tally, recent = tally_of(chain[:known]), deque(chain[max(0, known - RECENT_LINKS) : known], RECENT_LINKS)
        for place in range(known, len(chain)):
            weights = capped(self._contributed(tally, listed(recent)))
            behind = sum(weight for peer_id, weight in weights.items() if signed.get(peer_id, -1) >= place)
            if weights and 2 * behind <= sum(weights.values()):
                return place
            tally.add([chain[place]])
            recent.append(chain[place])
        return len(chain)

    def resumed(
        self, ancestor: Sequence[Certificate], own: Sequence[Certificate], other: Sequence[Certificate],
        there: Set[str],
    ) -> bool:  # fmt: skip
        """Whether those that made a branch went back together and made another one, as peers do that all crash at once
        and resume from older files: wherever the branch stood, the signers of what the other one is longer by, of which
        only those count that say that they are there now, hold more than half of the `capped` weight of the last
        `RECENT_LINKS` before. What else they have signed may be of a branch that they gave up.

        Args:
            ancestor, own, other: as of `judge`.
            there: who announces itself on the other branch, further than this one goes.
        """
        signed = signers(other[len(own) :]) & there
        if not signed or not 0 < len(own) <= FINAL_LINKS:
            return False
        tally, recent = tally_of(ancestor), deque(ancestor[-RECENT_LINKS:], RECENT_LINKS)
        for certificate in own:
            tally.add([certificate])
            recent.append(certificate)
            weights = capped(self._contributed(tally, listed(recent)))
            if 2 * sum(weight for peer_id, weight in weights.items() if peer_id in signed) <= sum(weights.values()):
                return False
        return True

    def _extends(self, ancestor: Sequence[Certificate], other: Sequence[Certificate]) -> ForkVerdict:
        followed = not ancestor or self.followed(ancestor, signers(other))
        return ForkVerdict.FOLLOW if followed else ForkVerdict.WEIGHTLESS

    @staticmethod
    def _by_tokens(own: Sequence[Certificate], other: Sequence[Certificate]) -> ForkVerdict:
        if not own:
            return ForkVerdict.FOLLOW
        first = (chain_weight(other), other[-1].link.id, chain_weight(own), own[-1].link.id)
        return ForkVerdict.FOLLOW if heavier(*first) else ForkVerdict.KEEP


def capped(weights: Mapping[str, int]) -> dict[str, int]:
    """Weights of which the largest, if they hold too much, are cut to as much as half of themselves.

    Of four identities or more none shall hold more than a third of the whole, of fewer none more than half: so that
    the others can continue without it. A cut that went further would let many small identities outweigh a large one.
    """
    first, second, *_ = [*sorted(weights.values(), reverse=True), 0, 0]
    rest = sum(weights.values()) - first
    cap = min(rest // 2, rest - second) if len(weights) > 3 else rest
    return {peer_id: min(weight, max(cap, -(-weight // 2))) for peer_id, weight in weights.items()}


def _support(weights: Mapping[str, int], signed: Set[str]) -> bool:
    """Whether the signers hold over two fifths of the `capped` weight, which takes over a quarter of the tokens."""
    return 5 * sum(weight for peer_id, weight in weights.items() if peer_id in signed) > 2 * sum(weights.values())


def _first_support(weights: Mapping[str, int], links: Iterable[Certificate]) -> int:
    """Of how many of these links the signers together hold enough; 0: not even those of all."""
    signed = set[str]()
    for count, certificate in enumerate(links, 1):
        signed |= certificate.signatures.keys()
        if _support(weights, signed):
            return count
    return 0


def listed(links: Iterable[Certificate]) -> set[str]:
    """The members of the rosters of these links."""
    return {member.peer_id for certificate in links for member in certificate.link.roster}


def signers(branch: Iterable[Certificate]) -> set[str]:
    """Whose valid signatures the (checked) certificates of a branch carry."""
    return {peer_id for certificate in branch for peer_id in certificate.signatures}

