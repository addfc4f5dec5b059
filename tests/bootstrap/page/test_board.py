"""What the board tells of a run: certified figures before claimed ones, history that is complete, changes alone."""

from __future__ import annotations

import asyncio

import pytest

from bootstrap.page.open import look_whenever
from tests.bootstrap.page.boards import MANIFEST, Watching
from tests.explain.samples import aborted, committed
from tests.swarm.runs import TOKENS


@pytest.fixture
def watching(tmp_path):
    return Watching(tmp_path)


async def test_rounds_and_tokens_are_those_of_the_chain_whatever_peers_claim(tmp_path):
    watching = Watching(tmp_path, rounds=4)
    watching.join(round=900, lineage_weight=2**50)
    board = await watching.look()
    now = board.now()
    assert (now["round"], now["tokens"], now["done"]) == (4, 4 * 3 * TOKENS, 0.1)
    assert now["lineage_id"] == watching.run.history.lineage_id(4)
    assert {row["nickname"]: (row["rounds"], row["contributed"]) for row in board.peers()} == dict.fromkeys(
        ("alpha", "bravo", "charlie"), (4, 4 * TOKENS)
    )


async def test_credit_follows_from_the_chain_and_outlasts_those_who_left(tmp_path):
    watching = Watching(tmp_path, rounds=4)
    watching.run.identities.pop()
    watching.run.commit(2)
    watching.join()
    board = await watching.look()
    credit = board.credit(50)
    assert [(row["tokens"], row["rounds"]) for row in credit] == [(6 * TOKENS, 6), (6 * TOKENS, 6), (4 * TOKENS, 4)]
    assert credit[2]["peer_id"] == watching.members[2]
    assert {row["nickname"] for row in credit} == {"alpha", "bravo", "charlie"}
    assert len(board.credit(1)) == 1


async def test_the_history_is_rebuilt_from_the_chain_where_no_peer_tells(tmp_path):
    watching = Watching(tmp_path, rounds=6)
    watching.join()
    board = await watching.look()
    rows = board.rounds(50, None, None)
    assert [row["round"] for row in rows] == [6, 5, 4, 3, 2, 1]
    assert rows[0]["headline"] == "committed with alpha, bravo and charlie"
    assert rows[0]["details"] == [f"weights in tokens: alpha {TOKENS}, bravo {TOKENS}, charlie {TOKENS}"]
    assert (rows[0]["at"], rows[0]["lineage"]) == (None, "certified")
    watching.run.commit(2, seed=9)
    board = await watching.look()
    assert [(row["round"], row["at"]) for row in board.rounds(2, None, None)] == [
        (8, watching.watched.now), (7, watching.watched.now),
    ]  # fmt: skip


async def test_a_long_chain_is_taken_over_step_by_step(tmp_path, monkeypatch):
    monkeypatch.setattr("bootstrap.page.board.NEW_LINKS", 4)
    watching = Watching(tmp_path, rounds=10)
    rounds = []
    for _ in range(3):
        board = await watching.look()
        rounds.append(board.rounds(1, None, None)[0]["round"])
    assert rounds == [4, 8, 10]


async def test_rounds_of_a_chain_that_was_given_up_are_marked(tmp_path):
    watching = Watching(tmp_path, rounds=3)
    await watching.look()
    other = Watching(tmp_path / "other", rounds=2)
    other.run.commit(2, seed=5)
    watching.run.history.replace(other.run.history.chain)
    board = await watching.look()
    told = {(row["round"], row["lineage"]) for row in board.rounds(50, None, None)}
    assert {(4, "certified"), (3, "certified"), (3, "other")} <= told


async def test_what_was_seen_before_a_restart_is_still_told_after_it(tmp_path):
    watching = Watching(tmp_path, rounds=2)
    watching.join()
    watching.watched.report(watching.members[0], aborted(3, 104.0, "exchange", f"{watching.members[1]} is slow"))
    await watching.look()
    watching.reopen()
    board = await watching.look()
    (failed,) = board.rounds(10, None, "aborted")
    assert failed["teller"] == "alpha"
    assert failed["details"][0] == "reason: bravo is slow"
    assert board.events_seen == {"points": 1, "committed": 2, "aborted": 1}
    assert len(board.history.curve(10)["time"]) == 2


async def test_an_update_holds_changes_alone(watching):
    watching.join()
    first = watching.board.version
    board = await watching.look()
    assert len(board.newest.document["peers"]) == 3
    board = await watching.look(1.0)
    assert board.newest.document["peers"] == []
    watching.watched.peer(watching.members[0], "alpha", loss=2.0)
    board = await watching.look(1.0)
    (row,) = board.newest.document["peers"]
    assert row == {"peer_id": watching.members[0], "loss": 2.0}
    assert board.newest.document["version"] == board.version == first + 3
    watching.watched.report(watching.members[0], aborted(3, 104.0, "exchange", "x"))
    board = await watching.look()
    assert [row["status"] for row in board.newest.document["rounds"]] == ["aborted"]
    assert (await watching.look()).newest.document["rounds"] == []


