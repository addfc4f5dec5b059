"""The parsers that bytes from strangers reach, each with valid input to start from."""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import Any

import torch
from hivemind.dht.routing import DHTID
from hivemind.dht.validation import DHTRecord
from hivemind.utils import MSGPackSerializer

from peer.errors import ProtocolError, UserError
from peer.explain.journal import ROUNDS_FILE, JournalReader
from peer.outer.record import RoundRecord
from peer.protocol.address import parse_host_address, parse_peer_address
from peer.protocol.identity import Identity
from peer.protocol.lineage import Certificate, Position, RosterLimits, check_chain
from peer.protocol.manifest import RoundSpec, RunManifest, Spec, parse_manifest
from peer.protocol.pinning import on_hub, with_commits
from peer.protocol.records import (
    PeerRecord,
    dump_json,
    open_manifest,
    open_sealed,
    parse_json,
    peers_key,
    seal,
    seal_manifest,
)
from peer.protocol.weights import WeightRule
from peer.protocol.wire import (
    AbortMessage,
    AuditRequest,
    DirectEndpoint,
    DirectMessage,
    DirectRequest,
    EntryMessage,
    GossipJoin,
    GossipRoster,
    GossipState,
    HeardWords,
    HelloMessage,
    HistoryRequest,
    InviteMessage,
    JoinMessage,
    Kind,
    ReachMessage,
    ReachRequest,
    RejectMessage,
    SnapshotMeta,
    StatusMessage,
    VoteMessage,
    pack_header,
    roster_digest,
    unpack_header,
)
from peer.protocol.word import HeardWord, SignedWord
from peer.swarm.catchup.partial_file import PartialFile
from peer.swarm.group.roster import JOIN_DOMAIN, RosterAuthority, RosterMessage
from peer.swarm.net.dht_validator import SealedRecordValidator
from peer.swarm.state.certificate_file import CertificateFile
from peer.swarm.state.snapshot_file import chunk_lengths
from tests.network.chaos.parser import Parser
from tests.network.chaos.payloads import evidence, payloads
from tests.swarm.runs import RUN, Run

NOW = 1.8e9


def parsers(seed: int, folder: Path) -> list[Parser]:
    """All of them. What is signed is signed with keys of this process, which no input can know.

    Args:
        folder: empty; for those that read files.
    """
    torch.manual_seed(seed)
    run = Run(folder).commit(3)
    signed = [*_signed(), *_certified(run), *_manifests()]
    return [*_messages(run), *signed, *payloads(), *evidence(seed), *_files(run, folder), *_addresses()]


def _messages(run: Run) -> list[Parser]:
    """Frame headers and the small messages inside frames."""
    samples = _samples(run)
    schemas = {type(sample) for sample in samples}
    by_schema = [
        Parser(
            f"message {schema.__name__}", lambda data, schema=schema: parse_json(schema, data),
            tuple(dump_json(sample) for sample in samples if type(sample) is schema),
        )
        for schema in sorted(schemas, key=lambda schema: schema.__name__)
    ]  # fmt: skip
    headers = tuple(pack_header(kind, length) for kind in Kind for length in (0, 1, 65536, 2**31))

    def header(data: bytes) -> Any:
        return unpack_header(data[:12].ljust(12, b"\0"))

    def meta(data: bytes) -> Any:
        found = parse_json(SnapshotMeta, data)
        # sizes that a stranger announces must not become memory before they are compared with this run's
        return len(chunk_lengths(found)) if sum(found.fragments) < 1 << 24 else 0

    snapshots = tuple(dump_json(sample) for sample in samples if isinstance(sample, SnapshotMeta))
    lists = Parser("chunk lists", meta, snapshots)
    return [Parser("frame header", header, headers, share=3.0), *by_schema, lists]


