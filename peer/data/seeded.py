"""What of a text falls to a peer by its identity, without a word to the others."""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Sequence

POINTS = 8  # of a peer on the circle of shards
FILES_FOR_EACH = 8  # peers; where there are fewer, files are shared out segment by segment


class SeededShards:
    """The shards that fall to a peer by its identity: each peer has points on the circle of shards, which differ from
    epoch to epoch, and the shards from each of them up to the next point of any peer. Peers that see the same others
    read different shards; one that leaves or joins changes only its own.

    Args:
        run_seed: of the manifest.
        peer_id: of this peer.
    """

    def __init__(self, run_seed: int, peer_id: str, shards: int) -> None:
        self.run_seed, self._peer_id, self._shards = run_seed, peer_id, shards
        self.peers: tuple[str, ...] = (peer_id,)
        self._epoch, self._read = 0, set[int]()
        self._own: tuple[tuple[str, ...], int, list[int]] = ((), -1, [])

    def next(self) -> tuple[int, int]:
        """(epoch, shard): the next one of this peer; of its next epoch once it has read all of its own."""
        while True:
            for shard in self._arcs():
                if shard not in self._read:
                    self._read.add(shard)
                    return self._epoch, shard
            self._epoch, self._read = self._epoch + 1, set()

    def _arcs(self) -> list[int]:
        peers = tuple(sorted({*self.peers, self._peer_id}))
        if self._own[:2] != (peers, self._epoch):
            self._own = (peers, self._epoch, self._computed(peers))
        return self._own[2]

    def _computed(self, peers: Sequence[str]) -> list[int]:
        points = sorted((self._point(peer_id, number), peer_id) for peer_id in peers for number in range(POINTS))
        places = [place for place, _ in points]
        owner = [points[bisect_right(places, shard) - 1][1] for shard in range(self._shards)]
        mine = [shard for shard, peer_id in enumerate(owner) if peer_id == self._peer_id]
        return mine or [self._point(self._peer_id, 0)]  # more peers than shards: some read the same

    def _point(self, peer_id: str, number: int) -> int:
        text = f"atoll-seeded-1 {self.run_seed} {self._epoch} {number} {peer_id}"
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") % self._shards


class SeededSegments:
    """The segments of a stream that fall to a peer by its identity: of the peers that it sees, the one whose hash with
    the segment is lowest reads it. Where there are many files, all segments of a file fall to the same peer, so that
    the others do not read that file at all.

    Args:
        run_seed: of the manifest.
        peer_id: of this peer.
        source: its number in the run.
    """

    def __init__(self, run_seed: int, peer_id: str, source: int) -> None:
        self._run_seed, self._peer_id, self._source = run_seed, peer_id, source
        self.peers: tuple[str, ...] = (peer_id,)

    def whole_files(self, files: int) -> bool:
        """Whether files are shared out, and not their segments."""
        return files >= FILES_FOR_EACH * len({*self.peers, self._peer_id})

    def mine(self, epoch: int, file: int, cursor: int) -> bool:
        """Whether this segment falls to this peer."""
        text = f"atoll-seeded-2 {self._run_seed} {self._source} {epoch} {file} {cursor}"
        ranks = {hashlib.sha256(f"{text} {one}".encode()).digest(): one for one in (*self.peers, self._peer_id)}
        return ranks[min(ranks)] == self._peer_id
