from __future__ import annotations

import dataclasses
import math
from itertools import pairwise
from pathlib import Path

import pytest
from pydantic import ValidationError

from peer.errors import UserError
from peer.sim.world.scenario import (
    MAX_PEERS,
    MAX_SCENARIO_BYTES,
    NetworkSplit,
    PeerProfile,
    interleaved,
    load_scenario,
    parse_scenario,
    shipped_scenarios,
)

ROOT = Path(__file__).parents[3]
# Beside the scenarios lie the manifests of the simulator's own tasks, which have a model.
CONFIGS = sorted(file for file in (ROOT / "configs/sim").glob("*.yaml") if "\nmodel:" not in file.read_text())


def scenario(peers, more=""):
    return parse_scenario(f"name: a\npeers: {peers}\n{more}", "test")


def refusal(peers="[{share: 1}]", more=""):
    with pytest.raises(UserError) as caught:
        scenario(peers, more)
    return caught.value.render()


# ---- the shipped ones


def test_the_package_carries_the_same_scenarios_as_the_repository():
    packaged = sorted((ROOT / "peer/sim/scenarios").glob("*.yaml"))
    assert [file.name for file in packaged] == [file.name for file in CONFIGS]
    assert [file.read_bytes() for file in packaged] == [file.read_bytes() for file in CONFIGS]
    assert shipped_scenarios() == tuple(sorted(file.stem for file in CONFIGS))
    assert {"ideal", "home", "cloud", "spot", "straggler", "partition", "byzantine"} <= set(shipped_scenarios())


@pytest.mark.parametrize("file", CONFIGS, ids=lambda file: file.stem)
def test_every_shipped_scenario_is_named_as_its_file_and_says_how_to_run_it(file):
    by_path, by_name = load_scenario(file), load_scenario(file.stem)
    assert by_path == by_name
    assert by_path.name == file.stem
    assert by_path.description
    assert f"#   atoll simulate MANIFEST --network configs/sim/{file.name} --peers " in file.read_text()
    assert len(by_path.draw(8)) == 8


def test_the_ideal_scenario_has_no_limits():
    assert load_scenario("ideal").draw(5) == (PeerProfile(),) * 5


def test_home_peers_are_slow_up_and_unequal():
    peers = load_scenario("home").draw(40)
    assert all(20e6 / 8 <= peer.up_bytes_s <= 50e6 / 8 for peer in peers)
    assert all(100e6 / 8 <= peer.down_bytes_s <= 500e6 / 8 for peer in peers)
    assert all(0.015 <= peer.latency_s <= 0.040 and 0 <= peer.loss <= 0.0002 for peer in peers)
    assert all(0.5 <= peer.speed <= 1.5 for peer in peers)
    assert len({peer.speed for peer in peers}) == 40


@pytest.mark.parametrize("attack", ["sign-flip", "scale", "nan", "little", "copy"])
@pytest.mark.parametrize(("num_peers", "num_byzantine"), [(4, 1), (6, 1), (8, 2), (16, 4)])
def test_never_more_than_a_quarter_lies(attack, num_peers, num_byzantine):
    peers = load_scenario(f"byzantine-{attack}").draw(num_peers)
    assert [peer.attack for peer in peers].count(attack) == num_byzantine
    assert [peer.attack for peer in peers].count("none") == num_peers - num_byzantine


def test_the_mixed_byzantine_peers_are_one_of_each_among_twenty():
    attacks = [peer.attack for peer in load_scenario("byzantine").draw(20)]
    assert sorted(attacks) == ["copy", "little", "nan"] + ["none"] * 15 + ["scale", "sign-flip"]


@pytest.mark.parametrize("num_peers", [2, 8, 100])
def test_there_is_one_straggler_in_a_swarm_of_any_size(num_peers):
    speeds = [peer.speed for peer in load_scenario("straggler").draw(num_peers)]
    assert sorted(speeds) == [0.1] + [1.0] * (num_peers - 1)


def test_the_partition_scenario_splits_eight_peers_as_it_says():
    halves, uneven = load_scenario("partition").partitions
    assert halves.side_of(8) == (0, 0, 0, 0, 1, 1, 1, 1)
    assert uneven.side_of(8) == (0, 0, 0, 0, 0, 1, 1, 1)


# ---- drawing


def test_values_come_out_in_base_units():
    (peer,) = scenario(
        "[{count: 1, speed: 0.5, jitter: 0.2, up_mbps: 8, down_mbps: 80, latency_ms: 25, loss: 0.01, join_s: 5, "
        "leave_s: 9, attack: scale, attack_scale: 7}]"
    ).draw(1)
    assert peer == PeerProfile(
        speed=0.5, jitter=0.2, up_bytes_s=1e6, down_bytes_s=1e7, latency_s=0.025, loss=0.01, presence=((5.0, 9.0),),
        attack="scale", attack_scale=7.0,
    )


