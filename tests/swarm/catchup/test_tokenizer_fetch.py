"""The tokenizer's files travel between peers: by digest, from the first donor that has them, within quotas."""

from __future__ import annotations

import asyncio

import pytest

from peer.errors import ProtocolError, UserError
from peer.protocol.records import parse_json
from peer.protocol.wire import MAX_MESSAGE_BYTES, HistoryRequest, Kind
from peer.swarm.catchup import history_server
from peer.swarm.catchup.donor_requests import DonorRequests
from peer.swarm.catchup.history_server import FRAME_BYTES, HistoryServer, history_name
from peer.swarm.catchup.tokenizer_fetch import fetch_tokenizer
from peer.swarm.net.stream import StreamClosedError
from peer.swarm.state.snapshot_cache import SnapshotCache
from peer.tokenizer_files import FOLDER, TokenizerFiles, list_files
from tests.swarm.runs import RUN, Run

CONTENTS = {"tokenizer.json": bytes(range(256)) * 5000, "tokenizer_config.json": b'{"eos_token": "</s>"}'}
FILES = list_files(CONTENTS)
LARGE, SMALL = FILES


class Swarm:
    """Donors with some of the files, and a newcomer without any."""

    def __init__(self, network, folder):
        self._network, self._folder = network, folder
        self.newcomer, self.files = network.node(), TokenizerFiles(folder / "newcomer", FILES)
        self.donors = []

    async def donor(self, *names):
        """A production server that holds these files."""
        home = self._folder / f"donor{len(self.donors)}"
        files, run, node = TokenizerFiles(home, FILES), Run(home).commit(1), self._network.node()
        for file in FILES:
            if file.name in names:
                files.put(file, CONTENTS[file.name])
        await HistoryServer(node, RUN, run.history, SnapshotCache(run), files=files).start()
        self.donors.append(node.peer_id)
        return node, home / FOLDER

    async def liar(self, *frames):
        """Answers every request with these frames."""
        node = self._network.node()

        async def answer(stream):
            await stream.receive({Kind.REQUEST: MAX_MESSAGE_BYTES})
            for kind, body in frames:
                await stream.send(kind, body)

        await node.serve(history_name(RUN), "history", answer)
        self.donors.append(node.peer_id)
        return node

    async def fetch(self):
        async def donors():
            return self.donors

        await asyncio.wait_for(fetch_tokenizer(self.newcomer, RUN, self.files, donors), 20.0)


@pytest.fixture
def swarm(network, tmp_path):
    network.retime(tokenizer_patience_s=0.05)
    network.retime(recheck_s=0.01)
    return Swarm(network, tmp_path)


async def test_a_newcomer_takes_the_files_and_keeps_them_under_their_digests(swarm):
    await swarm.donor(*CONTENTS)
    await swarm.fetch()
    assert swarm.files.read() == CONTENTS
    assert swarm.files.missing == ()
    kept = swarm.files.path_of(LARGE.digest).parent
    assert {path.name for path in kept.iterdir()} == {LARGE.digest, SMALL.digest}
    swarm.donors.clear()
    await swarm.fetch()  # a restart asks no peer


async def test_each_file_may_come_from_another_donor(swarm):
    await swarm.donor("tokenizer.json")
    await swarm.donor("tokenizer_config.json")
    await swarm.fetch()
    assert swarm.files.read() == CONTENTS


@pytest.mark.parametrize("frames", [
    [(Kind.END, b"")],
    [(Kind.BUSY, b"")],
    [(Kind.DATA, b"x" * SMALL.size), (Kind.END, b"")],
    [(Kind.DATA, b"x" * FRAME_BYTES)] * 3,
    [(Kind.DATA, b"x" * (FRAME_BYTES + 1))],
    [(Kind.META, b"{}")],
    [],
], ids=["without it", "busy", "another content", "endless", "one large frame", "out of turn", "gone"])  # fmt: skip
async def test_a_donor_that_does_not_give_the_file_costs_only_its_turn(swarm, frames):
    await swarm.liar(*frames)
    await swarm.donor(*CONTENTS)
    await swarm.fetch()
    assert swarm.files.read() == CONTENTS


async def test_without_a_donor_a_newcomer_ends_with_the_reason(swarm):
    await swarm.liar((Kind.DATA, b"x" * SMALL.size), (Kind.END, b""))
    with pytest.raises(UserError, match=r"hands out the tokenizer's tokenizer\.json \(1280000 bytes\)") as caught:
        await swarm.fetch()
    assert "when the bootstrap, or another peer that trains, can be reached" in caught.value.hint


async def test_a_damaged_copy_is_fetched_again_and_a_damaged_donor_passed_over(swarm):
    _, folder = await swarm.donor(*CONTENTS)
    (folder / LARGE.digest).write_bytes(b"damaged")
    await swarm.donor(*CONTENTS)
    await swarm.fetch()
    swarm.files.path_of(SMALL.digest).write_bytes(b'{"eos_token": "</S>"}')
    assert swarm.files.missing == (SMALL,)
    with pytest.raises(UserError, match=r"the tokenizer's tokenizer_config\.json in .* is missing or damaged"):
        swarm.files.read()
    await swarm.fetch()
    assert swarm.files.read() == CONTENTS


async def test_a_donor_serves_the_files_of_the_manifest_and_no_others(swarm):
    node, folder = await swarm.donor(*CONTENTS)
    other = folder / ("b" * 64)
    other.write_bytes(b"secret")
    requests = DonorRequests(swarm.newcomer, RUN)
    assert await requests.file(node.peer_id, SMALL) == CONTENTS[SMALL.name]
    assert await requests.file(node.peer_id, SMALL.model_copy(update={"digest": "b" * 64})) == b""
    for digest in ("../identity.key", "b" * 63, None):
        with pytest.raises(ProtocolError):
            parse_json(HistoryRequest, HistoryRequest.model_construct(
                what="file", run_id=RUN, digest=digest).model_dump_json().encode())  # fmt: skip


async def test_a_peer_that_does_not_read_holds_only_its_places(swarm, monkeypatch):
    monkeypatch.setattr(history_server, "BULK_READERS_PER_PEER", 1)
    node, _ = await swarm.donor(*CONTENTS)
    slow = swarm._network.node()
    held = await slow.open(node.peer_id, history_name(RUN), "history")
    await held.send_message(Kind.REQUEST, HistoryRequest(what="file", run_id=RUN, digest=LARGE.digest))
    await held.receive_header({Kind.DATA: FRAME_BYTES})  # it is being served, and reads no further
    with pytest.raises(StreamClosedError, match="is busy"):
        await DonorRequests(slow, RUN).file(node.peer_id, SMALL)
    await swarm.fetch()  # another one is served meanwhile
    assert swarm.files.read() == CONTENTS
    held.close()


def test_a_file_with_another_digest_is_not_kept(tmp_path):
    files = TokenizerFiles(tmp_path, FILES)
    for content in (b"", b"x", CONTENTS[LARGE.name]):
        with pytest.raises(ProtocolError, match=r"tokenizer_config\.json has another digest"):
            files.put(SMALL, content)
    assert files.missing == FILES
    (tmp_path / FOLDER).write_text("a file in its place")
    with pytest.raises(UserError, match="cannot write the tokenizer to"):
        files.put(SMALL, CONTENTS[SMALL.name])
