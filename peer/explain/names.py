"""Peers by the names that people know them by, in texts that came over the network too."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping

from peer.outer.record import RoundRecord
from peer.printable import printable
from peer.telemetry.console import short_id

_PEER_ID = re.compile(r"\b(?:12D3KooW|Qm)[1-9A-HJ-NP-Za-km-z]{40,60}\b")


class Names:
    """The name of each peer: the nickname alone where only one peer has it, the end of the id where none is known.

    Args:
        nicknames: by peer id; what records say goes before.
    """

    def __init__(self, nicknames: Mapping[str, str] | None = None) -> None:
        self._nicknames = dict(nicknames or {})
        self._shared: set[str] = set()
        self.learn(())

    def learn(self, records: Iterable[RoundRecord]) -> None:
        """Take over the names in these records."""
        for record in records:
            self._nicknames.update(record.nicknames)
        counts = Counter(self._nicknames.values())
        self._shared = {name for name, count in counts.items() if count > 1}

    def of(self, peer_id: str) -> str:
        """`alpha`, `alpha XYZ123` where two are called so, or `XYZ123`."""
        nickname = self._nicknames.get(peer_id)
        if nickname is None:
            return printable(short_id(peer_id))
        return printable(f"{nickname} {short_id(peer_id)}" if nickname in self._shared else nickname)

    def full(self, peer_id: str) -> str:
        """`alpha XYZ123`, or `XYZ123`."""
        nickname = self._nicknames.get(peer_id)
        return printable(f"{nickname} {short_id(peer_id)}" if nickname else short_id(peer_id))

    def among(self, peer_ids: Iterable[str]) -> str:
        """`alpha, bravo and charlie`."""
        names = [self.of(peer_id) for peer_id in peer_ids]
        return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)

    def within(self, text: str) -> str:
        """The text with names in place of peer ids, and nothing in it that a terminal would obey."""
        return printable(_PEER_ID.sub(lambda match: self.of(match[0]), text))
