"""What others chose is printable where bytes become words."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from peer.errors import ProtocolError, UserError
from peer.outer.round import RoundAborted
from peer.printable import MAX_CHARS, printable, say
from peer.protocol.records import PeerRecord, parse_json
from peer.protocol.wire import AbortMessage

HOSTILE = [
    "\x1b[2J", "\x1b]0;title\x07", "\x9b31m", "\r\nforged: line", "\x00", "\x7f", "\b\b\b", "\u202egnp.exe",
    "\u2066x\u2069", "\ue000", "\u061c", "\xad",
    "\u200bhidden", "\ufeffmark", "\ud800", "\u2028next", "\u2029next", "\U000e0041tag", "\x85",
]  # fmt: skip


@pytest.mark.parametrize("text", HOSTILE, ids=ascii)
def test_nothing_is_left_for_a_terminal_to_obey(text):
    assert printable(f"a{text}b").isprintable()
    assert printable(f"a{text}b")[0] + printable(f"a{text}b")[-1] == "ab"
    assert str(ProtocolError(text)).isprintable()
    assert RoundAborted("exchange", f"peer gave up: {text}").reason.isprintable()
    assert UserError(f"what {text}").render().isprintable()


def test_other_languages_stay_and_length_is_bounded():
    assert printable("größer 日本 😀") == "größer 日本 😀"
    assert len(printable("x" * 10**6)) == MAX_CHARS + 3


def test_a_key_of_a_record_reaches_no_terminal():
    with pytest.raises(ProtocolError) as caught:
        parse_json(PeerRecord, b'{"\\u001b]0;owned\\u0007\\u202e": 1}')
    assert str(caught.value).isprintable()


@pytest.mark.parametrize("culprit", ["\x1b[2J", "../../x", "a/b", "a b", "", "x" * 200])
def test_a_peer_id_in_a_message_is_a_word(culprit):
    with pytest.raises(ValidationError):
        AbortMessage(reason="x", culprit=culprit)


def test_what_a_model_writes_steers_no_terminal_and_reaches_a_pipe_as_it_is(capsys, monkeypatch):
    piece = "a\n\tb\u3000\u00e9\U0001f468\u200d\U0001f4bb \x1b]52;c;eA==\x07\r\u202e\x9b2J"
    say(piece)
    assert capsys.readouterr().out == piece
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    say(piece)
    assert capsys.readouterr().out == "a\n\tb\u3000\u00e9\U0001f468\u200d\U0001f4bb ?]52;c;eA==? ??2J"
