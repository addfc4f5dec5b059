"""Virtual time against times worked out by hand: two or three peers, four layers of 1000 bytes each."""

from __future__ import annotations

import math

import pytest

from peer.outer.state.flat_layout import FlatLayout
from peer.protocol.manifest import InnerSpec
from peer.sim.campaign.label import parse_label
from peer.sim.campaign.simulation import Result, Simulation, SimulationSetup
from peer.sim.world.overlap import WHOLE, Layer, layers_of, pipelined
from peer.sim.world.scenario import PeerProfile

LAYERS, VALUES = 4, 250
BYTES = 4.0 * LAYERS * VALUES
LINK = PeerProfile(up_bytes_s=1000.0, down_bytes_s=1000.0)
FAR = PeerProfile(up_bytes_s=1000.0, down_bytes_s=1000.0, latency_s=0.05)


def layout(layers: int = LAYERS, values: int = VALUES) -> FlatLayout:
    return FlatLayout(
        names=tuple(f"layers.{index}.w" for index in range(layers)), shapes=((values,),) * layers,
        offsets=tuple(index * values for index in range(layers)), numel=layers * values,
    )


def timed(
    label: str, profiles: tuple[PeerProfile, ...], steps: int, *, layerwise: bool = False,
    model: FlatLayout | None = None,
) -> tuple[Result, Simulation]:
    """A simulation of `steps` steps of one second (at speed 1) for each peer, and of nothing but time."""
    setup = SimulationSetup(
        recipe=parse_label(label).recipe(), inner=InnerSpec(), profiles=profiles, tokens=steps * len(profiles),
        step_s=1.0, layerwise=layerwise,
    )
    simulation = Simulation(setup, None, model or layout(), tokens_per_step=1)
    return simulation.run(), simulation


# ---- exchanges that block


def test_a_blocking_round_takes_two_transfers_and_four_latencies():
    result, _ = timed("diloco:steps_per_round=5", (FAR, FAR), 10)
    # Each sends half of 4000 bytes, then half of the mean: 2 s + 0.1 s, twice; joins and votes take 0.1 s each.
    assert result.virtual_seconds == pytest.approx(10 + 2 * 4.4)
    assert result.utilization == pytest.approx(10 / 18.8)
    assert result.bytes_sent_per_peer == 2 * BYTES
    assert result.tally.committed == 2


def test_a_gather_sends_everything_to_everybody_in_one_go():
    reduced, _ = timed("diloco:steps_per_round=5", (FAR,) * 3, 5)
    gathered, _ = timed("diloco:steps_per_round=5,exchange=gather", (FAR,) * 3, 5)
    assert reduced.virtual_seconds == pytest.approx(5 + 2 * (2 / 3 * 4 + 0.1) + 0.2)
    assert gathered.virtual_seconds == pytest.approx(5 + 2 * 4 + 0.1 + 0.2)
    assert (reduced.bytes_sent_per_peer, gathered.bytes_sent_per_peer) == (pytest.approx(BYTES * 4 / 3), 2 * BYTES)


def test_all_wait_for_the_slowest():
    slow = PeerProfile(speed=0.5, up_bytes_s=1000.0, down_bytes_s=1000.0)
    result, _ = timed("diloco:steps_per_round=5", (LINK, slow), 10)
    assert result.virtual_seconds == pytest.approx(2 * (10 + 4))
    assert result.utilization == pytest.approx((10 + 20) / (2 * 28))


def test_a_deadline_goes_on_without_the_slowest():
    slow = PeerProfile(speed=0.1, up_bytes_s=1000.0, down_bytes_s=1000.0)
    label = "diloco:steps_per_round=4,straggler={name: wait, deadline_s: 2}"
    for layerwise in (False, True):  # nothing leaves before the members are known, so there is nothing to hide
        result, simulation = timed(label, (LINK, LINK, slow), 4, layerwise=layerwise)
        # Two come after 4 s, wait until 6 s, exchange until 10 s and make the last of twelve steps at 12 s. What is
        # left is exchanged among all three, after all time is counted.
        assert simulation.replicas[0].present_s == pytest.approx(12.0)
        assert result.virtual_seconds == pytest.approx(12 + 2 * 2 / 3 * 4)
        assert result.utilization == pytest.approx((6 + 6 + 12) / 36)
        assert result.tally.committed == 2


