"""`atoll doctor` beside a real bootstrap: every line of a machine that will do, and a run that is not there."""

from __future__ import annotations

import json

from peer.cli import build_parser

CHECKS = (
    "python", "packages", "shared memory", "open files", "output folder", "ports", "provider", "device", "address",
    "run", "clock", "latency", "reachable", "bandwidth", "memory", "disk",
)  # fmt: skip


def doctor(capsys, *arguments):
    parsed = build_parser().parse_args(["doctor", *arguments])
    return parsed.execute(parsed), capsys.readouterr().out


def test_a_machine_beside_its_swarm(make_swarm, tmp_path, capsys):
    swarm = make_swarm()
    address = swarm.bootstrap().address
    here = ["--output-dir", str(tmp_path / "peer"), "--device", "cpu", "--host-maddrs", "/ip4/127.0.0.1/tcp/0"]
    code, out = doctor(capsys, address, *here, "--json")
    found = {each["check"]: each for each in json.loads(out)}
    assert tuple(found) == CHECKS
    assert code == 0
    assert [name for name, each in found.items() if each["level"] == "fail"] == []
    assert "test (" in found["run"]["text"]
    assert "others reach this machine at TCP port" in found["reachable"]["text"]
    assert "Mbit/s up" in found["bandwidth"]["text"]
    assert not (tmp_path / "peer").exists()
    code, out = doctor(capsys, address, *here, "--run-id", "0" * 64)
    assert code == 2
    assert "fail  run            manifest hash mismatch" in out
    assert out.splitlines()[-1] == "cannot run: run"
