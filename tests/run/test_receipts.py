"""Receipts: what one peer has contributed, verified from the file alone; one changed digit fails."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

from peer.cli import main
from peer.protocol.identity import Identity
from tests.swarm.runs import RUN, TOKENS, Run


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """(folder, member who was in three of five rounds, member who was in all and signs, receipt of the first)."""
    folder = tmp_path_factory.mktemp("peer")
    run = Run(folder / "history" / RUN[:16])
    guest = run.commit(3).identities.pop()
    run.commit(2)
    (folder / "identity.key").write_bytes(run.identities[0].to_bytes())
    (folder / "identity.key").chmod(0o600)
    path = folder / "guest.receipt"
    assert command("write", folder, "--peer", guest.peer_id, "--to", path) == 0
    return folder, guest.peer_id, run.identities[0].peer_id, path


def command(*words):
    with pytest.raises(SystemExit) as ended:
        main(["receipts", *map(str, words)])
    return ended.value.code


def test_a_receipt_says_what_the_chain_says(written, capsys):
    _, guest, signer, path = written
    assert command("verify", path) == 0
    said = capsys.readouterr().out
    assert f"valid   {guest}" in said
    assert f"gave    {3 * TOKENS:,} tokens ({3 / 13:.1%} of the run) in 3 of 5 rounds" in said
    assert f"signed  {signer}, " in said
    assert len(path.read_bytes().splitlines()) == 4


def test_it_is_verified_in_a_process_that_knows_nothing_else(written, tmp_path):
    _, guest, signer, path = written
    copy = tmp_path / "copy"
    copy.write_bytes(path.read_bytes())
    code = ("import socket, sys\ndef refuse(*_, **__): raise OSError('no network')\n"
            "socket.socket.connect = socket.create_connection = refuse\n"
            "from peer.cli import main\n"
            f"main(['receipts', 'verify', {str(copy)!r}, '--signer', {signer!r}])")  # fmt: skip
    done = subprocess.run([sys.executable, "-c", code], env={**os.environ, "HOME": str(tmp_path)},
                          capture_output=True, text=True, timeout=100)  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    assert guest in done.stdout


def test_one_changed_digit_anywhere_fails(written, tmp_path, capsys):
    *_, path = written
    content, changed = path.read_bytes(), tmp_path / "changed"
    places = [found.start() for found in re.finditer(rb"[0-9]", content)]
    for place in [*places[:120], *places[120::29]]:
        digit = b"1" if content[place : place + 1] != b"1" else b"2"
        changed.write_bytes(content[:place] + digit + content[place + 1 :])
        assert command("verify", changed) == 2, content[place - 20 : place + 20]
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda lines: lines[:-1], "the certificates are not those"),
        (lambda lines: [lines[0], *lines[1:], lines[-1]], "is no further round of this peer"),
        (lambda lines: [lines[0], lines[2], lines[1], lines[3]], "is no further round of this peer"),
        (lambda lines: lines[1:], "malformed SignedStatement"),
        (lambda lines: [lines[0].replace(b":", b": ", 1), *lines[1:]], "is not written as it was signed"),
        (lambda lines: lines[:0], "malformed SignedStatement"),
    ],
    ids=["shorter", "twice", "order", "no statement", "spelling", "empty"],
)
def test_a_receipt_with_other_lines_is_refused(written, tmp_path, capsys, change, problem):
    *_, path = written
    changed = tmp_path / "changed"
    changed.write_bytes(b"".join(change(path.read_bytes().splitlines(keepends=True))))
    assert command("verify", changed) == 2
    assert problem in capsys.readouterr().err


def test_who_must_have_signed_it_can_be_asked_for(written, capsys):
    *_, path = written
    other = Identity.generate().peer_id
    assert command("verify", path, "--signer", other) == 2
    assert f"not by {other}" in capsys.readouterr().err


def test_a_peer_that_was_in_no_round_gets_none(written, tmp_path, capsys):
    folder, *_ = written
    assert command("write", folder, "--peer", Identity.generate().peer_id) == 2
    assert "is in none of the run's 5 rounds" in capsys.readouterr().err
    assert command("write", tmp_path) == 2
    assert "holds no key" in capsys.readouterr().err