def _samples(run: Run) -> list[Spec]:
    """One message of each schema, or several."""
    digest, other = "a" * 64, run.identities[0].peer_id
    met = tuple(sorted(identity.peer_id for identity in run.identities))
    endpoint = DirectEndpoint(port=31338, fingerprint=digest, token="b" * 64)
    word = SignedWord(lacks="word", lacking=(other,), cause="1f" * 64, signature="0f" * 64)
    return [
        AuditRequest(what="slice", of=digest, slice_index=3),
        AuditRequest(what="joins", of=digest, round=5),
        ReachRequest(ports=(31337, 4001)),
        ReachMessage(reached=True, tried=True),
        DirectRequest(),
        DirectRequest(endpoint=endpoint, name="atoll/round", ticket="c" * 64),
        DirectMessage(endpoint=endpoint),
        DirectMessage(came=True),
        EntryMessage(token="b" * 64, name="atoll/round"),
        EntryMessage(token="b" * 64, ticket="c" * 64),
        GossipJoin(run_id=RUN, round=5, roster=met, digest=roster_digest(RUN, 5, met), tokens=10),
        GossipRoster(members=met),
        GossipState(run_id=RUN, round=5, state_digest=digest),
        JoinMessage(run_id=RUN, round=5, parent=digest, tokens=10),
        RejectMessage(reason="follow", leader=other, round=7, lineage_id=digest),
        InviteMessage(run_id=RUN, round=5, parent=digest, weight=99, wait_s=3.5),
        StatusMessage(coming=True, round=5, lineage_id=digest, weight=12, leader=other),
        HelloMessage(group_id=digest),
        VoteMessage(link_id=digest, signature="0f" * 64),
        AbortMessage(reason="gone", culprit=other),
        AbortMessage(reason="late", word=word, heard=HeardWord(member=other, word=word)),
        HeardWords(group=digest, words=(HeardWord(member=other, word=word),)),
        HistoryRequest(what="chunks", run_id=RUN, digest=digest, indexes=(0, 5, 9)),
        HistoryRequest(what="chain", run_id=RUN, from_round=3),
        SnapshotMeta(round=3, lineage_id=digest, fragments=(1000,), num_buffers=1, num_chunks=2),
        RosterMessage(joins=("00ff", "aa")),
        PeerRecord(run_id=RUN, nickname="alice", state="training", round=3, lineage_id=digest, lineage_weight=5,
                   loss=2.5, expires_at=NOW),
        run.history.chain[0],
    ]  # fmt: skip


def _signed() -> list[Parser]:
    """Sealed records, joins, rosters, and what the DHT stores for others."""
    me, other = Identity.generate(), Identity.generate()
    rosters = RosterAuthority(me, RUN, RoundSpec(min_group=2, max_group=4), WeightRule(nominal_tokens=1000))
    position = Position(5, "a" * 64, 100)
    join, mine = rosters.join(position, 10)
    theirs_join = JoinMessage(run_id=RUN, round=5, parent="a" * 64, tokens=20)
    theirs = seal(other, JOIN_DOMAIN, dump_json(theirs_join))
    message, _ = rosters.write({me.peer_id: (mine, join), other.peer_id: (theirs, theirs_join)})
    record = PeerRecord(run_id=RUN, nickname="alice", state="training", round=3, lineage_id="2" * 64, lineage_weight=5,
                        expires_at=NOW + 10)  # fmt: skip
    sealed = tuple(seal(identity, "peer", dump_json(record)) for identity in (me, other))
    validator = SealedRecordValidator(lambda: NOW)

    def stored(data: bytes) -> Any:
        key = DHTID.generate(peers_key(RUN)).to_bytes()
        record = DHTRecord(key, MSGPackSerializer.dumps(me.peer_id), data, NOW + 10)
        return MSGPackSerializer.loads(data) if validator.validate(record) else None

    return [
        Parser("sealed record", lambda data: open_sealed("peer", data), sealed, signed=True, share=0.7),
        Parser("join", lambda data: rosters.open_join(data, other.peer_id, position), (theirs,), signed=True,
               share=0.7),
        Parser("roster", lambda data: rosters.read(data, mine, join, other.peer_id).id, (dump_json(message),),
               signed=True, share=0.5),
        Parser("DHT record", stored, (MSGPackSerializer.dumps(sealed[0]),), signed=True, share=0.5),
    ]  # fmt: skip


def _certified(run: Run) -> list[Parser]:
    """Certificates and chains of them."""
    genesis, limits = run.history.genesis, RosterLimits(2, 4, WeightRule(nominal_tokens=1000))
    lines = tuple(dump_json(certificate) for certificate in run.history.chain)
    members = {identity.peer_id for identity in run.identities}

    def certificate(data: bytes) -> Any:
        found = parse_json(Certificate, data)
        check_chain([found], RUN, found.link.parent, found.link.round, limits)
        # with a roster of its own a stranger certifies what it likes; its own first link still follows from nothing
        return found.link.id if {m.peer_id for m in found.link.roster} == members else None

    def chain(data: bytes) -> Any:
        found = [parse_json(Certificate, line) for line in data.splitlines()]
        check_chain(found, RUN, genesis, 0, limits)
        return len(found), found[-1].link.id if found else genesis

    prefixes = tuple(b"\n".join(lines[:count]) for count in range(len(lines) + 1))
    return [
        Parser("certificate", certificate, lines, signed=True, share=0.4),
        Parser("chain", chain, prefixes, signed=True, share=0.2),
    ]


