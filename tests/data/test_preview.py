from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from peer.data.preview import preview
from peer.errors import UserError
from peer.protocol.manifest import parse_manifest
from tests.data.web_server import serving

MANIFEST = """
name: small
model: {architecture: llama, config: {vocab_size: 264}}
data: {sequence_length: 16, validation_fraction: 0.2%s}
"""


def rows(count: int) -> str:
    texts = [f"document number {index}" for index in range(count)]
    return "".join(json.dumps({"text": text}) + '\n{"text": null}\n' for text in texts)


def test_a_preview_counts_what_is_read_and_what_is_left_out(tmp_path: Path):
    (tmp_path / "a.jsonl").write_text(rows(200))
    (tmp_path / "b.png").write_bytes(b"\0png")
    (one,) = preview(parse_manifest(MANIFEST % "", "test"), (str(tmp_path),), 1.0)
    assert one.documents + one.held_out == 200
    assert 20 < one.held_out < 60
    assert one.left_out == {"null": 200}
    assert one.tokens == one.tokens_in_all == sum(len(f"document number {index}") + 1 for index in range(200))
    assert one.problems == ["b.png: not text; formats are text, jsonl, json, csv, parquet and arrow"]
    assert " | do" in one.sequence
    said = one.in_words()
    assert "200 read" in said
    assert "left out    200 null" in said
    assert f"in all      {one.tokens:,} tokens" in said


def test_a_part_of_the_files_gives_an_estimate_of_all_tokens():
    with serving({"a.jsonl": rows(40_000).encode(), "b.jsonl": rows(40_000).encode()}) as server:
        files = [{"url": server.of(name), "sha256": "a" * 64} for name in ("a.jsonl", "b.jsonl")]
        sources = f", sources: [{{kind: web, files: {json.dumps(files)}}}, {{weight: 3}}]"
        web, stdlib = preview(parse_manifest(MANIFEST % sources, "test"), (), 0.2, private_urls=True)
    assert 0.1 < web.share < 0.5
    real = 2 * sum(len(f"document number {index}") + 1 for index in range(40_000))
    assert real / 2 < web.tokens_in_all < real * 2
    assert (web.weight, stdlib.weight) == (1.0, 3.0)
    assert json.loads(json.dumps(stdlib.document()))["tokens_in_all"] > 5_000_000


def test_the_command_says_what_is_wrong(tmp_path: Path):
    (tmp_path / "run.yaml").write_text(MANIFEST % "")
    (tmp_path / "blob").write_bytes(b"\0")
    command = [sys.executable, "-m", "peer.cli", "data", "preview", str(tmp_path / "run.yaml"), "--train-files"]
    bad = subprocess.run([*command, str(tmp_path / "blob")], capture_output=True, text=True, check=False)
    assert bad.returncode == 2
    assert "the data set is empty: blob: " in bad.stderr
    with pytest.raises(UserError, match="--megabytes 0: must be above 0"):
        preview(parse_manifest(MANIFEST % "", "test"), (), 0.0)
