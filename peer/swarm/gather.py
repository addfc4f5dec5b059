"""The arithmetic of a gather round: this peer's whole payload goes to all, and everybody aggregates all of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from peer.outer.compress.base import Payload
from peer.outer.compress.feedback import Encoder
from peer.outer.gather import Gathered, Gathering, PartError
from peer.outer.recipes import Recipe
from peer.outer.record import MAX_DROPS, Drop
from peer.outer.round import Due, Exchanged, Group, RoundAborted
from peer.outer.state import OuterState
from peer.protocol.identity import Identity
from peer.protocol.statements import Leaves
from peer.swarm.inbox import Session
from peer.swarm.seals import Kept, MalformedError
from peer.swarm.work import Contribute, Produced, Work, named


class GatherWork(Work):
    """What a recipe makes of whole payloads, and what is fed back of this peer's losses.

    Args:
        recipe: error feedback.
        numel: elements of the outer state.
        identity: signs what this peer sends.
    """

    def __init__(self, recipe: Recipe, numel: int, identity: Identity) -> None:
        super().__init__(identity)
        self._feedback, self._numel = recipe.feedback, numel
        self._encoder: Encoder | None = None

    def feedbacks(self) -> Sequence[Encoder]:
        """See `Work.feedbacks`."""
        return [] if self._encoder is None else [self._encoder]

    def contribution(self, due: Due, state: OuterState) -> Contribute:
        """See `Work.contribution`: the one slice is the whole."""

        def work() -> bytes:
            if self._encoder is None:
                assert isinstance(state.compressor, Gathering), f"{state.compressor.name}: reduced, not gathered"
                self._encoder = Encoder(state.compressor.codec, self._feedback, self._numel)
            return state.encode_whole(due.snapshot, self._encoder)

        async def encode(start: int, stop: int, leaves: Leaves) -> bytes:  # noqa: ARG001
            assert (start, stop) == (0, self._numel), f"[{start}, {stop}) is not the whole of {self._numel}"
            return await self.in_thread(work)

        return encode

    async def produce(
        self, session: Session, group: Group, contribute: Contribute, keep: bool,  # noqa: ARG002
        on_signed: Callable[[Kept], None],
    ) -> Produced:  # fmt: skip
        """Encode this peer's contribution, and sign it; see `Work.produce`. There is nothing to audit."""
        sent = {peer_id: Leaves() for peer_id in session.order}  # nobody sends anything to this peer alone
        whole = memoryview(await contribute(0, self._numel, sent[group.me]))
        outputs, start = Leaves(), 0
        for index, size in enumerate(session.unit_bytes(session.me)):
            unit = whole[start : start + size]
            await self.in_thread(outputs.add, unit)
            start += size
            session.own_reduced[index].set_result(unit)
        shown = await self.sign(session, sent, outputs, ())
        on_signed(shown)
        session.own_seal.set_result(shown.seal)
        return Produced(whole)

    async def preview(self, session: Session, state: OuterState) -> str | None:  # noqa: ARG002
        """See `Work.preview`: nothing can be aggregated before all payloads are there."""
        return None

    async def finish(
        self, session: Session, group: Group, parts: Sequence[Payload], own: Produced, state: OuterState  # noqa: ARG002
    ) -> Exchanged:
        """See `Work.finish`."""
        weights = [member.tokens for member in group.members]
        try:
            update = await self.in_thread(state.update_of, parts, weights)
        except PartError as error:
            raise MalformedError(f"malformed contribution: {error}", session.order[error.place]) from None
        except ValueError as error:  # a gate dropped everybody, or the aggregate left fp32's range
            raise RoundAborted("exchange", f"no aggregate: {error}") from None
        assert isinstance(update, Gathered)
        drops = (
            Drop(peer_id=session.order[place], slices=1, of=1, reason=named(reason, session.order))
            for place, reason in update.dropped.items()
        )
        return Exchanged(update, update.cosine, tuple(drops)[:MAX_DROPS])
