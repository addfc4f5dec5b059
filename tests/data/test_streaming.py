"""Text that is read while it is trained on: real processes, a real server, faults in all of them."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import logging
import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from itertools import islice
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from peer.data import segments, sources
from peer.data.batches import Batches, DataState, LanePlace
from peer.data.corpus import Corpus, ReadingOptions, open_corpus
from peer.data.problems import SourceBusy
from peer.data.segments import HEADER_BYTES, read_segment
from peer.data.shards import DataFile, is_held_out
from peer.data.streamed import PATIENCE_S, Reading, StreamedSource
from peer.data.tokenizer import ByteTokenizer
from peer.errors import UserError
from peer.protocol.manifest import DataSpec, FileSpec, SourceSpec
from tests.data.web_server import WebServer, serving

LENGTH = 16
Text = dict[str, bytes]


@pytest.fixture(autouse=True)
def _nothing_stays_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "RESIDENT_BYTES", 0)


def documents(seed: int, count: int = 300) -> list[str]:
    rng = random.Random(seed)
    return [f"{seed} {index} " + "abcdefgh "[: rng.randrange(1, 9)] * rng.randrange(1, 20) for index in range(count)]


def parquet(texts: list[str]) -> bytes:
    sink = io.BytesIO()
    pq.write_table(pa.table({"text": texts}), sink, row_group_size=50)
    return sink.getvalue()


def jsonl(texts: list[str]) -> bytes:
    return "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()


FILES = {
    "a.parquet": parquet(documents(1)), "b.jsonl.gz": gzip.compress(jsonl(documents(2))),
    "c.jsonl": jsonl(documents(3)), "d.parquet": parquet(documents(4)), "e.txt": "\n".join(documents(5)).encode(),
}  # fmt: skip


def spec_of(server: WebServer, *mixes: tuple[str, float], fraction: float = 0.05) -> DataSpec:
    """Sources of the web, each of the files whose names begin with one of these letters."""
    web = [
        SourceSpec(kind="web", weight=weight, files=tuple(
            FileSpec(url=server.of(name), sha256=hashlib.sha256(data).hexdigest())
            for name, data in server.files.items() if name[0] in letters
        ))
        for letters, weight in mixes
    ]  # fmt: skip
    return DataSpec(sources=tuple(web), sequence_length=LENGTH, validation_fraction=fraction, validation_tokens=1024)


@pytest.fixture
def open_text(tmp_path: Path) -> Iterator[Callable[..., Corpus]]:
    opened: list[Corpus] = []

    def open_it(spec: DataSpec, folder: str = "cache", workers: int = 1, files: tuple[str, ...] = (),
                stopping: Callable[[], bool] = lambda: False) -> Corpus:  # fmt: skip
        options = ReadingOptions(train_files=files, cache=tmp_path / folder, workers=workers, hub_headers={},
                                 segment_bytes=2000, private_urls=True)  # fmt: skip
        opened.append(open_corpus(spec, ByteTokenizer(), options, 4, stopping))
        return opened[-1]

    yield open_it
    for corpus in opened:
        corpus.close()


def taken(batches: Batches, count: int) -> list[torch.Tensor]:
    found = [batch for batch, _ in islice(batches, count)]
    assert len(found) == count
    return found


def test_the_order_depends_on_nothing_but_the_seed(open_text):
    with serving(FILES) as server:
        spec = spec_of(server, ("abc", 2.0), ("de", 1.0))
        first = taken(Batches(open_text(spec).sources, 4, seed=7), 400)
        for folder, workers in (("cache", 1), ("other", 3)):  # segments of the cache; more processes
            again = taken(Batches(open_text(spec, folder, workers).sources, 4, seed=7), 400)
            assert all(torch.equal(one, two) for one, two in zip(first, again, strict=True))
        other = taken(Batches(open_text(spec).sources, 4, seed=8), 5)
        assert not all(torch.equal(one, two) for one, two in zip(first, other, strict=False))


def test_every_document_is_trained_on_once_an_epoch_and_none_that_validates(open_text):
    with serving({"c.jsonl": FILES["c.jsonl"]}) as server:
        corpus = open_text(spec_of(server, ("c", 1.0), fraction=0.2))
        texts = documents(3)
        held_out = [text for text in texts if is_held_out(text, 0.2)]
        tokenizer = ByteTokenizer()
        assert tokenizer.decode(corpus.validation.tokens).startswith("".join(held_out)[:200])
        batches = Batches(corpus.sources, 1, seed=0)
        rows = []
        for batch, state in batches:
            if state.sources[0].lanes[0].turn:
                break
            rows.append(batch[0])
        seen = "".join(tokenizer.decode(row.numpy()) for row in rows)
        trained = [text for text in texts if not is_held_out(text, 0.2)]
        kept = sum(len(text) + 1 for text in trained)
        assert len(rows) * LENGTH >= kept - LENGTH * (kept // 2000 + 2)  # a rest of each segment is not used
        assert all(f"3 {text.split()[1]} " not in seen for text in held_out if len(text.split()[1]) == 3)


@pytest.mark.parametrize("kind", ["web", "python-stdlib"])
def test_a_peer_with_files_of_its_own_validates_on_the_text_of_the_run(open_text, tmp_path, kind, monkeypatch):
    monkeypatch.setattr(sources, "RESIDENT_BYTES", 64 << 20)
    texts = documents(3)
    (tmp_path / "own.jsonl").write_bytes(jsonl([*documents(4), *texts]))
    with serving({"c.jsonl": FILES["c.jsonl"]}) as server:
        spec = spec_of(server, ("c", 1.0), fraction=0.2)
        if kind == "python-stdlib":
            spec = DataSpec(sequence_length=LENGTH, validation_fraction=0.05, validation_tokens=1024)
        others, own = open_text(spec), open_text(spec, files=(str(tmp_path / "own.jsonl"),))
        assert len(own.validation.tokens) > LENGTH
        assert np.array_equal(own.validation.tokens, others.validation.tokens)
        assert own.digest != others.digest
        trained = ByteTokenizer().decode(own.sources[0].windows.tokens)
        assert all((text in trained) == (not is_held_out(text, spec.validation_fraction)) for text in texts)


def test_without_the_text_of_the_run_a_peer_validates_on_its_own(open_text, tmp_path, caplog, monkeypatch):
    (tmp_path / "own.jsonl").write_bytes(jsonl(documents(4)))
    monkeypatch.setattr("peer.data.corpus.PATIENCE_S", 1.0)
    with serving({"c.jsonl": FILES["c.jsonl"]}) as server:
        spec = spec_of(server, ("c", 1.0), fraction=0.2)
    corpus = open_text(spec, files=(str(tmp_path / "own.jsonl"),))
    held_out = "".join(text for text in documents(4) if is_held_out(text, 0.2))
    assert held_out.startswith(ByteTokenizer().decode(corpus.validation.tokens))
    assert len(corpus.validation.tokens) > LENGTH
    assert [r.message for r in caplog.records if "its own files" in r.message] == [
        "the run's text for validation cannot be read, so this peer validates on its own files: "
        "no source answered within 1 s"]


@pytest.mark.parametrize("seed", range(10))
def test_interruptions_change_nothing(open_text, seed):
    """50 in all: each forgets what was made since the last saved state; half of them kill the reading process, too."""
    rng = random.Random(seed)
    with serving(FILES) as server:
        spec = spec_of(server, ("abc", 3.0), ("de", 1.0))
        expected = taken(Batches(open_text(spec, "whole").sources, 4, seed=1), 300)
        found: list[torch.Tensor] = []
        state = None
        corpus = open_text(spec, "cut")
        for number in range(5):
            batches = Batches(corpus.sources, 4, seed=1, state=state)
            saved = len(found) + rng.randrange(20, 50)
            found += taken(batches, saved - len(found))
            state = DataState.from_dict(json.loads(json.dumps(batches.state.to_dict())))
            kills = number % 2
            if kills:
                os.kill(corpus.workers.process_ids[0], signal.SIGKILL)
            taken(batches, rng.randrange(0, 30))  # lost: it was not saved
            if kills:
                corpus.close()
                corpus = open_text(spec, f"cut{number}" if rng.random() < 0.5 else "cut")
        assert all(torch.equal(one, two) for one, two in zip(expected, found, strict=False))
        assert len(found) >= 100


def test_a_source_that_is_down_is_tried_again_while_the_others_go_on(open_text, caplog, monkeypatch):
    monkeypatch.setattr("peer.data.streamed.RETRY_S", 0.05)
    with serving(FILES) as server:
        spec = spec_of(server, ("c", 1.0), ("e", 1.0))
        corpus = open_text(spec)
        server.answers["c.jsonl"] = [429, 503]
        server.breaks["c.jsonl"] = 3
        for path in (corpus.sources[0]._reading.cache.folder).glob("*"):
            path.unlink()
        for source in corpus.sources:
            source._ordered.clear()
        steps_of_the_other_alone = 0
        with caplog.at_level(logging.WARNING):
            deadline = time.monotonic() + 30
            for _, state in Batches(corpus.sources, 4, seed=1):
                again, other = (source.lanes[0] != LanePlace() for source in state.sources)  # whether it was read
                steps_of_the_other_alone += other and not again
                if again or time.monotonic() > deadline:
                    break
        told = [record.getMessage() for record in caplog.records]
        assert any("cannot be read now; trying again in" in line and "429" in line for line in told)
        assert again, "the source that was down was not read again within 30 s"
        assert steps_of_the_other_alone > 8


def test_a_file_that_is_gone_is_named_and_the_others_are_trained_on(open_text, caplog):
    with serving(FILES) as server:
        spec = spec_of(server, ("ac", 1.0))
        del server.files["a.parquet"]
        corpus = open_text(spec)
        taken(Batches(corpus.sources, 4, seed=1), 50)
    assert "a.parquet: 404" in caplog.text.replace(server.url + "/", "")


def test_content_that_is_not_the_promised_one_is_refused(open_text, caplog):
    with serving(FILES) as server:
        spec = spec_of(server, ("ac", 1.0))
        server.files["a.parquet"] = parquet(documents(9))
        taken(Batches(open_text(spec).sources, 4, seed=1), 50)
        assert "a.parquet: its SHA-256 is" in caplog.text
        server.files["c.jsonl"] = jsonl(documents(8))
        with pytest.raises(UserError, match="no source has text to train on"):
            taken(Batches(open_text(spec, "other").sources, 4, seed=1), 1)


def test_a_source_without_text_is_over_and_says_what_was_left_out(open_text, caplog):
    bad = jsonl([]) + b'{"text": null}\n{"text": 7}\n' * 10
    with serving({"a.jsonl": bad, "c.jsonl": FILES["c.jsonl"]}) as server:
        corpus = open_text(spec_of(server, ("a", 5.0), ("c", 1.0)))
        taken(Batches(corpus.sources, 4, seed=1), 50)
        assert corpus.sources[0].over
        assert "has no text to train on: 0 documents, 0 tokens; left out: " in caplog.text
        assert "10 rows null, 10 rows number" in caplog.text
        with pytest.raises(UserError, match=r"no source has text to train on|validation text has 0 tokens"):
            taken(Batches(open_text(spec_of(server, ("a", 1.0)), "o").sources, 4, seed=1), 1)


def test_a_segment_that_was_damaged_on_the_disk_is_made_again(open_text, tmp_path):
    with serving(FILES) as server:
        spec = spec_of(server, ("c", 1.0))
        first = taken(Batches(open_text(spec).sources, 4, seed=1), 200)
        paths = sorted((tmp_path / "cache").glob("*.tokens"))
        assert len(paths) > 3
        for number, path in enumerate(paths):
            data = bytearray(path.read_bytes())
            data[(HEADER_BYTES + 10) if number % 2 else 5] ^= 1
            path.write_bytes(data[: len(data) - (number % 3 == 0)])
            assert read_segment(path) is None
        again = taken(Batches(open_text(spec).sources, 4, seed=1), 200)
    assert all(torch.equal(one, two) for one, two in zip(first, again, strict=True))


def test_the_cache_keeps_to_its_limit_and_forgets_what_was_used_least(tmp_path):
    cache = segments.SegmentCache(tmp_path, 1000)
    for number in range(5):
        path = tmp_path / f"{number}.tokens"
        path.write_bytes(b"x" * 400)
        os.utime(path, (number, number))
    cache.trim()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["3.tokens", "4.tokens"]


def test_the_readers_end_with_their_trainer(open_text):
    with serving(FILES) as server:
        corpus = open_text(spec_of(server, ("c", 1.0)), workers=2)
        processes = corpus.workers.process_ids
        assert len(processes) == 2
        corpus.close()
    for process in processes:
        with pytest.raises(ProcessLookupError):
            os.kill(process, 0)


def test_waiting_for_the_first_text_can_be_given_up(open_text):
    with serving(FILES) as server:
        spec = spec_of(server, ("c", 1.0))
        server.answers["c.jsonl"] = [503] * 1000
        looks = []
        with pytest.raises(UserError, match="validation text has 0 tokens"):
            open_text(spec, stopping=lambda: looks.append(0) or len(looks) > 3)
    assert len(looks) == 4


def test_a_manifest_cannot_have_all_its_text_looked_through_for_validation(open_text, monkeypatch):
    monkeypatch.setattr("peer.data.streamed.MAX_LOOKED_THROUGH", 4000)
    with serving(FILES) as server:
        corpus = open_text(spec_of(server, ("c", 1.0), fraction=0.2))
    held_out = [text for text in documents(3) if is_held_out(text, 0.2)]
    assert 2 * LENGTH < len(corpus.validation.tokens) < sum(map(len, held_out)) / 2


def test_a_reader_that_ends_again_and_again_is_a_users_problem(open_text, monkeypatch):
    monkeypatch.setattr("peer.data.workers.MAX_RESTARTS", 0)
    with serving(FILES) as server:
        corpus = open_text(spec_of(server, ("c", 1.0)))
        os.kill(corpus.workers.process_ids[0], signal.SIGKILL)
        with pytest.raises(UserError, match="cannot be read: the process that reads text ended 1 times, last with -9"):
            taken(Batches(corpus.sources, 4, seed=1), 1000)
        with pytest.raises(UserError, match="the process that reads text ended"):
            taken(Batches(corpus.sources, 4, seed=2), 1000)  # an order after its end is answered, too


def test_a_source_that_gives_nothing_is_told_and_lets_the_others_give_its_share(tmp_path, caplog):
    class Silent:
        def order(self, _: object) -> Future[object]:
            return Future()

    now = [100.0]
    reading = Reading(Silent(), segments.SegmentCache(tmp_path, 10**6), "0" * 64, LENGTH, lambda: now[0])
    rule = segments.SegmentRule(column="text", fraction=0.1, limit_bytes=100)
    source = StreamedSource(reading, "slow", 0, [(DataFile(name="a", place="/a", tag=""),)], rule, 1.0)
    for elapsed, down in ((0.0, False), (PATIENCE_S - 1, False), (2.0, True)):
        now[0] += elapsed
        with pytest.raises(SourceBusy):
            source.segment(0, LanePlace(), 0)
        assert source.down is down
    assert "slow gives no text for 31 s; still waiting" in caplog.text
