"""Three peers fine-tune one adapter on a base that each has loaded: a kill, a late join, and what a round costs."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from peer.checkpoint.store import look_up
from peer.train.adapter import WEIGHTS_FILE
from peer.use.export import export
from peer.use.trained import open_trained
from tests.hub_cache import put
from tests.network.bootstraps import BootstrapProcess
from tests.network.processes import JoinedPeer
from tests.train.tiny import tiny_model

MANIFEST = """
name: adapter
seed: 3
model: {pretrained: o/base, adapter: {r: 8, alpha: 16, target_modules: [q_proj, v_proj, up_proj]}}
data: {sequence_length: 16, sources: [{kind: instructions}]}
inner: {batch_sequences: 4, learning_rate: 1.0e-2}
recipe: {name: diloco, compressor: int8, steps_per_round: 5}
trust: {identity_work: 0, mode: private}
rounds: {straggler_wait_s: 2, timeout_s: 20}
"""
NUMEL = 2 * (2 * 8 * (16 + 16) + 8 * (16 + 32))
# Of a small round most is not payload: joins, votes, signatures of slices, scales of blocks, to each other member.
HEADER_BYTES = 8192


@pytest.mark.long
@pytest.mark.timeout(900)
def test_three_peers_train_one_adapter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = tmp_path / "hub"
    put(cache, "o/base", tiny_model(seed=3))
    monkeypatch.setenv("HF_HUB_CACHE", str(cache))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(cache))
    bootstrap = BootstrapProcess(tmp_path / "bootstrap", MANIFEST)
    peers: list[JoinedPeer] = []

    def join(name: str) -> JoinedPeer:
        peers.append(JoinedPeer(tmp_path / name, bootstrap.address, "--save-steps", "10"))
        return peers[-1]

    try:
        assert len(bootstrap.genesis()) == 2 * NUMEL  # anchor and momentum: of the adapter alone
        one, two, three = join("one"), join("two"), join("three")
        one.wait_for(lambda: min(peer.round for peer in (one, two, three)) >= 2, 300)
        three.process.kill()
        late = join("late")
        late.wait_for(lambda: len(late.committed) >= 3, 300)
        last = late.round
        one.wait_for(lambda: min(one.round, two.round) >= last)
        chains = [{event["round"]: event["lineage_id"] for event in peer.committed} for peer in (one, two, late)]
        # a link names the digest of the state that it starts from
        assert min(chains[2]) > 2
        for round, lineage_id in chains[2].items():
            if round <= last:
                assert [chain[round] for chain in chains] == [lineage_id] * 3
        one.signal(signal.SIGINT)
        assert one.process.wait(100) == 0, one.log_text()
        for event in one.committed:
            members = len(event["members"])
            payload = 2 * (members - 1) * NUMEL // members  # at 8 bits
            assert payload <= event["bytes_sent"] <= payload + HEADER_BYTES * members
        check_results(one, tmp_path)
    finally:
        for peer in peers:
            peer.close()
        bootstrap.close()


def check_results(peer: JoinedPeer, folder: Path) -> None:
    """What the run yields, as an adapter, merged, and from a checkpoint."""
    exported = peer.folder / "export"
    assert (exported / WEIGHTS_FILE).exists()
    ids = torch.arange(3, 19)[None]
    with torch.no_grad():
        expected = open_trained(exported).model(input_ids=ids).logits
        merged = export(open_trained(exported), folder / "merged", "fp32", merged=True)
        whole = AutoModelForCausalLM.from_pretrained(merged)(input_ids=ids).logits
        base = tiny_model(seed=3).train(False)(input_ids=ids).logits
    assert torch.allclose(whole, expected, atol=1e-6)
    assert not torch.allclose(base, expected, atol=1e-3)
    assert look_up(peer.folder / "checkpoints")
    assert open_trained(peer.folder).after is not None
