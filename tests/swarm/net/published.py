"""Peer records and manifests as they are published, for tests of what stores and reads them."""

from __future__ import annotations

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hivemind.utils import MSGPackSerializer

from peer.protocol.identity import Identity
from peer.protocol.manifest import RunManifest
from peer.protocol.records import PEER_TTL_S, PeerRecord, dump_json, seal
from tests.swarm.runs import RUN

NOW = 1.8e9
OTHER_RUN = "b" * 64


def identity_of(seed):
    """The same in each run: whether a nonce solves a puzzle must not be left to chance."""
    return Identity._of(Ed25519PrivateKey.from_private_bytes(bytes([seed]) * 32))


ALICE, BOB = identity_of(1), identity_of(2)


def peer_record(**changes):
    """A small one that expires when it may."""
    values = {"run_id": RUN, "nickname": "one", "state": "training", "round": 0, "lineage_id": RUN,
              "lineage_weight": 0, "serial": 1, "expires_at": NOW + PEER_TTL_S, **changes}  # fmt: skip
    return PeerRecord(**values)


def sealed_peer(signer=ALICE, **changes):
    return seal(signer, "peer", dump_json(peer_record(**changes)))


def packed(owner, blob):
    """Subkey and value as hivemind sends them."""
    return MSGPackSerializer.dumps(owner), MSGPackSerializer.dumps(blob)


def manifest_of(name, seed=0):
    """The manifest of a run of that name."""
    model = {"architecture": "llama", "config": {"hidden_size": 8}}
    return RunManifest.model_validate({"name": name, "seed": seed, "model": model, "genesis": "0" * 64})
