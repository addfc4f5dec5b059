"""Each check of a machine fails once, and says what to do."""

from __future__ import annotations

import errno
import fcntl
import multiprocessing
import resource
import shutil
import socket
import sys
from importlib import metadata
from types import SimpleNamespace

import pytest
import torch
from rich.text import Text

from peer.run import checks, doctor
from peer.run.checks import disk_finding, machine_findings, output_folder
from peer.run.device_checks import device_finding, run_findings
from peer.settings import load_settings
from peer.system.finding import Finding
from peer.train import memory
from tests.run.test_hardware import manifest

LLAMA = {"vocab_size": 264, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}


def settings(tmp_path, **given):
    return load_settings({"output_dir": tmp_path / "runs" / "peer", "device": "cpu", **given}, None, {})


def found(name, tmp_path, environ=None, **given):
    return {each.check: each for each in machine_findings(settings(tmp_path, **given), environ or {})}[name]


def refuse(*_, **__):
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_machine_that_will_do_passes_every_check_and_nothing_is_made(tmp_path):
    passed = list(machine_findings(settings(tmp_path), {}))
    assert [each.check for each in passed if each.level != "pass"] == []
    assert len(passed) == 7
    assert list(tmp_path.iterdir()) == []


def test_another_python(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "version_info", (3, 10, 4))
    finding = found("python", tmp_path)
    assert (finding.level, finding.text) == ("fail", "Python 3.10.4: must be <3.14,>=3.11")
    assert "virtual environment" in finding.advice


def test_packages_that_are_missing_or_too_old(tmp_path, monkeypatch):
    monkeypatch.setattr(metadata, "requires", lambda _: ["torch>=99", "surely-not-there>=1", "wandb; extra == 'wandb'"])
    finding = found("packages", tmp_path)
    assert finding.level == "fail"
    assert finding.text == f"torch {metadata.version('torch')} is not >=99; surely-not-there is missing"
    assert "pip install" in finding.advice


def test_no_shared_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(multiprocessing, "Lock", refuse)
    finding = found("shared memory", tmp_path)
    assert finding.level == "fail"
    assert "No space left on device" in finding.text
    assert "--shm-size" in finding.advice


@pytest.mark.parametrize(("limit", "level"), [(100, "fail"), (512, "warn"), (1024, "pass")])
def test_few_open_files(tmp_path, monkeypatch, limit, level):
    monkeypatch.setattr(resource, "getrlimit", lambda _: (limit, 2048))
    finding = found("open files", tmp_path)
    assert finding.level == level
    assert finding.advice == ("" if level == "pass" else "ulimit -n 2048 before the command")


def test_an_output_folder_below_a_file_or_on_a_full_disk(tmp_path, monkeypatch):
    (tmp_path / "runs").write_text("x")
    finding = found("output folder", tmp_path)
    assert (finding.level, "is a file, not a folder" in finding.text) == ("fail", True)
    assert "--output-dir" in finding.advice
    (tmp_path / "runs").unlink()
    monkeypatch.setattr(checks.os, "fsync", refuse)
    assert found("output folder", tmp_path).text.endswith("cannot be written to: No space left on device")


def test_an_output_folder_that_is_slow_or_has_no_locks(tmp_path, monkeypatch):
    ticks = iter([0.0, 3.0])
    slow = output_folder(tmp_path, lambda: next(ticks))
    assert (slow.level, "3000 ms a MiB" in slow.text, "local disk" in slow.advice) == ("warn", True, True)
    monkeypatch.setattr(fcntl, "flock", refuse)
    bare = output_folder(tmp_path)
    assert (bare.level, "not locked" in bare.text) == ("warn", True)


def test_a_port_in_use(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        finding = found("ports", tmp_path, host_maddrs=[f"/ip4/127.0.0.1/tcp/{port}"])
    assert (finding.level, f"port {port} is in use" in finding.text) == ("fail", True)
    assert "--host-maddrs" in finding.advice


def test_a_rented_machine_whose_ports_are_not_used(tmp_path):
    vast = {"PUBLIC_IPADDR": "203.0.113.7", "VAST_TCP_PORT_31338": "40001"}
    finding = found("provider", tmp_path, vast)
    assert (finding.level, finding.advice) == ("warn", "--host-maddrs /ip4/0.0.0.0/tcp/31338")
    used = found("provider", tmp_path, vast, host_maddrs=["/ip4/0.0.0.0/tcp/31338"])
    assert (used.level, "/ip4/203.0.113.7/tcp/40001" in used.text) == ("pass", True)
    bare = found("provider", tmp_path, {"RUNPOD_PUBLIC_IP": "203.0.113.7"})
    assert (bare.level, "RunPod" in bare.text, "open TCP port" in bare.advice) == ("warn", True, True)
    broken = found("provider", tmp_path, {**vast, "PUBLIC_IPADDR": "nowhere"}, host_maddrs=["/ip4/0.0.0.0/tcp/31338"])
    assert (broken.level, "--announce-maddrs" in broken.advice) == ("fail", True)


def test_a_disk_that_is_too_small(tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=3e9))
    assert disk_finding(tmp_path / "later", 1e9, 3e9).level == "pass"
    warned, failed = disk_finding(tmp_path, 1e9, 5e9), disk_finding(tmp_path, 4e9, 5e9)
    assert (warned.level, failed.level) == ("warn", "fail")
    assert "one checkpoint alone takes 4.00 GB" in failed.text
    assert "--save-total-limit" in failed.advice


def test_a_device_that_is_not_there_or_not_used(tmp_path):
    assert device_finding(settings(tmp_path), tmp_path / "none").level == "pass"
    missing = device_finding(settings(tmp_path, device="cuda:99"))
    assert (missing.level, "use auto, cpu, cuda" in missing.advice) == ("fail", True)
    (tmp_path / "nvidiactl").touch()
    idle = device_finding(settings(tmp_path), tmp_path / "nvidiactl")
    assert (idle.level, "torch for CUDA" in idle.advice) == ("warn", True)


def test_a_model_against_memory_and_disk(tmp_path, monkeypatch):
    described = manifest(model={"architecture": "llama", "config": LLAMA})
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1e6))
    fits, disk = run_findings(settings(tmp_path), described)
    assert (fits.level, disk.level) == ("pass", "fail")  # a checkpoint is larger than a megabyte
    monkeypatch.setattr(memory.Footprint, "check", lambda self, device: _full(self, device))
    small, _ = run_findings(settings(tmp_path), described)
    assert small.level == "fail"
    assert "GiB free on cpu" in small.text
    assert "free memory" in small.advice


def _full(footprint, device):
    memory.check_memory(footprint.parameters, 16 * footprint.parameters, torch.device(device), lambda _: 1)


@pytest.mark.parametrize(("terminal", "lines"), [(True, 3), (False, 2)])
def test_a_long_line_wraps_within_its_column_on_a_terminal_alone(monkeypatch, capsys, terminal, lines):
    monkeypatch.setattr("sys.stdout.isatty", lambda: terminal)
    monkeypatch.setenv("COLUMNS", "60")
    doctor._show(Finding(check="disk", level="warn", text="word " * 12 + "end", advice="Free some space."))
    out = [Text.from_ansi(line).plain for line in capsys.readouterr().out.splitlines()]
    assert len(out) == lines
    assert out[0].startswith("warn  disk           word word")
    assert [line[:21] for line in out[1:]] == [" " * 21] * (lines - 1)
    assert out[-1].rstrip() == " " * 21 + "Free some space."
