"""Updates: shards, digest, strict splitting."""

from __future__ import annotations

import pytest
import torch
from blake3 import blake3

from peer.outer.compress.base import Compressor, MemberPayloadError, PayloadError
from peer.outer.compress.identity import Fp32
from peer.outer.compress.int8 import BlockInt8
from peer.outer.compress.registry import COMPRESSORS
from peer.outer.numerics.kernels import compiled
from peer.outer.state.reduced_update import SLICE, ReduceFormat, Update


def make_update(x: torch.Tensor, num_shards: int, codec: Compressor, elements: int = SLICE) -> Update:
    wire, shards = ReduceFormat(x.numel(), codec, elements), range(num_shards)
    payloads = [b"".join(codec.encode(x[a:b]) for a, b in wire.slices(num_shards, place)) for place in shards]
    return wire.update(payloads, [1] * num_shards, 0)


@pytest.mark.parametrize("name", COMPRESSORS)
def test_a_payload_is_its_slices_and_every_range_decodes_alike(name: str) -> None:
    codec, x = COMPRESSORS[name], torch.randn(5300, generator=torch.Generator().manual_seed(0))
    update = make_update(x, 3, codec, 1024)
    whole = codec.decode(codec.encode(x), 5300)
    assert len(update.payload) == ReduceFormat(5300, codec, 1024).update_bytes(3)
    for start, stop in [(0, 5300), (256, 1024), (1792, 5120), (5120, 5300), (512, 512), (1024, 2048)]:
        assert torch.equal(update.decode_range(start, stop), whole[start:stop])


@pytest.mark.parametrize("codec", [Fp32(), BlockInt8()], ids=["fp32", "int8"])
@pytest.mark.parametrize("num_shards", [1, 3, 7])
def test_ranges_across_shards_are_slices_of_the_whole(codec: Compressor, num_shards: int) -> None:
    x = torch.randn(1300, generator=torch.Generator().manual_seed(0))
    update = make_update(x, num_shards, codec)
    whole = codec.decode(codec.encode(x), 1300)
    for start, stop in [(0, 1300), (256, 1024), (512, 768), (1024, 1300), (512, 512)]:
        assert torch.equal(update.decode_range(start, stop), whole[start:stop])


@pytest.mark.parametrize(("name", "bits"), [("int8", 8), ("int4", 4), ("int2", 2)])
@pytest.mark.parametrize("elements", [256, 1024])
def test_what_loops_read_of_a_range_is_what_it_decodes_to(name: str, bits: int, elements: int) -> None:
    codec, loops = COMPRESSORS[name], compiled()
    assert loops is not None
    update = make_update(torch.randn(5300, generator=torch.Generator().manual_seed(0)), 3, codec, elements)
    for start, stop in [(0, 5300), (256, 1024), (1792, 5120), (5120, 5300), (512, 512)]:
        pieces = []
        for one in update.coded(start, stop) or ():
            assert one.bits == bits
            pieces.append(torch.empty(one.rows, one.width))
            loops.dequantize(bits, one.scales, one.codes, pieces[-1])
        assert torch.equal(torch.cat([torch.empty(0), *map(torch.flatten, pieces)]), update.decode_range(start, stop))


@pytest.mark.parametrize("codec", [Fp32(), COMPRESSORS["fp16"], BlockInt8(4096)], ids=lambda one: one.name)
def test_where_no_loop_reads_a_codec_or_rows_so_long_there_is_nothing_for_one(codec: Compressor) -> None:
    assert make_update(torch.ones(5300), 3, codec).coded(0, 5300) is None


def test_splitting_undoes_joining() -> None:
    update = make_update(torch.arange(1300, dtype=torch.float32), 4, BlockInt8())
    again = ReduceFormat(1300, BlockInt8()).split(update.payload, [1] * 4, 0)
    assert again == update
    assert all(isinstance(payload, memoryview) for payload in again.payloads)  # a large update is not copied
    assert again.digest() == update.digest() == blake3(update.payload).hexdigest()
    assert len(update.payload) == 1300 + 4 * 6


def test_splitting_is_strict_about_the_length() -> None:
    payload = make_update(torch.ones(1300), 2, BlockInt8()).payload
    for bad in (payload[:-1], payload + b"\0", b""):
        with pytest.raises(PayloadError, match=f"is {len(bad)} bytes; it must be 1324"):
            ReduceFormat(1300, BlockInt8()).split(bad, [1] * 2, 0)
    with pytest.raises(PayloadError, match="it must be 0"):
        ReduceFormat(1300, BlockInt8()).split(payload, [], 0)


def test_a_malformed_payload_makes_no_update() -> None:
    good = make_update(torch.ones(1300), 2, BlockInt8())
    with pytest.raises(MemberPayloadError, match="-128") as caught:
        Update((good.payloads[0], good.payloads[1][:-1] + b"\x80"), 1300, BlockInt8())
    assert caught.value.place == 1
    with pytest.raises(MemberPayloadError, match="payload of 532 values is 548 bytes; it must be 544"):
        Update((good.payloads[0], good.payloads[1] + b"1234"), 1300, BlockInt8())
    with pytest.raises(PayloadError, match="0 shards"):
        Update((), 1300, BlockInt8())


def test_empty_shards_are_empty() -> None:
    update = make_update(torch.ones(100), 3, BlockInt8())
    assert [len(payload) for payload in update.payloads] == [0, 0, 104]
    assert ReduceFormat(100, BlockInt8()).split(update.payload, [1] * 3, 0) == update
    with pytest.raises(PayloadError, match="payload of 0 values is 1 bytes"):
        Update((b"x", b"", update.payloads[2]), 100, BlockInt8())
