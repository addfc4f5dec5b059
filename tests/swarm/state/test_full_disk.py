from __future__ import annotations

import subprocess
import sys


def test_the_chain_goes_on_where_the_disk_is_full(tmp_path):
    """In a mount namespace of its own, where a small disk may be mounted."""
    inside = ["unshare", "--map-root-user", "--mount", sys.executable, "-m", "tests.swarm.state.full_disk"]
    ended = subprocess.run([*inside, str(tmp_path)], capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 0, ended.stderr
