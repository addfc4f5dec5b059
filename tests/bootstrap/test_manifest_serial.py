"""A bootstrap's manifests are numbered in the order of their publication."""

from __future__ import annotations

from bootstrap.manifest_serial import FILE_NAME, manifest_serial
from peer.protocol.identity import Identity

FIRST, SECOND = ("a" * 64, "one"), ("b" * 64, "two")
ORGANISER = Identity.generate().peer_id


def test_the_serial_grows_when_the_manifest_changes_and_only_then(tmp_path):
    runs = (FIRST, FIRST, SECOND, SECOND, FIRST)
    serials = [manifest_serial(tmp_path, run, ORGANISER, lambda: 1000.0) for run in runs]
    assert serials == [1_000_000, 1_000_000, 1_000_001, 1_000_001, 1_000_002]


def test_the_clock_may_be_set_back(tmp_path):
    before = manifest_serial(tmp_path, FIRST, ORGANISER, lambda: 1000.0)
    assert manifest_serial(tmp_path, SECOND, ORGANISER, lambda: 5.0) == before + 1


def test_a_lost_or_damaged_file_leads_to_a_higher_serial(tmp_path):
    before = manifest_serial(tmp_path, FIRST, ORGANISER, lambda: 1000.0)
    (tmp_path / FILE_NAME).write_bytes(b'{"run_id":')
    assert manifest_serial(tmp_path, FIRST, ORGANISER, lambda: 1001.0) > before
    (tmp_path / FILE_NAME).unlink()
    assert manifest_serial(tmp_path, FIRST, ORGANISER, lambda: 1002.0) > before
