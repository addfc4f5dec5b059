"""Who is let into an invited run: forged, borrowed, replayed, expired and revoked passes and tokens are refused."""

from __future__ import annotations

import asyncio

import pytest

from bootstrap.invitations import InvitationRegistry
from peer.errors import ProtocolError, UserError
from peer.protocol.identity import Identity
from peer.protocol.invitation import Invitation, Pass, open_invitation, seal_invitation
from peer.protocol.records import PeerRecord
from peer.protocol.wire import Kind
from peer.swarm.net.directory import Directory
from peer.swarm.net.entering import enter
from peer.swarm.net.gate import Gate
from peer.swarm.net.stream import StreamClosedError

RUN, OTHER_RUN = "ab" * 32, "cd" * 32
ORGANISER, STRANGER, GUEST, THIEF = (Identity.generate() for _ in range(4))
NOW = 1_000_000_000.0
NAME = f"atoll/{RUN[:16]}/history"


class Control:
    """A control record that revokes."""

    def __init__(self, *revoked):
        self.revoked = set(revoked)

    def revokes(self, number):
        return number in self.revoked


def gate(control=None, now=NOW):
    return Gate(RUN, ORGANISER.peer_id, control or Control(), lambda: now)


def passes(number=1, signer=ORGANISER, run=RUN, peer=GUEST, expires_at=int(NOW) + 3600):
    return Pass(number, expires_at).sign(signer, run, peer.peer_id)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "shows no invitation"),
        ("1.2.3", "shows no invitation"),
        ("x.1." + "A" * 86, "shows no invitation"),
        (passes(signer=STRANGER), "has not signed"),
        (passes(signer=GUEST), "has not signed"),
        (passes(run=OTHER_RUN), "has not signed"),
        (passes(peer=THIEF), "has not signed"),
        ("2" + passes()[1:], "has not signed"),
        (passes().replace(f".{int(NOW) + 3600}.", f".{int(NOW) + 9999}."), "has not signed"),
        (passes(expires_at=int(NOW)), "invitation 1 has expired"),
        (passes(number=7), "invitation 7 is revoked"),
    ],
    ids=["none", "short", "no number", "stranger", "own", "run", "borrowed", "number", "time", "expired", "revoked"],
)
def test_a_pass_that_the_organiser_has_not_signed_for_this_peer_now_lets_nobody_in(text, problem):
    guard = gate(Control(7))
    with pytest.raises(ProtocolError, match=problem):
        guard.admit(GUEST.peer_id, text)
    guard.admit(GUEST.peer_id, passes())
    guard.admit(ORGANISER.peer_id, "")


def test_a_peer_that_was_in_is_out_once_its_invitation_is_revoked_or_over():
    control, now = Control(), [NOW]
    guard = Gate(RUN, ORGANISER.peer_id, control, lambda: now[0])
    assert guard.void(GUEST.peer_id) == ""
    guard.admit(GUEST.peer_id, passes())
    assert guard.void(GUEST.peer_id) == ""
    control.revoked.add(1)
    assert guard.void(GUEST.peer_id) == "is out: its invitation 1 is revoked"
    with pytest.raises(ProtocolError, match="is revoked"):
        guard.admit(GUEST.peer_id, passes())
    control.revoked.clear()
    now[0] += 3600.0
    assert guard.void(GUEST.peer_id) == "is out: its invitation 1 has expired"


async def test_every_stream_of_the_run_is_checked_and_those_for_strangers_are_not(network):
    host, guest, thief = (network.node(identity) for identity in (ORGANISER, GUEST, THIEF))
    control, served = Control(), []

    async def answer(stream):
        served.append(stream.remote)
        await stream.send(Kind.END)

    for name in (NAME, f"atoll/{RUN[:16]}/control", "atoll/manifest"):
        await host.serve(name, "history", answer)
    host.gates = (Gate(RUN, STRANGER.peer_id, control, lambda: NOW),)  # its organiser is elsewhere
    for node, text in ((guest, passes(signer=STRANGER)), (thief, passes(signer=STRANGER))):
        node.gates = (Gate(RUN, STRANGER.peer_id),)
        node.gates[0].own = text

    async def asks(node, name=NAME):
        stream = await node.open(host.peer_id, name, "history")
        try:
            return (await stream.receive({Kind.END: 0}, timeout_s=5.0))[0] is Kind.END
        except StreamClosedError:
            return False
        finally:
            stream.close()

    assert [await asks(guest), await asks(guest), await asks(thief)] == [True, True, False]
    assert served == [GUEST.peer_id] * 2
    control.revoked.add(1)
    assert not await asks(guest)
    assert await asks(thief, f"atoll/{RUN[:16]}/control")
    assert await asks(thief, "atoll/manifest")
    thief.gates = ()  # it sends no pass at all, but the first frame of a request
    stream = await thief.open(host.peer_id, NAME, "history")
    await stream.send(Kind.REQUEST, b"{}")
    with pytest.raises(StreamClosedError):
        await stream.receive({Kind.END: 0}, timeout_s=5.0)