def test_a_quorum_goes_on_at_once():
    slow = PeerProfile(speed=0.25, up_bytes_s=1000.0, down_bytes_s=1000.0)
    _, simulation = timed("async-diloco:steps_per_round=4,straggler={name: quorum, count: 2}", (LINK, LINK, slow), 4)
    # The two exchange from 4 s to 8 s, and are on their way again until the slow one's second step makes twelve.
    assert simulation.replicas[0].present_s == pytest.approx(9.0)
    assert [replica.busy_s for replica in simulation.replicas] == pytest.approx([5.0, 5.0, 9.0])


def test_pairs_exchange_at_the_same_time_also_at_the_end():
    together, _ = timed("noloco:steps_per_round=5", (LINK,) * 6, 6)
    # A pair sends deltas and anchors both ways: 8 s. One step is left after the round, and exchanged at the end.
    assert together.virtual_seconds == pytest.approx(6 + 2 * 8)
    assert together.tally.committed == 6


# ---- exchanges that steps hide


def test_an_overlapped_exchange_costs_what_its_steps_do_not_hide():
    hidden, _ = timed("diloco:schedule.steps=5,schedule.overlap_steps=4", (LINK, LINK), 14)
    half, _ = timed("diloco:schedule.steps=5,schedule.overlap_steps=2", (LINK, LINK), 14)
    # 4 s each: sent at 5 s and 10 s, due at 9 s and 14 s. With two steps they are due 2 s before they are there.
    assert hidden.utilization == pytest.approx(1.0)
    assert half.utilization == pytest.approx(14 / 18)


def test_a_link_carries_one_fragment_after_another():
    slow = PeerProfile(up_bytes_s=500.0, down_bytes_s=500.0)
    label = "streaming-diloco:compressor=fp32,schedule.period=4,schedule.num_fragments=2,schedule.overlap_steps=4"
    # 2000 bytes every two steps: 2 s at 1000 bytes/s keep the link busy, and are always there in time. The last, sent
    # after the last step, is there 2 s later.
    assert timed(label, (LINK, LINK), 20)[1].replicas[0].present_s == pytest.approx(22.0)
    # 4 s each at 500 bytes/s: sent at 2 s and there at 6 s, in time; sent at 4 s, there at 10 s and missed since 8 s.
    # The third is sent at 6 s and there at 14 s, the fourth, of the eighth step, at 18 s.
    assert timed(label, (slow, slow), 8)[1].replicas[0].present_s == pytest.approx(18.0)


def test_gradients_travel_while_the_backward_pass_goes_on():
    # A layer's backward pass takes 1/6 s. Links that take 1/10 s for a layer are late by the last one alone;
    # links that take 1/2 s have 4 layers to send from half a second before the end of the step.
    for layer_s, late_s in ((0.1, 0.1), (0.5, 1.5)):
        link = PeerProfile(up_bytes_s=1000.0 / layer_s, down_bytes_s=1000.0 / layer_s)
        result, _ = timed("ddp", (link, link), 8, layerwise=True)
        assert result.utilization == pytest.approx(1 / (1 + late_s))
        blocking, _ = timed("ddp", (link, link), 8)
        assert blocking.utilization == pytest.approx(1 / (1 + 4 * layer_s))


def test_latency_is_not_hidden_by_the_layers_before():
    far = PeerProfile(up_bytes_s=1e4, down_bytes_s=1e4, latency_s=0.05)
    result, _ = timed("ddp", (far, far), 8, layerwise=True)
    assert result.utilization == pytest.approx(1 / (1 + 0.1 + 4 * 0.1))


@pytest.mark.parametrize(("layers", "fragments", "period"), [(6, 2, 10), (12, 4, 10), (12, 4, 40)])
@pytest.mark.parametrize("overlap_steps", [0, 1, 3])
@pytest.mark.parametrize("layer_s", [0.05, 0.3, 0.9, 2.5])
def test_delays_are_those_of_a_simulation_of_every_pass_of_every_layer(
    layers, fragments, period, overlap_steps, layer_s
):
    link = PeerProfile(up_bytes_s=1000.0 / layer_s, down_bytes_s=1000.0 / layer_s)
    schedule = f"{{name: strided, period: {period}, num_fragments: {fragments}, overlap_steps: {overlap_steps}}}"
    label = f"streaming-diloco:compressor=fp32,schedule={schedule}"
    seconds = []
    for steps in (2 * period, 4 * period):
        _, simulation = timed(label, (link, link), steps, layerwise=True, model=layout(layers))
        expected_s = every_pass(layers, fragments, period, overlap_steps, layer_s, steps)
        seconds.append((simulation.replicas[0].present_s, expected_s))
    (before_s, expected_before_s), (after_s, expected_after_s) = seconds
    assert after_s - before_s == pytest.approx(expected_after_s - expected_before_s)


