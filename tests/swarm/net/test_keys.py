from __future__ import annotations

import os
import stat

import pytest

from peer.errors import UserError
from peer.protocol.identity import Identity
from peer.swarm.net.keys import load_or_create_identity


@pytest.fixture
def path(tmp_path):
    return tmp_path / "identity.key"


def test_a_new_key_is_private_and_the_same_next_time(path):
    before = os.umask(0)
    try:
        identity = load_or_create_identity(path)
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert path.read_bytes() == identity.to_bytes()
    assert load_or_create_identity(path).peer_id == identity.peer_id


def test_an_existing_key_is_never_overwritten(path):
    content = Identity.generate().to_bytes()
    path.write_bytes(content)
    path.chmod(0o600)
    assert load_or_create_identity(path).to_bytes() == content
    assert path.read_bytes() == content


def test_a_key_is_not_created_through_a_link(path, tmp_path):
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UserError, match="cannot read the identity file"):
        load_or_create_identity(path)
    assert not (tmp_path / "elsewhere").exists()


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o644, 0o601, 0o777])
def test_a_key_that_others_could_read_is_refused(path, mode):
    path.write_bytes(Identity.generate().to_bytes())
    path.chmod(mode)
    with pytest.raises(UserError, match=f"has mode {mode:04o}") as caught:
        load_or_create_identity(path)
    assert caught.value.hint.startswith(f"run: chmod 600 {path}\n")


@pytest.mark.parametrize("content", [b"", b"x", b"\x08\x01\x12\x40" + bytes(63), bytes(68), b"-----BEGIN" + bytes(58)])
def test_a_damaged_key_is_refused_and_kept(path, content):
    path.write_bytes(content)
    path.chmod(0o600)
    with pytest.raises(UserError, match="damaged or of another kind"):
        load_or_create_identity(path)
    assert path.read_bytes() == content


def test_no_message_shows_the_key(path):
    content = Identity.generate().to_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    path.chmod(0o600)
    with pytest.raises(UserError) as caught:
        load_or_create_identity(path)
    assert content[4:36].hex() not in caught.value.render()


def test_a_folder_or_a_missing_folder_is_the_users_mistake(path, tmp_path):
    with pytest.raises(UserError, match="cannot read the identity file"):
        load_or_create_identity(tmp_path)
    with pytest.raises(UserError, match="cannot create the identity file"):
        load_or_create_identity(path / "below" / "nothing")


def test_a_disk_that_takes_no_key_keeps_no_half_of_one(path, monkeypatch):
    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(UserError, match=r"cannot write the identity file .*: No space left"):
            load_or_create_identity(path)
    assert not path.exists()
    assert load_or_create_identity(path).peer_id
