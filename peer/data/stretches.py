"""The blocks of a streamed source: equal stretches of its files, each made when it is needed."""

from __future__ import annotations

import sys

import numpy as np

from peer.data.blocks import ShardBlock
from peer.data.streamed import StreamedSource
from peer.protocol.data_spec import PARTS_PER_SHARD, SharedData


class StreamBlocks:
    """Equal stretches of the files of a stream.

    Args:
        shards: of the source; as many of each file.
        cut: says how large they are.
    """

    available = sys.maxsize

    def __init__(self, stream: StreamedSource, shards: int, cut: SharedData) -> None:
        self._stream, self.shards, self.shard_tokens = stream, shards, float(cut.shard_tokens)
        self.span = cut.block_parts
        self._of_file = shards // stream.num_files * PARTS_PER_SHARD // self.span

    @property
    def down(self) -> bool:
        """See `TextBlocks.down`."""
        return self._stream.down

    @property
    def over(self) -> bool:
        """See `TextBlocks.over`."""
        return self._stream.over

    def block(self, number: int) -> ShardBlock:
        """See `TextBlocks.block`."""
        file, index = divmod(number, self._of_file)
        windows = self._stream.stretch(file, (index, self._of_file))
        return ShardBlock(windows, np.arange(len(windows)))

    def prepare(self, number: int) -> None:
        """See `TextBlocks.prepare`."""
        file, index = divmod(number, self._of_file)
        self._stream.prepare(file, (index, self._of_file))
