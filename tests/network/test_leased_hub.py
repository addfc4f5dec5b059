"""A run on a data set of the hub: peers lease stretches of its parquet files, and the chain says what was read."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.data.hub_server import COMMIT, serving_hub
from tests.network.bootstraps import DILOCO, MANIFEST
from tests.network.processes import LAUNCH, LOOPBACK, environment, run

ROUNDS = 8
SOURCES = "sources: [{kind: hub, name: owner/texts}], shard_sequences: 96, "


def parquet(seed: int) -> bytes:
    sink = io.BytesIO()
    texts = [f"file {seed} row {index} says: {'leases ' * (1 + index % 5)}" for index in range(3000)]
    pq.write_table(pa.table({"text": texts}), sink, row_group_size=500)
    return sink.getvalue()


def start(module: str, env: dict[str, str], *arguments: str) -> subprocess.Popen[str]:
    command = [*LAUNCH, sys.executable, "-m", module, *arguments, "--host-maddrs", LOOPBACK, "--json"]
    return subprocess.Popen(command, env=environment(env), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


@pytest.mark.long
@pytest.mark.timeout(500)
def test_parquet_of_the_hub_is_leased_and_counted(tmp_path: Path) -> None:
    files = {"README.md": b"# texts", **{f"data/train-{number}.parquet": parquet(number) for number in range(2)}}
    text = MANIFEST.format(hidden=16, recipe=DILOCO, steps=5, wait=5.0, total=f", total: {ROUNDS}")
    (tmp_path / "run.yaml").write_text(text.replace("data: {", f"data: {{{SOURCES}"))
    processes = []
    with serving_hub("owner/texts", files) as hub:
        env = {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "0",
               "HF_DATASETS_OFFLINE": "0"}  # fmt: skip
        try:
            bootstrap = start("bootstrap.cli", env, str(tmp_path / "run.yaml"), "--state-dir", str(tmp_path / "state"))
            processes.append(bootstrap)
            assert bootstrap.stdout is not None
            first = next(line for line in bootstrap.stdout if line.startswith('{"') and "addresses" in line)
            address = json.loads(first)["addresses"][0]
            folders = [str(tmp_path / name) for name in ("one", "two")]
            peers = [start("peer.cli", env, "join", address, "--output-dir", folder) for folder in folders]
            processes += peers
            for peer in peers:
                said, _ = peer.communicate(timeout=200.0)
                assert peer.returncode == 0, said[-3000:]
            code, output = run("peer.cli", ["data", "coverage", folders[0], "--json"], env)
        finally:
            for process in processes:
                process.kill()
                process.wait()
    assert code == 0, output
    found = json.loads(output[output.index("{") :])
    (source,) = found["sources"]
    assert source["shards"] % 2 == 0
    assert source["shards"] >= 16
    first_epoch = source["epochs"][0]
    assert first_epoch["parts_once"] + first_epoch["parts_twice_or_more"] >= 16
    assert first_epoch["share_read_twice"] < 0.05
    assert len(found["peers"]) == 2
    assert all(one["refused"] == 0 for one in found["peers"].values())
    assert {COMMIT} == set(json.loads((tmp_path / "state" / "genesis.json").read_text())["commits"].values())
