"""Which folder a run has at its node, alone and beside others."""

from __future__ import annotations

import pytest

from bootstrap.folders import LOCK_NAME, find_run, is_served, run_folder
from bootstrap.manifest_serial import FILE_NAME, manifest_serial
from peer.errors import UserError
from peer.protocol.identity import Identity
from peer.system.file_lock import lock_folder

ORGANISER = Identity.generate().peer_id


def opened(folder, name):
    folder.mkdir(exist_ok=True)
    manifest_serial(folder, (name[0] * 64, name), ORGANISER)


def test_a_run_keeps_its_folder_when_others_come_and_go(tmp_path):
    assert run_folder(tmp_path, "a", alone=True) == tmp_path
    opened(tmp_path, "a")
    assert run_folder(tmp_path, "a", alone=False) == tmp_path
    assert run_folder(tmp_path, "b", alone=False) == tmp_path / "b"
    opened(tmp_path / "b", "b")
    assert run_folder(tmp_path, "b", alone=True) == tmp_path / "b"
    assert run_folder(tmp_path, "c", alone=True) == tmp_path  # whose run is then refused, or left with --new-run


def test_a_command_finds_the_run_that_it_names(tmp_path):
    with pytest.raises(UserError, match="holds no run"):
        find_run(tmp_path, None)
    opened(tmp_path, "a")
    assert find_run(tmp_path, None) == find_run(tmp_path, "a") == tmp_path
    opened(tmp_path / "b", "b")
    assert [find_run(tmp_path, name) for name in "ab"] == [tmp_path, tmp_path / "b"]
    with pytest.raises(UserError, match="holds 2 runs"):
        find_run(tmp_path, None)
    with pytest.raises(UserError, match="holds no run c"):
        find_run(tmp_path, "c")
    (tmp_path / "b" / FILE_NAME).write_text("{")
    assert find_run(tmp_path, None) == tmp_path


def test_a_folder_is_served_while_a_node_holds_it(tmp_path):
    assert not is_served(tmp_path)
    with lock_folder(tmp_path, "state_dir", LOCK_NAME):
        assert is_served(tmp_path)
    assert not is_served(tmp_path)
