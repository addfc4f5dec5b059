"""How nodes hear of the newest checkpoint."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from peer.errors import ProtocolError, in_words
from peer.protocol.checkpoints import Checkpoint
from peer.protocol.records import checkpoints_key
from peer.swarm.catchup.chain_scout import ChainScout
from peer.swarm.catchup.newest_checkpoint import NewestCheckpoint
from peer.swarm.catchup.record_exchange import RecordExchange
from peer.swarm.net.node import Node
from peer.swarm.net.stream import StreamClosedError

log = logging.getLogger(__name__)


class CheckpointExchange(RecordExchange):
    """Keeps a node's `NewestCheckpoint` new, and gives it to others."""

    def __init__(self, node: Node, run_id: str, checkpoints: NewestCheckpoint) -> None:
        name, key = f"atoll/{run_id[:16]}/checkpoint", checkpoints_key(run_id)
        super().__init__(node, name, key, checkpoints, node.timing.checkpoint_period_s)
        self._run_id, self._checkpoints = run_id, checkpoints

    async def introduce(self, introducers: Iterable[str], scout: ChainScout) -> None:
        """Before a newcomer starts: hear of the newest checkpoint, or else where its introducers stand."""
        await self.read()
        for peer_id in introducers:
            try:
                await self.ask(peer_id)
                if self._checkpoints.newest is None:
                    chain = await scout.look(peer_id, scout.rules.most_rounds(0))
                    self._checkpoints.introduced = Checkpoint(
                        run_id=self._run_id, round=len(chain), lineage_id=chain[-1].link.id, serial=0, signed_at=0.0
                    )
            except (TimeoutError, ProtocolError, StreamClosedError) as error:
                log.info("%s has no checkpoint, and shows no chain: %s", peer_id, in_words(error))
            else:
                return
