"""Keeps account of what this peer has trained and the anchor does not hold yet, and of what it has handed over."""

from __future__ import annotations

from collections.abc import Sequence

from peer.link.messages import Anchor, Snapshot
from peer.link.shared_data import UsedData

MOMENTS_TOKENS = 100
"""Of a contribution of moments: few beside those of a round, which are not counted again, and enough for a roster to
scale newcomers down to their share, since no weight is below one token."""


class ContributionLedger:
    """The contributions of one peer.

    Args:
        fragments: that are synchronised by themselves.

    Attributes:
        steps: trained since the last contribution that was committed.
        outstanding: the snapshot that was handed over last, until there is a new anchor.
        armed: this process has read the newest anchor, and an agent is there to take a contribution.
        used: the data that it was trained on; rounds of the first fragment claim it.
    """

    def __init__(self, fragments: int = 1) -> None:
        self.steps = 0
        self.outstanding: int | None = None
        self.armed = True
        self.used = UsedData()
        self._sequence = 0
        self._tokens_in_base = [0] * fragments
        self._sent: int | None = 0  # the fragment that was handed over last; None: moments
        self._marked_steps = 0
        self._marked_tokens = 0

    def resume(self, steps: int, tokens: int, unsent_tokens: Sequence[int]) -> None:
        """Earlier processes have trained these, of which the anchor of each fragment lacks some."""
        self.steps, self._tokens_in_base = steps, [tokens - unsent for unsent in unsent_tokens]

    def unsent(self, tokens: int, fragment: int = 0) -> int:
        """How many of so many tokens the anchor does not hold."""
        return tokens - self._tokens_in_base[fragment]

    def all_unsent(self, tokens: int) -> list[int]:
        """As `unsent`, of each fragment."""
        return [tokens - held for held in self._tokens_in_base]

    def mark(self, tokens: int) -> None:
        """The next snapshot is of this moment."""
        self.used.mark()
        self._marked_steps, self._marked_tokens = self.steps, tokens

    def hand_over(self, fragment: int = 0) -> Snapshot:
        """The message with which the marked snapshot is handed over, or once more."""
        self._sequence += 1
        self.outstanding, self._sent = self._sequence, fragment
        tokens = max(1, self.unsent(self._marked_tokens, fragment))
        return Snapshot(sequence=self._sequence, tokens=tokens, ranges="" if fragment else self.used.claim)

    def hand_over_moments(self) -> Snapshot:
        """The message with which moments are handed over; each peer's count alike."""
        self._sequence += 1
        self.outstanding, self._sent = self._sequence, None
        return Snapshot(sequence=self._sequence, tokens=MOMENTS_TOKENS, ranges="")

    @property
    def sent(self) -> int | None:
        """The fragment of the outstanding snapshot; None if it is of moments."""
        return None if self.outstanding is None else self._sent

    def is_in(self, anchor: Anchor) -> bool:
        """Whether the outstanding snapshot went into this anchor."""
        return anchor.contributed is not None and anchor.contributed == self.outstanding

    def settle_marked(self) -> None:
        """What was trained up to the mark is in the anchor, or will not be sent any more."""
        if self._sent == 0:
            self.used.settle()
        self.settle(self._marked_steps, self._marked_tokens)

    def settle(self, steps: int, tokens: int) -> None:
        """Nothing of so many steps since the last anchor, and of all tokens up to these, will be sent any more: of the
        fragment that was handed over last.
        """
        assert self._sent is not None
        self.steps -= steps
        self._tokens_in_base[self._sent] = tokens

    def drop(self, tokens: int) -> None:
        """Of so many tokens, those are lost that were trained since the outstanding snapshot, or since the anchor.

        The steps count: the next contribution is due when it was, and no member of the group waits for it.
        """
        self.used.drop(marked=self.sent is None)
        for fragment, held in enumerate(self._tokens_in_base):
            kept = self._marked_tokens if fragment == self.sent else held
            self._tokens_in_base[fragment] += tokens - kept
        self._marked_tokens = tokens

    def close(self) -> None:
        """There is a new anchor, and this process has read it."""
        self.outstanding = None
        self.armed = True
