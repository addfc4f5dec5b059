"""The limits that a person sets: how they are written, and what is said of them at the start."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest

from peer.errors import UserError
from peer.link.supervisor import AgentGoneError
from peer.outer.compress.registry import codec
from peer.outer.recipe.plan import RunPlan
from peer.protocol.line_limits import ActiveHours, LineLimits
from peer.run.hooks import PeerHooks
from peer.run.limits import DOES_NOT_FIT, await_hours, limits_in_words, limits_of
from peer.settings import load_settings
from peer.telemetry.figures import human_bytes
from tests.run.test_hardware import manifest

PLAN = RunPlan.of(manifest())  # diloco: one buffer, fp32


@pytest.mark.parametrize(
    ("text", "active", "idle", "hours"),
    [("22-8", (22, 23, 0, 7), (8, 12, 21), 10), ("8-22", (8, 12, 21), (22, 0, 7), 14), ("0-24", (0, 12, 23), (), 24),
     ("18-24", (18, 23), (0, 17), 6)],
)  # fmt: skip
def test_hours_may_pass_midnight(text, active, idle, hours):
    parsed = ActiveHours.parse(text)
    assert parsed.hours == hours
    assert all(parsed.hold(60 * hour + 59) for hour in active)
    assert not any(parsed.hold(60 * hour) for hour in idle)
    assert ActiveHours.parse("8:30-17").hold(8 * 60 + 30)
    assert not ActiveHours.parse("8:30-17").hold(8 * 60 + 29)


@pytest.mark.parametrize(
    ("setting", "value", "says"),
    [("active_hours", "22", "two times of day"), ("active_hours", "8-8", "two different"),
     ("active_hours", "24-8", "from 0 to 24"), ("active_hours", "8:60-9", "two times"),
     ("max_upload_mbit", "0.5", "greater than or equal to 1"), ("monthly_traffic_gb", "0", "equal to 1")],
)  # fmt: skip
def test_limits_that_cannot_be(setting, value, says):
    with pytest.raises(UserError) as caught:
        load_settings({setting: value}, None, {})
    assert f"--{setting.replace('_', '-')}=" in caught.value.what
    assert says in caught.value.what


def test_the_settings_are_what_an_agent_is_told():
    given = {"max_upload_mbit": "20", "max_download_mbit": 100, "monthly_traffic_gb": 500, "active_hours": "22-8"}
    assert limits_of(load_settings(given, None, {})) == LineLimits(
        up_mbit=20.0, down_mbit=100.0, monthly_gb=500.0, hours="22-8"
    )
    assert limits_of(load_settings({}, None, {})) == LineLimits()


def test_what_a_limit_means_is_said_and_what_does_not_fit():
    numel = 10**8
    payload = 2 * codec(PLAN.recipe.compressor).wire_bytes(numel)
    generous = LineLimits(up_mbit=1000.0, down_mbit=1000.0, monthly_gb=500.0, hours="22-8")
    lines = list(limits_in_words(generous, PLAN, numel))
    assert lines[0] == f"--max-upload-mbit 1000: a round sends about 800.0 MB, in {payload / 125e6:.1f} s"
    assert lines[2] == "the state of 800.0 MB comes in 6.4 s"
    assert lines[3] == f"--monthly-traffic-gb 500: enough for {(500e9 - 8e8) / (2 * payload) / 30:,.0f} rounds a day"
    assert lines[4] == "--active-hours 22-8: trains 10 hours a day"
    assert not any(DOES_NOT_FIT in line for line in lines)
    gathering, streaming = (RunPlan.of(manifest(recipe=recipe)) for recipe in (
        {"name": "diloco", "exchange": "gather"}, {"name": "streaming-diloco", "schedule": {"num_fragments": 4}},
    ))  # fmt: skip
    said = [next(limits_in_words(generous, plan, numel)) for plan in (gathering, streaming)]
    assert said[0].startswith("--max-upload-mbit 1000: a round sends about 400.0 MB for each other member, in 3.2 s")
    fragment = 2 * streaming.recipe.codec().wire_bytes(numel // 4)
    assert said[1].endswith(f": a round sends about {human_bytes(fragment)}, in {fragment / 125e6:.1f} s")
    tight = LineLimits(up_mbit=10.0, monthly_gb=1.0)
    assert [DOES_NOT_FIT in line for line in limits_in_words(tight, PLAN, numel)] == [True, True]
    assert list(limits_in_words(LineLimits(), PLAN, numel)) == []


def test_a_peer_waits_for_its_hours(monkeypatch):
    monkeypatch.setattr(time, "localtime", time.gmtime)
    now = [21.99 * 3600]
    pauses = []

    def pause(seconds):
        pauses.append(seconds)
        now[0] += seconds

    await_hours("22-8", lambda: now[0], pause)
    assert 22 * 3600 <= now[0] < 22 * 3600 + 10
    await_hours("22-8", lambda: now[0], pause)
    await_hours(None, lambda: now[0], pause)
    assert sum(pauses) == pytest.approx(36, abs=6)


def gone(**_):
    raise AgentGoneError("killed")


def test_a_trainer_rests_until_its_hours_and_hears_its_agent_meanwhile():
    hours, notes, polls = SimpleNamespace(now=lambda: len(polls) >= 3), [], []
    hooks = SimpleNamespace(
        _live=SimpleNamespace(note=notes.append), stop_requested=False,
        _peer=SimpleNamespace(
            settings=SimpleNamespace(active_hours="22-8"), sync=SimpleNamespace(poll=lambda **_: polls.append(1))
        ),
    )  # fmt: skip
    PeerHooks._rest(hooks, hours)
    assert len(polls) == 3
    polls.clear()
    hooks._peer.sync.poll = gone
    PeerHooks._rest(hooks, hours)  # the next step starts another agent
    assert notes.pop() == notes[0]
    assert notes == ["resting until the hours 22-8 (active_hours)", "these are active hours again; training on"]
