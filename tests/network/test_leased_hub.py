"""A run on a data set of the hub: peers lease stretches of its parquet files, and the chain says what was read."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.data.hub_server import COMMIT, serving_hub
from tests.network.bootstraps import DILOCO, MANIFEST, BootstrapProcess
from tests.network.processes import JoinedPeer, run

ROUNDS = 8
SOURCES = "sources: [{kind: hub, name: owner/texts}], shard_sequences: 96, "


def parquet(seed: int) -> bytes:
    sink = io.BytesIO()
    texts = [f"file {seed} row {index} says: {'leases ' * (1 + index % 5)}" for index in range(3000)]
    pq.write_table(pa.table({"text": texts}), sink, row_group_size=500)
    return sink.getvalue()


@pytest.mark.long
@pytest.mark.timeout(500)
def test_parquet_of_the_hub_is_leased_and_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = {"README.md": b"# texts", **{f"data/train-{number}.parquet": parquet(number) for number in range(2)}}
    text = MANIFEST.format(hidden=16, recipe=DILOCO, steps=5, wait=5.0, total=f", total: {ROUNDS}")
    assert "data: {" in text
    with serving_hub("owner/texts", files) as hub:
        env = {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "0",
               "HF_DATASETS_OFFLINE": "0"}  # fmt: skip
        for name, value in env.items():
            monkeypatch.setenv(name, value)
        bootstrap = BootstrapProcess(tmp_path / "bootstrap", text.replace("data: {", f"data: {{{SOURCES}"))
        peers = []
        try:
            peers = [
                JoinedPeer(tmp_path / name, bootstrap.address, env=env, own_text=False) for name in ("one", "two")
            ]
            for peer in peers:
                assert peer.process.wait(200.0) == 0, peer.log_text()
            code, output = run("peer.cli", ["data", "coverage", str(peers[0].folder), "--json"], env)
        finally:
            for peer in peers:
                peer.close()
            bootstrap.close()
    assert code == 0, output
    found = json.loads(output[output.index("{") :])
    (source,) = found["sources"]
    assert source["shards"] % 2 == 0
    assert source["shards"] >= 16
    first = source["epochs"][0]
    assert first["parts_once"] + first["parts_twice_or_more"] >= 16
    assert first["share_read_twice"] < 0.05
    assert len(found["peers"]) == 2
    assert all(one["refused"] == 0 for one in found["peers"].values())
    assert {COMMIT} == set(json.loads((bootstrap.folder / "genesis.json").read_text())["commits"].values())
