"""Which control records a node obeys: the newest of this run's organiser, and no other, however it comes."""

from __future__ import annotations

import pytest

from peer.errors import ProtocolError
from peer.protocol.control import VALID_S, Control, control_key, open_control, seal_control
from peer.protocol.identity import Identity
from peer.protocol.manifest import RoundSpec
from peer.protocol.records import dump_json, seal
from peer.swarm.net.dht_validator import claims_of, key_id
from peer.swarm.state.run_control import RunControl

ORGANISER, STRANGER = Identity.generate(), Identity.generate()
RUN, OTHER_RUN = "ab" * 32, "cd" * 32
NOW = 1_000_000_000.0


def control(serial=1, run_id=RUN, at=NOW, **fields):
    return Control(run_id=run_id, serial=serial, signed_at=at, expires_at=at + VALID_S, **fields)


def held(folder, now=NOW):
    rounds = RoundSpec(total=10)
    return RunControl(folder, RUN, ORGANISER.peer_id, rounds, lambda: now)


@pytest.mark.parametrize(
    ("blob", "problem"),
    [
        (seal_control(STRANGER, control(9, state="finished")), "the organiser of this run is"),
        (seal_control(ORGANISER, control(9, OTHER_RUN, state="finished")), "control record of run cdcdcd"),
        (seal_control(ORGANISER, control(9, at=NOW - VALID_S, state="finished")), "expired 0 s ago"),
        (seal_control(ORGANISER, control(9, at=NOW + 60.0, state="finished")), "60 s in the future"),
        (seal(ORGANISER, "checkpoint", dump_json(control(9))), "no valid signature"),
        (seal_control(ORGANISER, control(9))[:-1] + b" ", "no valid signature"),
        (seal(ORGANISER, "control", dump_json(control(9)).replace(b'"running"', b'"obeying"')), "malformed Control"),
        (seal(ORGANISER, "control", dump_json(control(9)).replace(b'""', rb'"\u001b[31m"')), "malformed Control"),
        (seal(ORGANISER, "control", dump_json(control(9)).replace(b'""', rb'"\u202eabc"')), "malformed Control"),
        (b"", "truncated"),
    ],
    ids=["stranger", "other run", "expired", "future", "domain", "changed", "state", "escape", "direction", "empty"],
)
def test_a_record_that_the_organiser_did_not_mean_for_now_changes_nothing(tmp_path, blob, problem):
    holder = held(tmp_path)
    holder.offer(seal_control(ORGANISER, control(3, state="paused")))
    with pytest.raises(ProtocolError, match=problem):
        holder.offer(blob)
    assert (holder.newest.serial, holder.state) == (3, "paused")


def test_an_older_serial_never_replaces_a_newer_one_not_even_after_a_restart(tmp_path):
    paused, resumed = (seal_control(ORGANISER, control(n, state=s)) for n, s in ((3, "paused"), (4, "running")))
    holder, heard = held(tmp_path), []
    holder.on_change = heard.append
    assert holder.offer(resumed)
    assert not holder.offer(resumed)
    assert not holder.offer(paused)
    assert [one.serial for one in heard] == [4]
    again = held(tmp_path, now=NOW + 2 * VALID_S)  # what was obeyed before holds on, however old it is
    assert again.newest.serial == 4
    with pytest.raises(ProtocolError, match="expired"):
        again.offer(paused)


def test_a_damaged_or_foreign_file_is_not_obeyed(tmp_path):
    for blob in (b"nonsense", seal_control(STRANGER, control(5, state="finished"))):
        (tmp_path / "control.bin").write_bytes(blob)
        assert held(tmp_path).newest is None


def test_the_record_moves_the_end_of_the_run_and_voids_invitations(tmp_path):
    holder = held(tmp_path)
    assert (holder.rounds_total, holder.tokens_total, holder.paused) == (10, None, False)
    holder.offer(seal_control(ORGANISER, control(1, rounds_total=40, tokens_total=7, revoked=(2, 5))))
    assert (holder.rounds_total, holder.tokens_total) == (40, 7)
    assert [holder.revokes(number) for number in (1, 2, 5)] == [False, True, True]
    holder.offer(seal_control(ORGANISER, control(2)))
    assert (holder.rounds_total, holder.tokens_total, holder.revokes(2)) == (10, None, False)


def test_a_record_lies_in_the_dht_under_its_runs_key_and_its_signers_name_alone():
    blob = seal_control(ORGANISER, control(7))
    claims = claims_of(key_id(control_key(RUN)), ORGANISER.peer_id, blob)
    assert (claims.kind, claims.run_id, claims.serial) == ("control", RUN, 7)
    assert claims_of(key_id(control_key(OTHER_RUN)), ORGANISER.peer_id, blob) is None
    assert claims_of(key_id(control_key(RUN)), STRANGER.peer_id, blob) is None


def test_a_full_record_fits_the_dht_and_one_that_is_larger_is_not_signed():
    full = control(2**52, announcement="x" * 400, revoked=tuple(range(100, 356)))
    assert open_control(seal_control(ORGANISER, full), RUN, ORGANISER.peer_id) == full
    with pytest.raises(ProtocolError, match="a record holds 4096"):
        seal_control(ORGANISER, control(1, announcement="\u4e00" * 400, revoked=tuple(range(10**6, 10**6 + 256))))
