"""Which run a newcomer joins, whatever others publish."""

from __future__ import annotations

import random
import zlib
from dataclasses import replace
from types import SimpleNamespace

import pytest

from peer.errors import UserError
from peer.protocol.identity import Identity
from peer.protocol.manifest import PROTOCOL_VERSION
from peer.protocol.records import MANIFEST_KEY, MAX_RECORD_BYTES, seal, seal_manifest
from peer.protocol.wire import Kind
from peer.swarm.net.dht_validator import claims_of, key_id
from peer.swarm.net.manifests import MANIFEST_NAME, ManifestSearch, publish_manifests
from tests.swarm.net.published import manifest_of

OLD, NEW, FOREIGN = manifest_of("old"), manifest_of("new"), manifest_of("foreign")
ORGANISER, STRANGER = Identity.generate(), Identity.generate()


class Shared:
    """What the DHT holds, for all nodes."""

    def __init__(self, **records):
        self.records = records

    async def store(self, *_, **__):
        return True

    async def get(self, *_, **__):
        found = {owner: SimpleNamespace(value=blob) for owner, blob in self.records.items()}
        return SimpleNamespace(value=found) if found else None


async def publisher(network, identity, sealed, organiser=None):
    """A node that hands out a manifest."""
    node = network.node(identity)
    node.dht = Shared()
    await publish_manifests(node, {organiser or node.peer_id: sealed}, random.Random(0))
    return node


def newcomer(network, introducer, held, run_id=None):
    """The search of a peer that was given one address."""
    network.retime(manifest_timeout_s=0.3, recheck_s=0.05, manifest_answer_s=0.5, open_timeout_s=0.5)
    node = network.node()
    node.config = replace(node.config, initial_peers=(f"/ip4/192.0.2.1/tcp/1/p2p/{introducer.peer_id}",))
    node.dht = Shared(**held)
    return ManifestSearch(node, run_id)


async def test_newcomers_join_the_current_run_though_the_dht_holds_an_older_manifest(network):
    await publisher(network, ORGANISER, seal_manifest(ORGANISER, NEW, 2))
    replayed = {ORGANISER.peer_id: seal_manifest(ORGANISER, OLD, 1)}
    found = [await newcomer(network, ORGANISER, replayed).run() for _ in range(3)]
    assert [sealed.manifest.run_id for sealed in found] == [NEW.run_id] * 3


async def test_a_newer_one_in_the_dht_counts_more_than_an_older_one_of_a_member(network):
    newer = OLD.model_copy(update={"seed": 9})
    member = await publisher(network, STRANGER, seal_manifest(ORGANISER, OLD, 1), ORGANISER.peer_id)
    held = {ORGANISER.peer_id: seal_manifest(ORGANISER, newer, 2)}
    assert (await newcomer(network, member.identity, held).run()).manifest == newer
    held = {ORGANISER.peer_id: seal_manifest(ORGANISER, NEW, 2)}  # another run, of another name
    assert (await newcomer(network, member.identity, held).run()).manifest == OLD


async def test_a_member_introduces_its_organiser_among_others(network):
    member = await publisher(network, STRANGER, seal_manifest(ORGANISER, OLD, 1), ORGANISER.peer_id)
    forger = Identity.generate()
    held = {forger.peer_id: seal_manifest(forger, FOREIGN, 2**52)}
    found = await newcomer(network, member.identity, held).run()
    assert (found.organiser, found.manifest) == (ORGANISER.peer_id, OLD)


async def test_an_old_run_is_joined_if_it_is_named(network):
    member = await publisher(network, STRANGER, seal_manifest(ORGANISER, OLD, 1), ORGANISER.peer_id)
    held = {ORGANISER.peer_id: seal_manifest(ORGANISER, NEW, 2)}
    assert (await newcomer(network, member.identity, held, OLD.run_id).run()).manifest == OLD
    with pytest.raises(UserError, match="manifest hash mismatch"):
        await newcomer(network, member.identity, held, FOREIGN.run_id).run()


async def test_the_dht_serves_while_the_introducer_is_silent(network):
    held = {ORGANISER.peer_id: seal_manifest(ORGANISER, NEW, 2)}
    assert (await newcomer(network, STRANGER, held).run()).manifest == NEW


@pytest.mark.parametrize("body", [b"", b"x" * MAX_RECORD_BYTES, b"x" * (MAX_RECORD_BYTES + 1)])
async def test_what_is_no_manifest_is_passed_over(network, body):
    node = network.node(STRANGER)
    await node.serve(MANIFEST_NAME, "manifest", lambda stream: stream.send(Kind.MANIFEST, body))
    with pytest.raises(UserError, match=r"holds no manifest|is refused: truncated record"):
        await newcomer(network, STRANGER, {}).run()


async def test_a_malformed_manifest_of_the_introducer_is_refused_with_the_reason(network):
    payload = (1).to_bytes(8, "big") + zlib.compress(b'{"protocol": %d, "name": "../x"}' % PROTOCOL_VERSION)
    await publisher(network, ORGANISER, seal(ORGANISER, "manifest", payload))
    with pytest.raises(UserError, match="manifest at that address is refused: malformed RunManifest"):
        await newcomer(network, ORGANISER, {}).run()


async def test_a_manifest_under_anothers_name_is_passed_over(network):
    held = {ORGANISER.peer_id: seal_manifest(STRANGER, FOREIGN, 9)}
    with pytest.raises(UserError, match=r"holds no manifest|is refused: truncated record"):
        await newcomer(network, ORGANISER, held).run()


async def test_several_runs_that_none_has_introduced_are_the_persons_choice(network):
    others = [Identity.generate() for _ in range(2)]
    held = {other.peer_id: seal_manifest(other, FOREIGN, 1) for other in others}
    with pytest.raises(UserError, match="holds 2 runs"):
        await newcomer(network, STRANGER, held).run()


async def test_of_several_runs_at_one_node_a_newcomer_says_which(network):
    node = network.node(ORGANISER)
    node.dht = Shared()
    runs = {f"{ORGANISER.peer_id}/{m.name}": seal_manifest(ORGANISER, m, n) for n, m in enumerate((OLD, NEW), 1)}
    await publish_manifests(node, runs, random.Random(0))
    with pytest.raises(UserError, match="2 runs; say which one") as refused:
        await newcomer(network, ORGANISER, runs).run()
    assert "--run new" in refused.value.hint
    for manifest in (OLD, NEW):
        search = newcomer(network, ORGANISER, {})
        search._name = manifest.name
        assert (await search.run()).manifest == manifest
    search = newcomer(network, ORGANISER, {f"{ORGANISER.peer_id}/new": runs[f"{ORGANISER.peer_id}/old"]})
    search._name = "newt"
    with pytest.raises(UserError, match="no run at that address is named newt"):
        await search.run()


def test_a_manifest_lies_in_the_dht_under_its_organiser_and_its_own_name_alone():
    blob = seal_manifest(ORGANISER, NEW, 5)
    own, other = ORGANISER.peer_id, STRANGER.peer_id
    for owner, fits in ((own, True), (f"{own}/new", True), (f"{own}/old", False), (f"{other}/new", False)):
        assert (claims_of(key_id(MANIFEST_KEY), owner, blob) is not None) == fits
