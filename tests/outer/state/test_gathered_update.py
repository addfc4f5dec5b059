"""Updates of gather rounds: what everybody makes of all payloads."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from peer.outer.aggregate.base import Aggregator, Mean
from peer.outer.aggregate.gated import Gated
from peer.outer.aggregate.robust import TrimmedMean
from peer.outer.compress.base import MemberPayloadError, NonFiniteError, PayloadError
from peer.outer.compress.feedback import Encoder, ErrorFeedback
from peer.outer.compress.registry import codec
from peer.outer.math.aggregation import Aggregation
from peer.outer.optim.optimizers import Sgd
from peer.outer.state.gathered_update import Gathered, GatherFormat, round_seed
from peer.outer.state.outer_state import OuterState
from peer.protocol import hashing
from tests.outer.reference import sent

NUMEL = 5000
SPARSE = "top16/256+int4"


def state_of(expression: str = SPARSE, aggregator: Aggregator = Mean(), round: int = 0) -> OuterState:
    written = GatherFormat(NUMEL, codec(expression).bind(((NUMEL,),)), aggregator, seed=7)
    return OuterState(torch.linspace(-1.0, 1.0, NUMEL), [], Sgd(lr=1.0), written, round)


def locals_of(state: OuterState, count: int, scale: float = 0.01) -> list[Tensor]:
    generator = torch.Generator().manual_seed(count)
    return [state.anchor + scale * torch.randn(NUMEL, generator=generator) for _ in range(count)]


def payloads_of(state: OuterState, locals_: Sequence[Tensor]) -> list[bytes]:
    return [sent(state, state.wire.sender(None), local) for local in locals_]


def decoded(state: OuterState, payloads: Sequence[bytes]) -> list[Tensor]:
    own = state.wire.codec.seeded(round_seed(7, 0, state.round + 1))
    return [own.decode(payload, NUMEL) for payload in payloads]


THRESHOLD = "threshold0.05+int8"


def test_payloads_of_different_lengths_are_stored_each_after_its_length() -> None:
    state = state_of(THRESHOLD)
    assert not state.wire.exact
    payloads = payloads_of(state, [*locals_of(state, 2), state.anchor.clone()])  # the last one has nothing to say
    assert len(payloads[2]) < 100 < len(payloads[0]) < state.wire.broadcast_bytes(3, 0)[0]
    update = state.wire.update(payloads, [1, 2, 3], state.round)
    again = state.split_update(update.payload, [1, 2, 3])
    assert [bytes(payload) for payload in again.payloads] == payloads
    assert again.digest() == update.digest() == hashing.digest(update.payload).hex()
    assert torch.equal(again.decode_range(0, NUMEL), update.decode_range(0, NUMEL))
    assert len(update.payload) == sum(map(len, payloads)) + 3 * 8 < state.wire.update_bytes(3)


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_no_stored_update_of_lengths_that_lie_is_read(data: st.DataObject) -> None:
    state = state_of(THRESHOLD)
    good = state.wire.update(payloads_of(state, locals_of(state, 2)), [1, 1], state.round).payload
    damaged = bytearray(good)
    for at in data.draw(st.lists(st.integers(0, len(good) - 1), max_size=3)):
        damaged[at] = data.draw(st.integers(0, 255))
    length = data.draw(st.sampled_from([None, 0, 1, len(good), 2**63, 2**64 - 1]))
    if length is not None:
        damaged[:8] = length.to_bytes(8, "little")
    damaged = damaged[: data.draw(st.integers(0, len(damaged)))] + data.draw(st.binary(max_size=20))
    try:
        read = state.split_update(bytes(damaged), [1, 1])
    except (PayloadError, MemberPayloadError):
        return
    assert read.payload == bytes(damaged)
    assert bool(read.decode_range(0, NUMEL).isfinite().all())


@pytest.mark.parametrize("expression", [SPARSE, "dct64+top4/64+fp32", "random0.1+fp32", "int8"])
@pytest.mark.parametrize("aggregator", [Mean(), Mean(normalise="members"), TrimmedMean(), Gated()], ids=repr)
def test_everybody_aggregates_all_payloads_in_roster_order(expression: str, aggregator: Aggregator) -> None:
    state = state_of(expression, aggregator, round=3)
    payloads, weights = payloads_of(state, locals_of(state, 4)), [100, 200, 50, 100]
    update = state.wire.update(payloads, weights, state.round)
    expected = aggregator.bind(4).aggregate(decoded(state, payloads), weights)
    assert torch.equal(update.decode_range(0, NUMEL), expected)
    assert torch.equal(update.decode_range(1300, 2000), expected[1300:2000])
    assert update.digest() == hashing.digest(b"".join(payloads)).hex()
    known = {place: vector.clone() for place, vector in enumerate(decoded(state, payloads)) if place in (0, 2)}
    with_own = state.wire.update(payloads, weights, state.round, known)
    assert isinstance(with_own, Gathered)
    assert isinstance(update, Gathered)
    assert torch.equal(with_own.vector, update.vector)
    assert with_own.aggregation is not None
    assert update.aggregation is not None
    assert with_own.aggregation.cosine == update.aggregation.cosine
    assert with_own.aggregation.reasons == update.aggregation.reasons


def test_a_stored_update_is_split_into_what_was_sent() -> None:
    state = state_of()
    update = state.wire.update(payloads_of(state, locals_of(state, 3)), [1, 2, 3], state.round)
    again = state.split_update(update.payload, [1, 2, 3])
    assert again.payloads == update.payloads
    assert again.digest() == update.digest()
    assert torch.equal(again.decode_range(0, NUMEL), update.decode_range(0, NUMEL))
    assert len(update.payload) == state.wire.update_bytes(3)
    for wrong in (update.payload[:-1], update.payload + b"\0", b""):
        with pytest.raises(PayloadError, match=rf"3 payloads of 5000 values are {len(wrong)} bytes; must be \d+"):
            state.split_update(wrong, [1, 2, 3])


def test_applying_moves_the_anchor_by_the_aggregate() -> None:
    state = state_of()
    update = state.wire.update(payloads_of(state, locals_of(state, 3)), [1, 2, 3], state.round)
    before = state.anchor.clone()
    state.check(update)
    state.apply(update, 1, "a" * 64)
    assert torch.equal(state.anchor, before - update.decode_range(0, NUMEL))


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf, 3e14])
def test_an_aggregate_that_no_state_may_take_is_refused(bad: float) -> None:
    """Of contributions near fp32's end, an aggregator of whole vectors may make what is no number."""
    state, vector = state_of(), torch.zeros(NUMEL)
    state.check(Gathered(vector, (b"",)))
    vector[7] = bad
    with pytest.raises(NonFiniteError, match=r"values \[0, 5000\) of the update may reach (nan|inf|3e\+14)"):
        state.check(Gathered(vector, (b"",)))