async def test_records_without_a_valid_pass_are_not_shown(network, monkeypatch):
    reader, guest, thief = (network.node(identity) for identity in (ORGANISER, GUEST, THIEF))
    control = Control()
    directory = Directory(reader, RUN, lambda: NOW)
    directory.gate = gate(control)

    def record(node, text, now=NOW):
        made = PeerRecord(run_id=RUN, nickname="x", state="training", round=1, lineage_id=RUN, lineage_weight=1,
                          invitation=text, expires_at=NOW + 15.0)  # fmt: skip
        return Directory(node, RUN, lambda: now).sealed(made)

    found = {GUEST.peer_id: record(guest, passes()), THIEF.peer_id: record(thief, passes())}

    async def read(*_):
        return found

    monkeypatch.setattr("peer.swarm.net.directory.read_records", read)
    directory = Directory(network.node(STRANGER), RUN, lambda: NOW)
    directory.gate = gate(control)
    await directory.refresh()
    assert list(directory.peers) == [GUEST.peer_id]
    control.revoked.add(7)  # that of an older record, which is published again
    found[GUEST.peer_id] = record(guest, passes(number=7), NOW - 10.0)
    await directory.refresh()
    assert list(directory.peers) == [GUEST.peer_id]
    control.revoked.add(1)
    assert list(directory.peers) == []


def book(folder, now=NOW):
    return InvitationRegistry(folder, RUN, ORGANISER, lambda: now)


def test_a_token_is_bound_to_the_key_that_shows_it_first_across_restarts(tmp_path):
    token = book(tmp_path).invite("ada", 3600.0)
    text = book(tmp_path).bind(token, GUEST.peer_id, Control())
    gate().admit(GUEST.peer_id, text)
    assert book(tmp_path).bind(token, GUEST.peer_id, Control()) == text
    with pytest.raises(UserError, match="is used by another key"):
        book(tmp_path).bind(token, THIEF.peer_id, Control())
    with pytest.raises(UserError, match="ada's invitation has been revoked"):
        book(tmp_path).bind(token, GUEST.peer_id, Control(1))
    with pytest.raises(UserError, match=r"ada's invitation expired 1\.0 hours ago"):
        book(tmp_path, NOW + 7200.0).bind(token, GUEST.peer_id, Control())
    assert book(tmp_path).bound() == {1: GUEST.peer_id}


def test_names_are_invited_once_and_known_by_their_number(tmp_path):
    registry = book(tmp_path)
    for name in ("ada", "bob"):
        registry.invite(name, 60.0)
    assert [registry.number_of(name) for name in ("ada", "bob")] == [1, 2]
    with pytest.raises(UserError, match="ada is invited already"):
        registry.invite("ada", 60.0)
    with pytest.raises(UserError, match="'a b' is not a name"):
        registry.invite("a b", 60.0)
    with pytest.raises(UserError, match="eve is not invited"):
        registry.number_of("eve")


def token_of(signer=ORGANISER, run=RUN, expires_at=NOW + 60.0):
    return seal_invitation(signer, Invitation(run_id=run, number=1, name="ada", expires_at=expires_at))


@pytest.mark.parametrize(
    ("token", "problem"),
    [
        (token_of(signer=STRANGER), "this is run abababababababab of"),
        (token_of(run=OTHER_RUN), "is for run cdcdcdcdcdcdcdcd"),
        (token_of(expires_at=NOW - 7200.0), r"expired 2\.0 hours ago"),
        (token_of()[:-6], "is damaged"),
        (token_of()[:40] + "A" * 20 + token_of()[60:], "is damaged"),
        ("\u00e9\u4e00", "is damaged"),
        ("", "is damaged"),
    ],
    ids=["signer", "run", "expired", "cut", "changed", "letters", "empty"],
)
def test_a_token_that_is_not_for_this_run_now_is_refused_with_its_reason(token, problem):
    with pytest.raises(UserError, match=problem):
        open_invitation(token, RUN, ORGANISER.peer_id, NOW)
    assert open_invitation(token_of(), RUN, ORGANISER.peer_id, NOW).name == "ada"


async def test_a_peer_enters_with_a_token_once_and_then_without_the_organisers_node(network, tmp_path, monkeypatch):
    monkeypatch.setattr("time.time", lambda: NOW)
    host, guest, thief = (network.node(identity) for identity in (ORGANISER, GUEST, THIEF))
    registry, control = book(tmp_path), Control()
    token = registry.invite("ada", 3600.0)
    await registry.serve(host, control)

    async def enters(node, given, folder="guest"):
        entry = gate()
        await enter(node, entry, RUN, ORGANISER.peer_id, tmp_path / folder, given)
        return entry.own

    with pytest.raises(UserError, match="this run is for invited peers: you gave no invitation"):
        await enters(guest, "")
    text = await enters(guest, token)
    with pytest.raises(UserError, match="refuses the invitation: ada's invitation is used by another key"):
        await enters(thief, token, "thief")
    network.cut(ORGANISER.peer_id)
    assert await enters(guest, "") == text
    with pytest.raises(UserError, match="gives no pass"):
        await asyncio.wait_for(enters(thief, token, "thief"), 5.0)
    (tmp_path / "thief").mkdir()
    (tmp_path / "thief" / "pass.txt").write_text(text)
    with pytest.raises(UserError, match="a pass that the organiser has not signed for it"):
        await enters(thief, "", "thief")
