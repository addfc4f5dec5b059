"""What a reducer does: aggregate the same shard of all contributions, and encode the result once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from peer.outer.aggregate.base import Aggregator, Mean
from peer.outer.aggregate.gated import Gated
from peer.outer.compress.base import Compressor, MemberPayloadError, Payload, PayloadError, Read, check_length
from peer.outer.compress.sliced import Sliced
from peer.outer.numerics.kernels import add_scaled
from peer.outer.numerics.scratch import scratch_vector

Decoded = Callable[[int, Tensor], Tensor]  # (place of a contribution, where to write it) -> that
Encode = Callable[[int, Read], bytes]  # (numel, read) -> payload
COSINE_SAMPLE = 1 << 16  # values of every range: an eighth of a large shard tells the cosine to a few thousandths


@dataclass(frozen=True, kw_only=True)
class ReduceRule:
    """How contributions become one payload.

    Attributes:
        compressor: of contributions and result.
        aggregator: `bound` to the members already.
        encode: in place of `compressor.encode_ranges`, where error feedback takes part.
    """

    compressor: Compressor
    aggregator: Aggregator
    encode: Encode | None = None


def reduce_shard(
    payloads: Sequence[Payload],
    weights: Sequence[int],
    numel: int,
    compressor: Compressor,
    aggregator: Aggregator = Mean(),
    encode: Encode | None = None,
) -> tuple[bytes, float | None]:
    """Aggregate one shard of all contributions in roster order and encode the result once.

    Args:
        payloads: one encoded shard of `numel` elements per member, in roster order.
        weights: tokens per member.
        compressor: where it writes a shard in slices, each is aggregated by itself.

    Returns:
        the encoded aggregate, and the mean pairwise cosine of the contributions (None for fewer than two, or zeros).

    Raises:
        MemberPayloadError: a payload is malformed, and the aggregator does not drop such.
    """
    gram = torch.zeros(len(payloads), len(payloads), dtype=torch.float64)
    own = bound(aggregator, len(payloads))
    if not isinstance(compressor, Sliced) or encode is not None:
        rule = ReduceRule(compressor=compressor, aggregator=own, encode=encode)
        return reduce_range(payloads, weights, numel, rule, gram), mean_cosine(gram)
    for payload in payloads:
        check_length(payload, compressor.wire_bytes(numel), compressor.name, numel)
    reduced, position, rule = [], 0, ReduceRule(compressor=compressor.base, aggregator=own)
    for start, stop in compressor.slices(0, numel) or [(0, 0)]:
        size = compressor.base.wire_bytes(stop - start)
        contributions = [memoryview(payload)[position : position + size] for payload in payloads]
        reduced.append(reduce_range(contributions, weights, stop - start, rule, gram))
        position += size
    return b"".join(reduced), mean_cosine(gram)


def bound(aggregator: Aggregator, members: int) -> Aggregator:
    """The aggregator for a round of so many members."""
    return aggregator.bind(members) if isinstance(aggregator, Mean) else aggregator


def reduce_range(
    payloads: Sequence[Payload],
    weights: Sequence[int],
    numel: int,
    rule: ReduceRule,
    gram: Tensor,
    dropped: dict[int, str] | None = None,
    room: Tensor | None = None,
) -> bytes:
    """`reduce_shard` of one slice: a function of its arguments alone, the same bits on every machine.

    Args:
        gram: fp64 [members, members]; the inner products of the contributions are added, for `mean_cosine`.
        dropped: takes the reason for each contribution that the aggregator dropped, by its place.
        room: fp32 [members, at least `numel`], scratch: fresh memory costs more than the decoding. None: it is made.

    Raises:
        ValueError: not one weight per payload; see `Aggregator.aggregate`.
    """
    if len(payloads) != len(weights):
        raise ValueError(f"{len(payloads)} contributions with {len(weights)} weights: must be equal")
    aggregator = rule.aggregator

    def combine(contributions: list[Tensor]) -> Tensor:
        if not isinstance(aggregator, Gated):
            return aggregator.aggregate(contributions, weights)
        result, reasons = aggregator.judged(contributions, weights)
        if dropped is not None:
            dropped.update(reasons)
        return result

    def aggregate(start: int, stop: int) -> Tensor:
        count = 1 if isinstance(aggregator, Mean) else len(payloads)
        rows = torch.empty(count, stop - start) if room is None else room[:count, : stop - start]

        def decoded(place: int, out: Tensor) -> Tensor:
            try:
                return rule.compressor.decode_range(payloads[place], numel, start, stop, out)
            except PayloadError as error:
                if not isinstance(aggregator, Gated):
                    raise MemberPayloadError(place, error) from None
                return out.fill_(torch.nan)  # a gate drops it: one sender must not end the round for all

        if isinstance(aggregator, Mean):
            result, sample = _mean(decoded, aggregator.factors(weights), rows[0])
        else:
            result = combine([decoded(index, row) for index, row in enumerate(rows)])
            sample = rows[:, :COSINE_SAMPLE]
        gram.add_((sample @ sample.T).double())
        return result

    read = aggregate if aggregator.separable else _slices_of(aggregate(0, numel))
    return (rule.encode or rule.compressor.encode_ranges)(numel, read)


def _mean(decoded: Decoded, factors: Sequence[float], scratch: Tensor) -> tuple[Tensor, Tensor]:
    """`scaled_sum` of contributions that are decoded one at a time: two vectors, however many there are.

    Returns:
        the sum, and the first COSINE_SAMPLE values of each contribution.
    """
    length = min(COSINE_SAMPLE, scratch.numel())
    sample = scratch_vector(len(factors) * length).view(len(factors), length)
    result = decoded(0, scratch_vector(scratch.numel()))
    sample[0] = result[:COSINE_SAMPLE]
    result.mul_(factors[0])
    for index in range(1, len(factors)):
        add_scaled(result, decoded(index, scratch), factors[index])
        sample[index] = scratch[:COSINE_SAMPLE]
    return result, sample


def _slices_of(whole: Tensor) -> Read:
    return lambda start, stop: whole[start:stop]


def mean_cosine(gram: Tensor) -> float | None:
    """Mean of the pairwise cosines, from the inner products fp64 [n, n]; None for fewer than two, or zeros."""
    members = gram.shape[0]
    norms = gram.diagonal().clamp_min(0.0).sqrt()
    if members < 2 or bool((norms == 0).any()):
        return None
    cosines = gram / torch.outer(norms, norms)
    mean = float((cosines.sum() - members) / (members * (members - 1)))
    return min(1.0, max(-1.0, mean)) if mean == mean else None