def test_random_masks_are_of_the_run_and_the_round() -> None:
    first, later = state_of("random0.1+fp32"), state_of("random0.1+fp32", round=1)
    (payload,) = payloads_of(first, locals_of(first, 1))
    right = first.wire.update([payload], [1], first.round).decode_range(0, NUMEL)
    wrong = later.wire.update([payload], [1], later.round).decode_range(0, NUMEL)
    assert not torch.equal(right != 0.0, wrong != 0.0)
    assert len({round_seed(7, 0, 1), round_seed(7, 0, 2), round_seed(7, 1, 1), round_seed(8, 0, 1)}) == 4


def test_an_update_of_an_earlier_round_is_read_as_it_was_then() -> None:
    state, weights = state_of("random0.1+fp32", round=3), [64, 64]
    update = state.wire.update(payloads_of(state, locals_of(state, 2)), weights, state.round)
    state.round = 5
    then, now = (state.split_update(update.payload, weights, round) for round in (3, None))
    assert torch.equal(then.decode_range(0, NUMEL), update.decode_range(0, NUMEL))
    assert not torch.equal(now.decode_range(0, NUMEL), update.decode_range(0, NUMEL))


def test_whose_payload_is_malformed_is_named() -> None:
    state = state_of()
    payloads = payloads_of(state, locals_of(state, 3))
    for bad in (payloads[1][:-1], b"\xff" * len(payloads[1])):
        with pytest.raises(MemberPayloadError) as caught:
            state.wire.update([payloads[0], bad, payloads[2]], [1, 1, 1], state.round)
        assert caught.value.place == 1


