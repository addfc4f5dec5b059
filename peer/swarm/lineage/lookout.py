"""Where the others are, after this machine has slept or has lost them: what the last group knows first."""

from __future__ import annotations

import asyncio
import contextlib
import random

from peer.outer.round import RoundAborted
from peer.swarm.catchup.fork_choice import ForkChoice
from peer.swarm.catchup.late_commits import NoAnswerError, find_continuation
from peer.swarm.group.membership import Membership
from peer.swarm.net.directory import Directory
from peer.swarm.net.node import Node


class Lookout:
    """Looks for others that are ahead, and gives what it finds to the fork choice."""

    def __init__(
        self, node: Node, directory: Directory, membership: Membership, fork_choice: ForkChoice, rng: random.Random
    ) -> None:
        self._node, self._directory, self._membership = node, directory, membership
        self._fork_choice, self._rng = fork_choice, rng
        self._looked_back = False
        self._reading: asyncio.Future[None] | None = None

    async def look_back(self) -> None:
        """Ask the last group once whether it continued, after a suspend, or if this machine has lost the others."""
        looked, self._looked_back = self._looked_back, not self._directory.fresh
        if self._looked_back and not looked:
            await self._ask_company()

    async def look_around(self) -> None:
        """Look for others before a group is sought. A peer with a persistent group does not wait for the directory.

        Raises:
            RoundAborted: others are ahead, as after a suspend: at its old position this peer would find only other
                suspended ones, and wait for one of them.
        """
        if self._directory.peers and self._directory.fresh:
            return
        await self._ask_company()
        if not self._fork_choice.claims.donors():
            if company := self._membership.company:  # they may be there, whatever the directory shows
                if self._reading is None or self._reading.done():
                    self._reading = self._node.spawn(self._directory.refresh())
                for peer_id in company:
                    self._membership.expect(peer_id)
            elif not self._directory.peers:
                await self._directory.refresh()
                await self._fork_choice.claims.look_around()
        if donors := self._fork_choice.claims.donors():
            raise RoundAborted("match", f"{donors[0]} is on a heavier lineage", donors[0], behind=True)

    async def _ask_company(self) -> None:
        """The last group answers at once; reading the directory takes seconds if one of its nodes is suspended."""
        timing, fork_choice = self._node.timing, self._fork_choice
        since_s = self._node.clock() - fork_choice.caught_up_at
        if not fork_choice.local_state().valid or since_s < timing.caught_up_s:
            return
        with contextlib.suppress(NoAnswerError):
            missed = await find_continuation(
                fork_choice.fetcher, self._membership.company, fork_choice.local_state, self._rng,
                timing.look_around_s,
            )  # fmt: skip
            if missed is not None:
                fork_choice.claims.offer(*missed)