@pytest.mark.parametrize("value", ["0", "null", "0.0", "[0, 0]"])
def test_zero_and_null_mean_unlimited_bandwidth(value):
    (peer,) = scenario(f"[{{share: 1, up_mbps: {value}, down_mbps: {value}}}]").draw(1)
    assert peer.up_bytes_s == peer.down_bytes_s == math.inf


def test_a_seed_gives_the_same_peers_and_another_gives_others():
    home = load_scenario("home")
    assert home.draw(8) == home.draw(8, seed=home.seed)
    assert home.draw(8, seed=1) == home.draw(8, seed=1)
    assert home.draw(8, seed=1) != home.draw(8, seed=2)
    assert home.draw(9)[:8] == home.draw(8)


def test_a_draw_is_the_same_on_every_machine():
    peers = scenario("[{share: 1, speed: [0.5, 1.5], lifetime_s: 100, away_s: 10}]").draw(2, seed=3, horizon_s=1.0)
    assert [peer.speed for peer in peers] == pytest.approx([1.0188766820494, 1.0774325946789], abs=1e-12)
    assert peers[0].presence == (pytest.approx((0.0, 99.1619205379), abs=1e-9),)


def test_without_a_lifetime_a_peer_stays_from_its_join_on():
    assert scenario("[{share: 1}]").draw(1)[0].presence == ((0.0, math.inf),)
    assert scenario("[{share: 1, join_s: 60}]").draw(1)[0].presence == ((60.0, math.inf),)


def test_who_vanishes_for_good_has_one_stay_of_the_mean_length():
    peers = scenario("[{share: 1, lifetime_s: 1000, join_s: 50}]").draw(2000)
    stays = [leave - join for ((join, leave),) in (peer.presence for peer in peers)]
    assert sum(stays) / 2000 == pytest.approx(1000, rel=0.07)       # three standard errors
    assert all(peer.presence[0][0] == 50.0 for peer in peers)


def test_who_returns_is_there_for_lifetime_over_lifetime_and_away():
    (peer,) = scenario("[{share: 1, lifetime_s: 300, away_s: 100}]").draw(1, horizon_s=1_000_000)
    stays = peer.presence
    assert all(join < leave for join, leave in stays)
    assert all(before[1] < after[0] for before, after in pairwise(stays))
    assert stays[-1][0] < 1_000_000
    assert sum(leave - join for join, leave in stays) / 1_000_000 == pytest.approx(0.75, abs=0.03)


def test_a_longer_horizon_changes_nothing_before_it_and_leave_s_ends_it_all():
    spot = scenario("[{share: 1, lifetime_s: 300, away_s: 100}]")
    short, long = spot.draw(3, horizon_s=2000), spot.draw(3, horizon_s=20_000)
    for one, other in zip(short, long, strict=True):
        assert other.presence[: len(one.presence)] == one.presence
        assert len(other.presence) > len(one.presence)
    (bounded,) = scenario("[{share: 1, lifetime_s: 300, away_s: 100, leave_s: 5000}]").draw(1)
    assert bounded.presence[-1][1] <= 5000.0


def test_counts_come_first_and_shares_divide_the_rest():
    mixed = scenario("[{count: 2}, {share: 0.75}, {share: 0.25}]")
    assert mixed.counts(10) == (2, 6, 2)
    assert mixed.counts(2) == (2, 0, 0)
    thirds = scenario("[{share: 0.33}, {share: 0.33}, {share: 0.33}]")
    assert thirds.counts(8) == (3, 3, 2)


def test_classes_are_spread_evenly():
    assert interleaved((4, 2)) == (0, 1, 0, 0, 1, 0)
    assert interleaved((6, 2)) == (0, 0, 1, 0, 0, 0, 1, 0)
    assert interleaved((3, 0, 1)) == (0, 0, 2, 0)
    assert interleaved((1, 1)) == (0, 1)


# ---- what is refused


