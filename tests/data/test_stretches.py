"""Streams that peers share out: stretches of files are leased, segments of others fall to a peer by its identity."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import re
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from peer.data import sources
from peer.data.batches import Batches, LanePlace
from peer.data.corpus import Corpus, ReadingOptions, Sharing, open_corpus
from peer.data.cut_files import read_stretch
from peer.data.problems import FileProblem, SourceBusy
from peer.data.seeded import SeededSegments
from peer.data.shards import COPY
from peer.data.shareable import shared_data
from peer.data.shared import SharedWindows
from peer.data.streamed import StreamedSource
from peer.data.tokenizer import ByteTokenizer
from peer.link.messages import Leased, LivePeers
from peer.protocol.data_spec import PARTS_PER_SHARD, DataSpec, FileSpec, SharedData, SourceSpec
from peer.protocol.manifest import RunManifest
from peer.protocol.ranges import Range, joined
from tests.data.web_server import WebServer, serving

LENGTH = 32


def texts(seed: int, count: int) -> list[str]:
    return [f"{seed}:{index:04} " * (2 + index % 5) for index in range(count)]


def documents_in(rows: Iterable[str]) -> set[str]:
    return {found for row in rows for found in re.findall(r"\b\d:\d{4}\b", row)}


def parquet(rows: list[str]) -> bytes:
    sink = io.BytesIO()
    pq.write_table(pa.table({"text": rows}), sink, row_group_size=50)
    return sink.getvalue()


def jsonl(rows: list[str]) -> bytes:
    return "".join(json.dumps({"text": text}) + "\n" for text in rows).encode()


@pytest.mark.parametrize("of", [1, 2, 7, 500])
@pytest.mark.parametrize(("name", "write"), [("a.parquet", parquet), ("a.jsonl", jsonl)])
def test_each_row_is_in_one_stretch(name, write, of):
    rows = texts(1, 211)
    data = write(rows)
    found = [[value for value, _ in read_stretch(io.BytesIO(data), name, "text", (i, of))] for i in range(of)]
    assert [row for stretch in found for row in stretch] == rows
    assert of > 7 or max(map(len, found)) < 3 * len(rows) / of


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.txt", "a.json"])
def test_a_file_that_is_read_from_its_beginning_has_no_stretches(name):
    with pytest.raises(FileProblem, match="from its beginning"):
        next(read_stretch(io.BytesIO(b"x"), name, "text", (0, 2)))


def spec_of(server: WebServer, *names: str) -> DataSpec:
    files = tuple(
        FileSpec(url=server.of(name), sha256=hashlib.sha256(server.files[name]).hexdigest()) for name in names
    )
    source = SourceSpec(kind="web", files=files)
    return DataSpec(sources=(source,), sequence_length=LENGTH, validation_tokens=1024, shard_sequences=64)


def cut_of(spec: DataSpec) -> SharedData | None:
    model = {"architecture": "llama", "config": {"vocab_size": 264}}
    manifest = RunManifest.model_validate({"name": "x", "model": model})
    return shared_data(manifest.model_copy(update={"data": spec}), ByteTokenizer(), 64)


@contextmanager
def corpus_of(spec: DataSpec, folder: Path, peer_id: str) -> Iterator[Corpus]:
    options = ReadingOptions(
        cache=folder / peer_id, hub_headers={}, private_urls=True, segment_bytes=2000,
        sharing=Sharing(peer_id=peer_id, run_seed=5, least_tokens=64),
    )  # fmt: skip
    corpus = open_corpus(spec, ByteTokenizer(), options, 1)
    try:
        yield corpus
    finally:
        corpus.close()


def read(corpus: Corpus, count: int) -> list[str]:
    deadline = time.monotonic() + 60.0
    batches = Batches(corpus.sources, 1, 0, waiting=lambda s: time.sleep(s) or time.monotonic() > deadline)
    return [ByteTokenizer().decode(batch[0].numpy()) for batch, _ in islice(batches, count)]


def test_stretches_of_files_are_leased_and_read_once(tmp_path):
    names = {"a.parquet": parquet(texts(1, 400)), "b.jsonl": jsonl(texts(2, 300))}
    with serving(names) as server:
        spec = spec_of(server, *names)
        cut = cut_of(spec)
        assert cut is not None
        (shards,) = cut.shards
        assert shards % 2 == 0
        assert 8 <= shards <= 40
        assert 16 * LENGTH < cut.shard_tokens < 64 * LENGTH * 3
        spec = spec.model_copy(update={"shared": cut})
        halves: list[list[str]] = []
        for peer_id, first in (("one", 0), ("two", shards // 2)):
            with corpus_of(spec, tmp_path, peer_id) as corpus:
                (source,) = corpus.sources
                assert isinstance(source, SharedWindows)
                pieces = [Range(0, shard * 16, (shard + 1) * 16) for shard in range(first, first + shards // 2)]
                corpus.shared.hear(Leased(number=1, taken=tuple(pieces)))
                rows = []
                while source.queue:
                    rows += read(corpus, 1)
                assert joined(source.used)[0] == Range(0, first * 16, (first + shards // 2) * 16)
                assert source.unleased <= 1
                halves.append(rows)
                assert len(list((tmp_path / peer_id).glob(f"*{COPY}"))) == 1  # of the one file that it needs
        one, two = map(documents_in, halves)
        assert {document[0] for document in one} == {"1"}
        assert {document[0] for document in two} == {"2"}
        assert len(one | two) > 0.85 * 700  # one in twenty validates, and of a shard the last window is cut off


def test_a_large_shard_is_made_in_blocks_of_a_few_parts(tmp_path, monkeypatch):
    monkeypatch.setattr("peer.protocol.data_spec.BLOCK_TOKENS", 64 * LENGTH)
    names = {"a.parquet": parquet(texts(1, 1600))}
    with serving(names) as server:
        spec = spec_of(server, *names)
        cut = cut_of(spec)
        assert cut is not None
        spec = spec.model_copy(update={"shared": cut.model_copy(update={"shards": (1,), "shard_tokens": 16 * 1000})})
        assert spec.shared is not None
        assert spec.shared.block_parts == 2
        with corpus_of(spec, tmp_path, "one") as corpus:
            (source,) = corpus.sources
            assert isinstance(source, SharedWindows)
            corpus.shared.hear(Leased(number=1, taken=(Range(0, 0, PARTS_PER_SHARD),)))
            read(corpus, 100)
            (used,) = joined(source.used)
            assert used.first == 0
            assert 1 <= used.end < 8
            while source.queue:
                read(corpus, 1)
            assert joined(source.used)[0].end == PARTS_PER_SHARD
            segments = [path for path in (tmp_path / "one").glob("*.tokens") if path.stat().st_size > 4096]
            assert len(segments) >= PARTS_PER_SHARD // 2


def first_epoch(source: StreamedSource, files: int) -> list[str]:
    rows = []
    for lane in range(source.lanes):
        place = LanePlace()
        while place.turn * source.lanes + lane < files:
            try:
                segment = source.segment(lane, place, seed=7)
            except SourceBusy:
                time.sleep(0.01)
                continue
            windows, place = segment.windows, segment.next
            rows += [ByteTokenizer().decode(windows.window(index).numpy()) for index in range(len(windows))]
    return rows


@pytest.mark.parametrize("files", [1, 24], ids=["by segment", "by file"])
def test_segments_of_a_stream_of_unknown_length_fall_to_one_peer_each(tmp_path, files):
    names = {
        f"{number:02}.jsonl.gz": gzip.compress(jsonl(texts(1, 480)[number::files])) for number in range(files)
    }
    peers = ["one", "two", "three"]
    with serving(names) as server:
        spec = spec_of(server, *names)
        assert cut_of(spec) is None
        found, asked = [], []
        for peer_id in peers:
            with corpus_of(spec, tmp_path, peer_id) as corpus:
                server.requests.clear()  # of what validates
                (source,) = corpus.sources
                assert isinstance(source, StreamedSource)
                corpus.shared.hear(LivePeers.model_construct(peers=dict.fromkeys(peers)))
                found.append(documents_in(first_epoch(source, files)))
            asked.append({path for path, _, _ in server.requests})
    one, two, three = found
    assert min(map(len, found)) > 480 / 12
    assert len(one | two | three) == len(one) + len(two) + len(three)
    assert len(one | two | three) > 0.8 * 480
    assert files == 1 or max(map(len, asked)) < 20  # what is another peer's is not even fetched


def test_many_files_fall_to_peers_as_wholes():
    rules = [SeededSegments(3, peer, 0) for peer in ("a", "b", "c")]
    for rule in rules:
        rule.peers = ("a", "b", "c")
    assert rules[0].whole_files(24)
    assert not rules[0].whole_files(23)
    owners = [[rule.mine(0, file, 0) for rule in rules] for file in range(300)]
    assert all(sum(one) == 1 for one in owners)
    assert min(map(sum, zip(*owners, strict=True))) > 70
    assert owners != [[rule.mine(1, file, 0) for rule in rules] for file in range(300)]


@pytest.fixture(autouse=True)
def _nothing_stays_in_memory(monkeypatch):
    monkeypatch.setattr(sources, "RESIDENT_BYTES", 0)
