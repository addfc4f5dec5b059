"""Takes the tokenizer of a run from the peers that have it: the organiser's folder is on no other machine."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable

from peer.errors import ProtocolError, UserError, in_words
from peer.protocol.tokenizer_spec import TokenizerFile
from peer.swarm.catchup.chunk_download import CatchUpError
from peer.swarm.catchup.donor_requests import DonorRequests
from peer.swarm.net.node import Node
from peer.swarm.net.stream import StreamClosedError
from peer.tokenizer_files import TokenizerFiles

log = logging.getLogger(__name__)
Donors = Callable[[], Awaitable[Iterable[str]]]


async def fetch_tokenizer(node: Node, run_id: str, files: TokenizerFiles, donors: Donors) -> None:
    """Take the files that are not here yet, each from the first donor whose content has the manifest's digest.

    Args:
        donors: ids of peers that may have them, asked for again before each attempt.

    Raises:
        UserError: no donor had one for `tokenizer_patience_s`, or the disk failed.
    """
    requests = DonorRequests(node, run_id)
    until = node.clock() + node.timing.tokenizer_patience_s
    while missing := await asyncio.to_thread(lambda: files.missing):
        if await _take_first(requests, files, missing[0], await donors()):
            until = node.clock() + node.timing.tokenizer_patience_s
            continue
        if node.clock() >= until:
            raise UserError(
                f"no peer hands out the tokenizer's {missing[0].name} ({missing[0].size} bytes)",
                "start again when the bootstrap, or another peer that trains, can be reached",
            )
        await asyncio.sleep(node.timing.recheck_s)


async def _take_first(
    requests: DonorRequests, files: TokenizerFiles, file: TokenizerFile, donors: Iterable[str]
) -> bool:
    for donor in donors:
        try:
            content = await requests.file(donor, file)
            if not content:
                raise CatchUpError(f"{donor} does not have it")
            await asyncio.to_thread(files.put, file, content)
        except (ProtocolError, StreamClosedError) as error:
            log.info("no %s from %s: %s", file.name, donor, in_words(error))
        else:
            log.info("took the tokenizer's %s from %s", file.name, donor)
            return True
    return False