def _as_published(manifest: RunManifest) -> RunManifest:
    """With the commits and digests that a bootstrap writes into it."""
    pinned = with_commits(manifest, {section: "c" * 40 for section, _, _ in on_hub(manifest)})
    return pinned.model_copy(update={
        "genesis": "3" * 64, "model": pinned.model.model_copy(update={"base": "4" * 64}),
        "tokenizer": pinned.tokenizer.model_copy(update={"digest": "5" * 64}),
    })  # fmt: skip


def _manifests() -> list[Parser]:
    """As a person gives them, as the DHT holds them, and both halves of the latter with a good signature."""
    organiser = Identity.generate()
    texts = tuple(path.read_bytes() for path in sorted(Path("configs/runs").glob("*.yaml")))
    manifest = _as_published(parse_manifest(texts[0], "a file"))
    canonical = manifest.canonical()

    def from_yaml(data: bytes) -> Any:
        return parse_manifest(data, "a file").name

    def unsealed(data: bytes) -> Any:
        return open_manifest(data).manifest.run_id

    def signed_text(data: bytes) -> Any:
        return open_manifest(seal(organiser, "manifest", bytes(8) + zlib.compress(data, 1))).manifest.run_id

    def signed_bytes(data: bytes) -> Any:
        return open_manifest(seal(organiser, "manifest", data)).manifest.run_id

    refuses = (ProtocolError, UserError)
    return [
        Parser("manifest, YAML", from_yaml, texts, share=0.05, refuses=refuses),
        Parser("manifest, sealed", unsealed, (seal_manifest(organiser, manifest, 7),), signed=True, share=0.5,
               refuses=refuses),
        Parser("manifest, signed JSON", signed_text, (canonical,), share=0.4, refuses=refuses),
        Parser("manifest, signed bytes", signed_bytes, (bytes(8) + zlib.compress(canonical, 9),), share=0.4,
               refuses=refuses),
        Parser("manifest, JSON", lambda data: parse_json(RunManifest, data), (canonical,), share=0.5),
    ]  # fmt: skip


def _files(run: Run, folder: Path) -> list[Parser]:
    """What a peer finds in its own folder after a crash."""
    lines = b"\n".join(dump_json(certificate) for certificate in run.history.chain)
    record = RoundRecord(status="committed", round=3, lineage_id="a" * 64, members=("x", "y"), weights=(1, 2))
    journal = record.model_dump_json(exclude_defaults=True).encode() + b"\n"
    meta = SnapshotMeta(round=3, lineage_id="a" * 64, fragments=(1000,), num_buffers=1, num_chunks=2)

    def chain(data: bytes) -> Any:
        path = folder / "chain.jsonl"
        path.write_bytes(data)
        file = CertificateFile(path, run.history.genesis)
        file.load()
        return len(file)

    def rounds(data: bytes) -> Any:
        path = folder / ROUNDS_FILE
        path.write_bytes(data)
        return len(JournalReader(folder).poll().records)

    def begun(data: bytes) -> Any:
        (folder / "incoming.index").write_bytes(data)
        return PartialFile.begun(folder) or False

    return [
        Parser("chain file", chain, (lines,), share=0.1),
        Parser("round records", rounds, (journal, journal * 3), share=0.2),
        Parser("index of a begun snapshot", begun, (dump_json(meta) + b"\n0\n1\n",), share=0.2),
    ]


def _addresses() -> list[Parser]:
    """Addresses that others tell."""
    peer_id = Identity.generate().peer_id

    def peer(data: bytes) -> Any:
        return str(parse_peer_address(data.decode("utf-8", "surrogateescape")))

    def host(data: bytes) -> Any:
        return str(parse_host_address(data.decode("utf-8", "surrogateescape")))

    return [
        Parser("peer address", peer, (f"/ip4/1.2.3.4/tcp/31337/p2p/{peer_id}".encode(),), refuses=(UserError,)),
        Parser("host address", host, (b"/ip6/::1/udp/4001/quic-v1", b"/dns4/example.org/tcp/1"), refuses=(UserError,)),
    ]

