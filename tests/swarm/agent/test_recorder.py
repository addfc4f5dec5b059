"""What the agent adds to a record, and that it is on disk before the trainer hears of it."""

from __future__ import annotations

from types import SimpleNamespace

from peer.explain.journal import JournalReader, RoundJournal
from peer.link.messages import Anchor, RoundEnded
from peer.outer.record import RoundRecord
from peer.protocol.records import PeerRecord
from peer.swarm.agent.recorder import Recorder


def peer(nickname):
    return PeerRecord(
        run_id="0" * 64, nickname=nickname, state="training", round=1, lineage_id="a" * 64, lineage_weight=1,
        expires_at=1.0,
    )  # fmt: skip


class Agent:
    def __init__(self, folder):
        self.peers, self.told = {"B": peer("bravo"), "C": peer("charlie")}, []
        self._reader = JournalReader(folder)
        trainer = SimpleNamespace(tell=self._hear)
        self._recorder = Recorder(RoundJournal(folder), "A", "alpha", self, trainer, lambda: 12.5)

    def _hear(self, message):
        on_disk = self._reader.poll().records
        if isinstance(message, RoundEnded):
            assert on_disk == [message.record]
        self.told.append(message)

    def tell(self, **fields):
        self._recorder.tell(RoundEnded(record=RoundRecord(lineage_id="a" * 64, **fields)))
        return self.told[-1].record

    def pass_on(self, message):
        self._recorder.tell(message)


def test_a_record_gets_its_time_its_owner_and_the_names_in_it(tmp_path):
    record = Agent(tmp_path).tell(status="committed", round=1, members=("A", "B"), weights=(1, 2))
    assert (record.ended_at, record.peer_id) == (12.5, "A")
    assert record.nicknames == {"A": "alpha", "B": "bravo"}
    assert record.weights == (1, 2)


def test_culprits_and_donors_are_named_even_if_they_are_no_members(tmp_path):
    agent = Agent(tmp_path)
    assert agent.tell(status="aborted", round=1, culprit="C").nicknames == {"A": "alpha", "C": "charlie"}
    assert agent.tell(status="caught_up", round=1, donor="B").nicknames == {"A": "alpha", "B": "bravo"}


def test_who_was_in_the_last_group_is_still_named_after_it_has_left_the_directory(tmp_path):
    agent = Agent(tmp_path)
    agent.tell(status="committed", round=1, members=("A", "B", "C"), weights=(1, 1, 1))
    agent.peers = {}
    agent.tell(status="aborted", round=2, alone=True)
    assert agent.tell(status="aborted", round=2, culprit="C").nicknames["C"] == "charlie"
    agent.tell(status="committed", round=2, members=("A", "B"), weights=(1, 1))
    assert "C" not in agent.tell(status="aborted", round=3, culprit="C").nicknames


def test_other_messages_pass_as_they_are(tmp_path):
    agent = Agent(tmp_path)
    anchor = Anchor(round=1, lineage_id="a" * 64, contributed=None)
    agent.pass_on(anchor)
    assert agent.told == [anchor]
    assert JournalReader(tmp_path).poll().records == []