async def test_a_round_that_gets_its_words_later_is_told_again(tmp_path):
    watching = Watching(tmp_path, rounds=1)
    watching.join()
    board = await watching.look()
    assert board.newest.document["rounds"][0]["headline"] == "committed with alpha, bravo and charlie"
    watching.watched.report(watching.members[0], watching.told())
    board = await watching.look()
    (row,) = board.newest.document["rounds"]
    assert row["headline"] == "committed with alpha, bravo and charlie in 0.50 s; persistent group"
    assert len(board.rounds(10, None, None)) == 1


async def test_pace_and_the_time_that_is_left(watching):
    watching.run.commit(1)
    for seed in range(10):
        watching.join()
        board = await watching.look(30.0)
        watching.run.commit(1, seed=seed + 1)
    now = board.now()
    assert now["eta_s"] == pytest.approx(30.0 * 30)
    assert now["committed_tokens_per_s"] == pytest.approx(3 * TOKENS / 30.0)


async def test_a_run_without_an_end_has_no_time_left(tmp_path):
    endless = MANIFEST.model_copy(update={"rounds": MANIFEST.rounds.model_copy(update={"total": None})})
    now = (await Watching(tmp_path, manifest=endless).look()).now()
    assert (now["done"], now["eta_s"]) == (None, None)


async def test_a_disk_that_refuses_stops_no_page(watching, monkeypatch, caplog):
    def refuse(*_):
        raise OSError("No space left on device")

    monkeypatch.setattr(watching.history, "add", refuse)
    watching.join()
    board = await watching.look()
    assert board.now()["states"]["training"] == 3
    assert "the history is not written: No space left on device" in caplog.text


async def test_samples_are_told_once(watching):
    watching.join()
    for peer_id in watching.members:
        watching.watched.report(peer_id, sample="def f():")
    board = await watching.look()
    assert [one["text"] for one in board.samples()] == ["def f():"]


async def test_rounds_between_the_chain_and_what_peers_tell_are_not_left_out(tmp_path):
    """As after a restart: peers tell of their newest rounds before the chain up to there is known."""
    watching = Watching(tmp_path, rounds=2)
    ahead = Watching(tmp_path / "ahead", rounds=9)
    watching.watched.peer(ahead.members[0], "alpha")
    watching.watched.report(ahead.members[0], ahead.told())
    board = await watching.look()
    assert [row["round"] for row in board.rounds(50, None, None)] == [9, 2, 1]
    watching.run.history.replace(ahead.run.history.chain)
    board = await watching.look()
    certified = [row["round"] for row in board.rounds(50, None, None) if row["lineage"] == "certified"]
    assert sorted(certified) == list(range(1, 10))


async def test_a_round_that_a_stranger_invents_hides_none_of_the_chain(tmp_path):
    watching = Watching(tmp_path)
    watching.join()
    watching.watched.report(watching.members[0], committed(10**9, 100.0, tuple(watching.members)))
    await watching.look()
    watching.run.commit(3)
    board = await watching.look()
    assert [row["round"] for row in board.rounds(2, None, None)] == [3, 2]
    quiet = await watching.look()
    assert quiet.newest.document["rounds"] == []


async def test_rounds_that_were_made_while_the_bootstrap_was_away_have_no_time(tmp_path):
    watching = Watching(tmp_path, rounds=2)
    await watching.look()
    watching.run.commit(3, seed=5)
    watching.reopen()
    board = await watching.look()
    assert [row["at"] for row in board.rounds(3, None, None)] == [None] * 3


async def test_a_clock_that_is_set_back_stops_neither_history_nor_pace(tmp_path):
    watching = Watching(tmp_path, rounds=2)
    await watching.look()
    watching.watched.now -= 3e7
    watching.run.commit(2, seed=5)
    for _ in range(3):
        board = await watching.look()
        watching.run.commit(2, seed=5)
    assert len(board.history.curve(10)["time"]) == 4
    assert board.now()["committed_tokens_per_s"] == pytest.approx(2 * 3 * TOKENS / 5.0)
    assert board.version > 3e7


async def test_a_disk_that_refuses_stops_no_update(tmp_path, caplog, monkeypatch):
    watching = Watching(tmp_path, rounds=2)
    board = await watching.look()

    def refuse(*_):
        raise OSError("no space left")

    for name in ("add", "certified", "named"):
        with monkeypatch.context() as patch:
            patch.setattr(board.history, name, refuse)
            watching.reopen() if name == "certified" else None
            patch.setattr(watching.history, name, refuse)
            version = watching.board.version
            await watching.look()
            assert watching.board.version == version + 1
    assert "the history is not written: no space left" in caplog.text


async def test_a_look_that_fails_is_not_the_last_one(caplog):
    new, looks = asyncio.Event(), []

    class Board:
        async def look(self):
            looks.append(len(looks))
            new.set()
            if len(looks) == 1:
                raise ValueError("a bug")
            if len(looks) == 3:
                raise asyncio.CancelledError

    new.set()
    with pytest.raises(asyncio.CancelledError):
        await look_whenever(new, Board())
    assert looks == [0, 1, 2]
    assert "the page could not be updated" in caplog.text