def every_pass(layers: int, fragments: int, period: int, overlap_steps: int, layer_s: float, steps: int) -> float:
    """Seconds until the end of the last step, with 3 passes of equal length for each layer and step."""
    node_s = 1.0 / (3 * layers)
    now_s = link_s = 0.0
    there_s: list[list[tuple[int, float]]] = [[] for _ in range(layers)]  # (needed at step, seconds)
    turns = {fragment * period // fragments: fragment for fragment in range(fragments)}
    for step in range(1, steps + 1):
        for layer in range(layers):
            while there_s[layer] and there_s[layer][0][0] <= step:
                now_s = max(now_s, there_s[layer].pop(0)[1])
            now_s += node_s
        for layer in reversed(range(layers)):
            now_s += 2 * node_s
            if turns.get(step % period) == layer % fragments:
                link_s = max(link_s, now_s) + layer_s
                there_s[layer].append((step + 1 + overlap_steps, link_s))
    return now_s


# ---- what counts


def test_time_is_counted_to_the_moment_at_which_a_peer_leaves():
    guest = PeerProfile(presence=((0.0, 2.5),))
    result, simulation = timed("diloco:steps_per_round=4", (PeerProfile(), guest), 4)
    assert (simulation.replicas[1].busy_s, simulation.replicas[1].present_s) == (2.5, 2.5)
    assert result.utilization == pytest.approx(1.0)


def test_a_step_that_the_end_cuts_off_counts_as_far_as_it_got():
    swift = PeerProfile(speed=4.0)
    label = "async-diloco:steps_per_round=9,straggler={name: quorum, count: 1}"
    result, simulation = timed(label, (swift, PeerProfile()), 3)
    assert result.tally.steps == 6
    assert [replica.busy_s for replica in simulation.replicas] == pytest.approx([1.25, 1.25])
    assert result.utilization == pytest.approx(1.0)


# ---- the model of overlap


def test_layers_know_when_they_can_leave_and_when_they_are_needed():
    model = FlatLayout(
        names=("embed", "layers.0.w", "layers.1.w", "layers.2.w", "norm"), shapes=((30,), (10,), (10,), (10,), (20,)),
        offsets=(0, 30, 40, 50, 60), numel=80,
    )
    whole, middle = layers_of(model, [((0, 80),), ((40, 50),)])
    assert [layer.share for layer in whole] == [30 / 80, 10 / 80, 40 / 80]
    assert [layer.ready for layer in whole] == pytest.approx([2 / 3 * 2 / 3, 2 / 3 / 3, 0])
    assert [layer.needed for layer in whole] == pytest.approx([1 / 3 * 2 / 3, 1 / 3 / 3, 0])
    assert [layer.share for layer in middle] == [1.0]
    assert middle[0].ready == pytest.approx(2 / 9)


def test_a_model_without_blocks_hides_nothing():
    model = FlatLayout(names=("a", "b"), shapes=((3,), (4,)), offsets=(0, 3), numel=7)
    assert layers_of(model, [((0, 7),)]) == [WHOLE]


def test_a_delay_ends_when_each_layer_is_there_before_it_is_needed():
    def run(transfer_s: float, **changes: float) -> tuple[float, float]:
        usual = {"latency_s": 0.0, "step_before_s": 3.0, "step_after_s": 3.0}
        return pipelined(layers, transfer_s, **{**usual, **changes})

    layers = (Layer(share=0.5, ready=0.4, needed=0.2), Layer(share=0.5, ready=0.1, needed=0.05))
    # The upper one leaves 1.2 s before the end, the lower one at most 0.3 s before; it is needed 0.15 s after.
    assert run(0.4) == pytest.approx((0.0, -0.1))
    assert run(2.0) == pytest.approx((0.65, 0.8))
    assert run(2.0, latency_s=0.1) == pytest.approx((0.75, 0.8))
    assert run(2.0, step_before_s=0.0) == pytest.approx((1.85, 2.0))
    assert run(2.0, link_free_s=0.0) == pytest.approx((1.85, 2.0))
    assert run(2.0, step_after_s=0.0) == pytest.approx((0.8, 0.8))
    assert pipelined(WHOLE, 2.0, 0.5, step_before_s=3.0, step_after_s=3.0) == (2.5, 2.0)
    assert math.isclose(run(2.0, link_free_s=-1.0)[0], 0.85)