def test_gates_drop_what_is_malformed_and_say_why() -> None:
    state = state_of(aggregator=Gated())
    payloads = payloads_of(state, locals_of(state, 4))
    update = state.wire.update([*payloads[:3], b"\xff" * len(payloads[3])], [1, 1, 1, 1], state.round)
    assert update.aggregation is not None
    assert update.aggregation.reasons == {3: "holds NaN or infinity"}
    (drop,) = update.aggregation.drops("abcd")
    assert (drop.peer_id, drop.slices, drop.of, drop.reason) == ("d", 1, 1, "holds NaN or infinity")
    honest = Gated().aggregate(decoded(state, payloads[:3]), [1, 1, 1])
    assert torch.equal(update.decode_range(0, NUMEL), honest)
    with pytest.raises(ValueError, match="all 2 contributions were dropped"):
        state.wire.update([b"", b""], [1, 1], state.round)


def test_one_weight_for_each_payload() -> None:
    state = state_of()
    with pytest.raises(ValueError, match="2 contributions with 1 weights"):
        state.wire.update(payloads_of(state, locals_of(state, 2)), [1], state.round)


def test_the_cosine_is_that_of_what_was_decoded() -> None:
    state = state_of()
    same, other = locals_of(state, 2)
    alike = state.wire.update(payloads_of(state, [same, same]), [1, 1], state.round)
    unlike = state.wire.update(payloads_of(state, [same, other]), [1, 1], state.round)
    assert alike.aggregation is not None
    assert unlike.aggregation is not None
    assert alike.aggregation.cosine == pytest.approx(1.0)
    first, second = decoded(state, payloads_of(state, [same, other]))
    assert unlike.aggregation.cosine == pytest.approx(float(torch.cosine_similarity(first, second, 0)), abs=1e-6)


def test_what_was_not_sent_comes_later_and_an_abandoned_round_changes_nothing() -> None:
    state = state_of()
    sender, (local,) = state.wire.sender(ErrorFeedback(decay=1.0)), locals_of(state, 1)
    encoder = sender.residual
    assert isinstance(encoder, Encoder)
    first = sent(state, sender, local)
    encoder.revert()
    assert sent(state, sender, local) == first
    encoder.commit()
    (received,) = decoded(state, [first])
    assert sender.received is not None
    assert torch.equal(sender.received, received)
    assert encoder.residual is not None
    assert torch.equal(encoder.residual, (state.anchor - local) - received)
    diverged = local.clone()
    diverged[17] = torch.nan
    kept = encoder.residual.clone()
    with pytest.raises(NonFiniteError):
        sent(state, sender, diverged)
    assert torch.equal(encoder.residual, kept)


def test_gathered_payloads_have_no_slices_that_a_member_reduces() -> None:
    wire = state_of().wire
    with pytest.raises(AssertionError, match="gathered, not reduced"):
        wire.reduce(Aggregation(Mean(), [1]), [b""], 0, NUMEL)
    with pytest.raises(AssertionError, match=r"\[0, 512\) is not the whole of 5000"):
        sent(state_of(), wire.sender(None), torch.zeros(NUMEL), 0, 512)
    assert (wire.slices(3, 1), wire.contributed_bytes(3, 1), wire.bounds(3)[1]) == ((), [], (0, 0))
