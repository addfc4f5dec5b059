"""A data set of the hub from end to end, with the hub's own clients against a stand-in for its server."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
from pathlib import Path

from tests.data.hub_server import COMMIT, serving_hub

MANIFEST = """
name: small
model: {architecture: llama, config: {vocab_size: 264}}
data: {sequence_length: 16, validation_tokens: 1024, sources: [{kind: hub, name: owner/texts, text_column: content}]}
"""
READ = """
import json, sys
from itertools import islice
from pathlib import Path
from peer.data.batches import Batches
from peer.data.corpus import ReadingOptions, open_corpus
from peer.data.tokenizer import ByteTokenizer
from peer.hub import hub_headers, pin
from peer.protocol.manifest import ALONE, read_manifest

manifest = pin(read_manifest(sys.argv[1], ALONE))
options = ReadingOptions(cache=Path(sys.argv[2]), hub_headers=hub_headers())
corpus = open_corpus(manifest.data, ByteTokenizer(), options, 4)
rows = [row for batch, _ in islice(Batches(corpus.sources, 4, 0), 50) for row in batch]
corpus.close()
texts = [ByteTokenizer().decode(row.numpy()) for row in rows]
print(json.dumps([manifest.data.sources[0].revision, len(corpus.validation), "".join(texts)]))
"""


def jsonl(number: int) -> bytes:
    return "".join(json.dumps({"content": f"file {number} row {index}"}) + "\n" for index in range(3000)).encode()


def test_a_data_set_is_pinned_listed_streamed_and_read_with_the_users_token(tmp_path: Path):
    (tmp_path / "run.yaml").write_text(MANIFEST)
    files = {
        "README.md": b"# texts", "data/train-0.jsonl": jsonl(0), "data/train-1.jsonl.gz": gzip.compress(jsonl(1)),
        "data/test-0.jsonl": jsonl(2),
    }  # fmt: skip
    with serving_hub("owner/texts", files) as hub:
        done = subprocess.run(
            [sys.executable, "-c", READ, str(tmp_path / "run.yaml"), str(tmp_path / "cache")], check=False,
            env={**os.environ, "HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "home"), "HF_TOKEN": "hf_secret",
                 "HF_HUB_OFFLINE": "0", "HF_DATASETS_OFFLINE": "0"},
            capture_output=True, text=True,
        )  # fmt: skip
    assert done.returncode == 0, done.stderr
    revision, validation, text = json.loads(done.stdout.splitlines()[-1])
    assert revision == COMMIT
    assert validation >= 40
    assert "file 0 row" in text
    assert "file 1 row" in text
    assert "file 2 row" not in text  # another split
    read = [request for request in hub.asked if request[0].startswith("data/")]
    assert {name for name, _ in read} == {"data/train-0.jsonl", "data/train-1.jsonl.gz"}
    assert {token for _, token in read} == {"Bearer hf_secret"}