@pytest.mark.parametrize(("peers", "more", "message"), [
    ("[{share: 1, lateny_ms: 3}]", "", "peers.0: unknown key 'lateny_ms': did you mean 'latency_ms'?"),
    ("[{share: 0.5}, {share: 0.5, up_mpbs: 3}]", "", "peers.1: unknown key 'up_mpbs': did you mean 'up_mbps'?"),
    ("[{share: 1}]", "partition: []", "unknown key 'partition': did you mean 'partitions'?"),
    ("[{share: 1}]", "partitions: [{start_s: 1, stop_s: 2, sides: [0.5, 0.5]}]", "partitions.0: missing key 'end_s'"),
    ("[{share: 1, speed: 0}]", "", "peers.0: speed=0: must be above 0"),
    ("[{share: 1, loss: 1.0}]", "", "peers.0: loss=1.0: must be below 1"),
    ("[{share: 1, latency_ms: -1}]", "", "peers.0: latency_ms=-1: must be at least 0"),
    ("[{share: 1, up_mbps: [50, 20]}]", "", "peers.0: up_mbps=[50, 20]: must be [least, most]"),
    ("[{share: 1, up_mbps: [0, 20]}]", "", "peers.0: up_mbps=[0, 20]: 0 and null mean unlimited"),
    ("[{share: 1, jitter: .nan}]", "", "peers.0: jitter=nan: Input should be a finite number"),
    ("[{share: 1, attack: signflip}]", "", "peers.0: attack='signflip': Input should be 'none', 'sign-flip', 'scale'"),
    ("[{share: 1, attack_scale: 3}]", "", "peers.0: 'attack_scale' goes with the attacks scale, little, inner-product"),
    ("[{share: 1, count: 2}]", "", "peers.0: give exactly one of 'share' and 'count'"),
    ("[{speed: 1}]", "", "peers.0: give exactly one of 'share' and 'count'"),
    ("[{share: 1, away_s: 3}]", "", "peers.0: 'away_s' goes with 'lifetime_s'"),
    ("[{share: 1, join_s: 5, leave_s: 5}]", "", "peers.0: leave_s=5.0: must be above join_s=5.0"),
    ("[{share: 0.5}, {share: 0.4}]", "", "the shares of the peers that no 'count' takes add up to 0.9: must be 1"),
    ("[]", "", "peers=[]: Tuple should have at least 1 item"),
    ("[7]", "", "peers.0: Input should be a valid dictionary"),
    ("7", "", "peers=7: Input should be a valid tuple"),
    ("[{share: 1}]", "partitions: [{start_s: 5, end_s: 3, sides: [0.5, 0.5]}]",
     "partitions.0: end_s=3.0: must be above start_s=5.0"),
    ("[{share: 1}]", "partitions: [{start_s: 5, end_s: 9, sides: [0.5, 0.4]}]",
     "partitions.0: sides add up to 0.9: must be 1"),
    ("[{share: 1}]",
     "partitions: [{start_s: 5, end_s: 9, sides: [0.5, 0.5]}, {start_s: 8, end_s: 10, sides: [0.5, 0.5]}]",
     "start_s=8.0 is below the end_s=9.0"),
])
def test_what_is_wrong_is_named_with_its_place_value_and_limit(peers, more, message):
    assert message in refusal(peers, more)


def test_text_that_is_no_scenario_is_refused():
    for text, message in [
        ("a: [", "cannot be read: while parsing"),
        ("- 1", "must be a mapping of keys to values, not list"),
        ("[" * 5000, "cannot be read"),
        ("name: a\nname: b", "line 2: the key 'name' is there twice"),
        (b"\xff\xfe\xff", "cannot be read"),
    ]:
        with pytest.raises(UserError, match=message):
            parse_scenario(text, "test")


def test_a_name_that_is_not_shipped_leads_to_the_nearest(tmp_path):
    with pytest.raises(UserError, match="no scenario is named 'hom': did you mean 'home'") as caught:
        load_scenario("hom")
    assert "./mine.yaml" in caught.value.hint
    with pytest.raises(UserError, match=r"nowhere\.yaml cannot be read: No such file or directory") as caught:
        load_scenario(tmp_path / "nowhere.yaml")
    assert "cloud, home, ideal" in caught.value.hint
    with pytest.raises(UserError, match="cannot be read: Is a directory"):
        load_scenario(tmp_path)
    (tmp_path / "large.yaml").write_text("x" * (MAX_SCENARIO_BYTES + 1))
    with pytest.raises(UserError, match="is 65537 bytes; the limit is 65536 bytes"):
        load_scenario(tmp_path / "large.yaml")


def test_own_scenarios_are_read_from_their_path(tmp_path):
    file = tmp_path / "mine.yml"
    file.write_text("name: mine\npeers: [{share: 1}]\n")
    assert load_scenario(file) == load_scenario(str(file))
    assert load_scenario(file).name == "mine"


def test_a_number_of_peers_that_the_classes_cannot_make_up_is_refused():
    fixed = scenario("[{count: 3}]")
    assert len(fixed.draw(3)) == 3
    for num_peers, message in [(2, "needs at least 3"), (4, "describes exactly 3"), (0, "must be between 1 and"),
                               (MAX_PEERS + 1, "must be between 1 and")]:
        with pytest.raises(UserError, match=message):
            fixed.draw(num_peers)


def test_everything_is_frozen():
    with pytest.raises(ValidationError, match="frozen"):
        load_scenario("home").seed = 1
    with pytest.raises(dataclasses.FrozenInstanceError):
        PeerProfile().speed = 2.0


def test_sides_are_runs_of_neighbours():
    assert NetworkSplit(start_s=0, end_s=1, sides=(0.5, 0.25, 0.25)).side_of(5) == (0, 0, 0, 1, 2)
