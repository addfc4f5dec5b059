"""Valid evidence against keys that were made for it: anybody can write as much of it as the line carries."""

from __future__ import annotations

import secrets

from peer.protocol.evidence import Evidence, TwoWords
from peer.protocol.identity import Identity
from peer.protocol.records import dump_json
from peer.protocol.wire import Kind
from peer.protocol.word import SignedWord, Word
from peer.swarm.trust.ban_list import MAX_NOTED, BanList
from peer.swarm.trust.verdict import Verdict
from tests.swarm.circle import Circle
from tests.swarm.gathering import until
from tests.swarm.runs import RUN

MEMBERS = tuple(sorted(Identity.generate().peer_id for _ in range(4)))


def against(identity):
    group = secrets.token_hex(32)
    first, second = (SignedWord.of(identity, Word(run_id=RUN, group=group, lacks=lacks, lacking=MEMBERS))
                     for lacks in ("contribution", "reduced"))  # fmt: skip
    finding = TwoWords(run_id=RUN, group=group, member=identity.peer_id, first=first, second=second)
    return dump_json(Evidence(finding=finding))


async def offer(network, victim, *evidence):
    stranger, answers = network.node(), []
    for one in evidence:
        stream = await stranger.open(victim.peer_id, f"atoll/{RUN[:16]}/evidence", "audit")
        await stream.send(Kind.EVIDENCE, one)
        answers.append((await stream.receive({Kind.END: 0, Kind.BUSY: 0}))[0])
        stream.close()
    return answers


async def test_it_bans_for_this_process_alone_and_is_not_passed_on(network, tmp_path):
    circle = await Circle(network, 3, folder=tmp_path).start()
    victim, *others = circle.seats
    made_up = [Identity.generate() for _ in range(5)]
    assert await offer(network, victim, *map(against, made_up)) == [Kind.END] * 5
    assert all(victim.guard.banned(one.peer_id) for one in made_up)
    await circle.round()  # in which members meet
    assert list(victim.guard.bans) == []
    assert [path for path in tmp_path.rglob("*.json") if path.stem in {one.peer_id for one in made_up}] == []
    assert not any(seat.guard.banned(one.peer_id) for seat in others for one in made_up)


async def test_once_the_offender_was_in_a_round_it_is_kept_and_passed_on(network, tmp_path):
    circle = await Circle(network, 3, folder=tmp_path).start()
    victim, offender = circle.seats[0], Identity.generate()
    await offer(network, victim, against(offender))
    for seat in circle.seats:
        seat.rosters._seen = lambda: {offender.peer_id: 1}
    await circle.round()
    await offer(network, victim, against(offender))
    await until(lambda: all(seat.guard.bans.convicts(offender.peer_id) for seat in circle.seats), 10.0)


def test_only_the_newest_are_known(tmp_path):
    bans = BanList(tmp_path)
    for number in range(MAX_NOTED + 10):
        bans.note(Verdict(f"peer {number}", "lied"))
    assert ("peer 9" in bans, "peer 10" in bans, bans.offence("peer 10")) == (False, True, "lied")
    assert list(tmp_path.iterdir()) == []
