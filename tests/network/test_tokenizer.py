"""A run with a tokenizer of the organiser's folder: from the bootstrap, from a peer, and into the exported model."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import AutoTokenizer

from peer.data.tokenizer import load_tokenizer
from peer.data.train_bpe import train_bpe
from peer.protocol.manifest import ALONE, TokenizerSpec
from peer.tokenizer_files import FOLDER
from tests.network.bootstraps import DILOCO, MANIFEST, BootstrapProcess
from tests.network.processes import TEXT, JoinedPeer

ROUNDS = 6


def address_of(peer: JoinedPeer) -> str:
    """Where others can join through it."""
    (line,) = [line for line in peer.said("info") if line.startswith("others can join through ")]
    return line.split()[4].rstrip(",")


def kept_by(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (folder / FOLDER).iterdir()}


@pytest.mark.long
@pytest.mark.timeout(400)
def test_peers_train_with_the_organisers_tokenizer_and_hand_it_on(tmp_path: Path) -> None:
    words = tmp_path / "words"
    words.mkdir()
    trained = train_bpe([TEXT], 264)
    trained.save(words)
    text = MANIFEST.format(hidden=16, recipe=DILOCO, steps=5, wait=5.0, total=f", total: {ROUNDS}")
    bootstrap = BootstrapProcess(tmp_path / "bootstrap", f"{text}tokenizer: {{kind: folder, name: {words}}}\n")
    peers = []
    try:
        served = kept_by(bootstrap.folder)
        assert sorted(served.values()) == sorted(path.read_bytes() for path in words.iterdir())
        peers.append(JoinedPeer(tmp_path / "a", bootstrap.address))
        peers[0].wait_for(lambda: peers[0].step > 0, 200.0)
        bootstrap.kill()
        for path in words.iterdir():
            path.unlink()  # the organiser's machine is gone
        peers.append(JoinedPeer(tmp_path / "b", address_of(peers[0])))
        for peer in peers:
            assert peer.process.wait(200.0) == 0, peer.log_text()
            assert peer.round == ROUNDS
            assert kept_by(peer.folder) == served
            tokenizer = AutoTokenizer.from_pretrained(peer.folder / "export")
            ids = trained.encode(TEXT).tolist()
            assert tokenizer(TEXT)["input_ids"] == ids
            assert len(ids) < len(TEXT)
            spec = TokenizerSpec.model_validate({"kind": "folder", "name": str(peer.folder / "export")}, context=ALONE)
            assert load_tokenizer(spec).digest == trained.digest
    finally:
        for peer in peers:
            peer.close()
        bootstrap.close()
