"""The text of a source that peers share out, in blocks; here, one that is held in memory."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from peer.data.packing import PackedTokens
from peer.protocol.data_spec import PARTS_PER_SHARD


class ShardBlock(NamedTuple):
    """Some parts of one shard: windows, and which of them are the block's."""

    windows: PackedTokens
    places: npt.NDArray[Any]


class TextBlocks(Protocol):
    """The same on all peers.

    Attributes:
        shards: that the source is cut into.
        span: parts of a shard in a block.
        shard_tokens: of one shard, about.
        available: windows in all, as far as that is known.
    """

    shards: int
    span: int
    shard_tokens: float
    available: int

    def block(self, number: int) -> ShardBlock:
        """ShardBlock `number`.

        Raises:
            SourceBusy: it is not there yet; ask again.
        """

    def prepare(self, number: int) -> None:
        """Have a block made before it is needed."""

    @property
    def down(self) -> bool:
        """It cannot be read for the moment."""

    @property
    def over(self) -> bool:
        """There is no text in it."""


class ResidentBlocks:
    """Windows in memory, in shards of windows from everywhere: neighbours in a text are alike, and a peer would learn
    one place by heart.

    Args:
        seed: of the order in which shards are cut.

    Attributes:
        scattered: windows in that order.
    """

    over = down = False
    span = PARTS_PER_SHARD

    def __init__(self, windows: PackedTokens, shards: int, seed: list[int]) -> None:
        self.windows, self.shards, self.available = windows, shards, len(windows)
        self.shard_tokens = len(windows.tokens) / shards
        self.scattered = np.random.default_rng(seed).permutation(len(windows))

    def block(self, number: int) -> ShardBlock:
        """See `TextBlocks.block`."""
        first, end = (len(self.windows) * shard // self.shards for shard in (number, number + 1))
        return ShardBlock(self.windows, self.scattered[first:end])

    def prepare(self, number: int) -> None:
        """It is there."""
