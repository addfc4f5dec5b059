"""A file or folder has one owner at a time, who is named; where the file system has no locks, a warning is all."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from peer.errors import UserError
from peer.system.file_lock import lock_folder
from tests.shims import NO_FLOCK, preload

HOLD = """
import logging, sys
from pathlib import Path
from peer.demo.folder import fresh_folder
from peer.system.file_lock import lock_folder
from peer.system.preflight import lock_identity
logging.basicConfig()
folder = Path(sys.argv[1])
with lock_folder(folder, "output_dir", "peer.lock"), lock_identity(folder / "identity.key"):
    with fresh_folder(folder / "demo"):
        print("held")
"""


def hold(folder: Path, env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", HOLD, str(folder)]
    return subprocess.run(command, env={**os.environ, **env}, capture_output=True, text=True, check=False)


def test_a_folder_has_one_owner_who_is_named(tmp_path: Path) -> None:
    with lock_folder(tmp_path, "output_dir", "peer.lock"):
        with pytest.raises(UserError) as refused:
            lock_folder(tmp_path, "output_dir", "peer.lock")
        owner = f"process {os.getpid()}, which is still running"
        assert refused.value.what == f"output_dir={tmp_path}: is in use by {owner}"
        assert "--output-dir" in refused.value.hint
        lock_folder(tmp_path, "state_dir", "other.lock").close()
    lock_folder(tmp_path, "output_dir", "peer.lock").close()


def test_a_lock_ends_with_its_process(tmp_path: Path) -> None:
    assert hold(tmp_path, {}).stdout == "held\n"
    with lock_folder(tmp_path, "output_dir", "peer.lock"):
        assert "is in use by process" in hold(tmp_path, {}).stderr


def test_a_file_system_without_locks_is_a_warning(tmp_path: Path) -> None:
    done = hold(tmp_path, preload(tmp_path, NO_FLOCK))
    assert (done.returncode, done.stdout) == (0, "held\n"), done.stderr
    assert done.stderr.count("this file system has no locks") == 3
    assert "Traceback" not in done.stderr


def test_a_folder_that_takes_no_file_is_a_users_problem(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot be locked: No such file"):
        lock_folder(tmp_path / "none", "output_dir", "peer.lock")
