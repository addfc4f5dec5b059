"""What others claim: which of their chains a peer looks at, and the one that it shall follow."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Iterable, Sequence
from typing import Protocol

from peer.errors import ProtocolError, in_words
from peer.protocol.chain import shared_links
from peer.protocol.fork_choice import ForkVerdict
from peer.protocol.lineage import Certificate
from peer.swarm.catchup.chain_scout import ChainScout, NoRoomError, NothingNewError
from peer.swarm.catchup.donor_requests import DonorRequests
from peer.swarm.catchup.donors import DonorQueue, helpers
from peer.swarm.catchup.patience import Patience
from peer.swarm.net.directory import Directory
from peer.swarm.net.node import Node
from peer.swarm.net.stream import StreamClosedError, StreamTimeoutError
from peer.swarm.runtime.expiring import ExpiringSet
from peer.swarm.runtime.tasks import cancel_and_wait
from peer.swarm.state.store import StateStore

log = logging.getLogger(__name__)
LOOKS_AT_ONCE = 4
OF_STRANGERS = 3
"""Looks at peers that have no say here: those that have one find a place however many strangers are silent."""
MEMBERS_OF = 32  # rounds
LINKS_A_SECOND = 100.0  # links of a donor that are turned down: to verify one takes some two milliseconds
DONOR_FAILURES = (TimeoutError, ProtocolError, StreamClosedError, NoRoomError)


class ClaimsHost(Protocol):
    """The peer that looks at them."""

    def on_answer(self, donor: str) -> None:
        """This donor answers."""

    def on_ahead(self) -> None:
        """A chain has been looked at that this peer shall follow."""


class Claims:
    """The donors of one peer: claims alone, until the scout has seen a chain.

    Attributes:
        scout: looks at chains, and knows the rule.
    """

    def __init__(
        self, node: Node, directory: Directory, requests: DonorRequests, scout: ChainScout, store: StateStore,
        host: ClaimsHost,
    ) -> None:  # fmt: skip
        self._node, self._directory, self._requests, self._store = node, directory, requests, store
        self.scout, self._host, self._queue = scout, host, DonorQueue()
        self._turned_down: ExpiringSet[str] = ExpiringSet(node.clock, node.timing.not_heavier_s)
        self._preferred: tuple[str, Sequence[Certificate]] | None = None
        self._patience = Patience(node.timing, node.clock, store.position)

    def donors(self) -> list[str]:
        """The donor whose chain has been looked at, and that this peer shall follow; empty if there is none."""
        if self._preferred is not None and not self._follows(self._preferred[1]):
            self._preferred = None
        return [] if self._preferred is None else [self._preferred[0]]

    def take(self) -> tuple[str, Sequence[Certificate]] | None:
        """That donor and its chain, to follow it now."""
        taken, self._preferred = self._preferred if self.donors() else None, None
        return taken

    def helpers(self, donor: str) -> list[str]:
        """Peers that may have the donor's snapshot too."""
        return helpers(self._directory.reachable, donor, self._queue.distrusted)

    async def ask_who_is_there(self, introducers: Iterable[str]) -> None:
        """Ask the peers whose addresses a person gave for the members of the last rounds: a newcomer asks these before
        strangers. The answer proves nothing, but a person has chosen who gives it.
        """
        start = self.scout.start()
        since = max(0, start.round - MEMBERS_OF) if start is not None else 0
        for introducer in introducers:
            self._queue.preferred.add(introducer)
            with contextlib.suppress(*DONOR_FAILURES):
                async with asyncio.timeout(self._node.timing.checkpoint_answer_s):
                    links = await self._requests.links(introducer, since, 2 * MEMBERS_OF)
                self._queue.preferred.update(*(certificate.signatures for certificate in links))

    @property
    def followed(self) -> bool:
        """Whether this peer has a state, and no peer with a say here claims to be further: what strangers claim keeps
        no newcomer from its first round.
        """
        has_say, valid = self.scout.has_say, self._store.valid and bool(self._store.history.chain)
        return valid and self.scout.start() is None and not any(map(has_say, self.names()))

    def turned_down(self, donor: str) -> bool:
        """Whether this donor has shown another chain in the last seconds, and this peer does not follow it."""
        return donor in self._turned_down

    def nudge(self, donor: str, lineage_id: str) -> None:
        """`donor` claims to be on this lineage, whatever the directory shows: the scout looks at it next."""
        if not self._store.history.leads_through_id(lineage_id):
            self._queue.nudge(donor)

    def offer(self, donor: str, chain: Sequence[Certificate]) -> bool:
        """A donor's chain from genesis, checked: this peer follows what holds of it, if the rule says so."""
        chain = self.carried(chain)
        if self._follows(chain):
            self._preferred = donor, chain
            self._host.on_ahead()
            return True
        return False

    def carried(self, chain: Sequence[Certificate], judged: int = 0) -> Sequence[Certificate]:
        """What holds of a chain; after a long time without a round, all of it."""
        return chain if self._patience.over else self.scout.carried(chain, judged)

    async def look_around(self) -> None:
        """Look at a few of the chains that others claim; `donors` keeps the outcome."""
        looks = [self.examine(donor) for donor in self.names()[:LOOKS_AT_ONCE]]
        for outcome in await asyncio.gather(*looks, return_exceptions=True):
            _raise_unexpected(outcome)

    async def scout_forever(self) -> None:
        """Look at what others claim, beside the rounds, until this is cancelled; a silent donor holds up no other."""
        looks: dict[str, asyncio.Task[None]] = {}
        try:
            while True:
                self._queue.begin()
                for donor in self.names():
                    most = LOOKS_AT_ONCE if self.scout.has_say(donor) else OF_STRANGERS
                    if donor not in looks and len(looks) < most:
                        looks[donor] = asyncio.create_task(self.examine(donor))
                await self._queue.wait(self._node.timing.recheck_s)
                for donor in [donor for donor, look in looks.items() if look.done()]:
                    look = looks.pop(donor)
                    _raise_unexpected(None if look.cancelled() else look.exception())
        finally:
            await cancel_and_wait(looks.values())

    def names(self) -> list[str]:
        """The donors to look at, best first."""
        self._patience.look(self._store.position)
        claims = self.scout.claims(self._directory.reachable, self._queue.distrusted, lost=not self._store.valid)
        return self._queue.order(claims, self.scout.has_say)

    async def examine(self, donor: str) -> None:
        """Look at one claim; `donors` keeps the outcome. A claim that is not shown is not looked at for a while."""
        self._queue.taken(donor)
        try:
            chain = await self._look(donor)
        except NothingNewError:  # this peer has moved since it chose to look
            self._queue.distrust(donor, self._node.timing.not_heavier_s)
            raise
        except ProtocolError as error:
            self.accuse(donor, str(error))
            raise
        except NoRoomError as error:  # no fault of the donor
            log.warning("%s", error)
            self._queue.distrust(donor, self._node.timing.not_heavier_s)
            raise
        except (TimeoutError, StreamClosedError) as error:
            self.left(donor, error)
            raise
        self._host.on_answer(donor)
        if not self.offer(donor, chain):
            new, timing = len(chain) - shared_links(self._store.history.chain, chain), self._node.timing
            self._queue.distrust(donor, max(timing.not_heavier_s, min(timing.distrust_s, new / LINKS_A_SECOND)))
            if new:  # else it may be ahead a moment later
                self._turned_down.add(donor)

    def left(self, donor: str, error: Exception) -> None:
        """A donor did not answer, or not to the end."""
        log.info("donor %s left: %s", donor, in_words(error))
        # its record stays for a while: asking again would spin
        timing = self._node.timing
        if isinstance(error, TimeoutError | StreamTimeoutError):
            self._queue.distrust_silent(donor, timing.silent_donor_s, timing.distrust_s)
        else:
            self._queue.distrust(donor, timing.unreachable_s)

    async def _look(self, donor: str) -> Sequence[Certificate]:
        record = self._directory.reachable.get(donor)
        return await self.scout.look(donor, record.round if record is not None else 0)

    def _follows(self, chain: Sequence[Certificate]) -> bool:
        """Whether this peer leaves its chain for another one, as both stand now."""
        own = self._store.history.chain
        if not self._store.valid and own and chain and own[-1].link.id == chain[-1].link.id:
            return True  # the same chain, whose state this peer has lost
        verdict = self.scout.judge(chain)
        return verdict is ForkVerdict.FOLLOW or (verdict is ForkVerdict.WEIGHTLESS and self._patience.over)

    def accuse(self, donor: str, why: str) -> None:
        """A donor has shown what no honest one would."""
        log.warning("%s cannot be a donor: %s", donor, why)
        self._queue.distrust(donor, self._node.timing.distrust_s)

    def undecided(self, donor: str) -> None:
        """It is unknown yet which state this donor's chain leads to."""
        self._queue.distrust(donor, self._node.timing.not_heavier_s)

    def answered(self, donor: str) -> None:
        """This donor has shown all that it claimed."""
        self._queue.answered(donor)


def _raise_unexpected(outcome: BaseException | None) -> None:
    """Raise what a look at a donor has raised, unless that look may fail so."""
    if isinstance(outcome, Exception) and not isinstance(outcome, DONOR_FAILURES):
        raise outcome
