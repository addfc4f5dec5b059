from __future__ import annotations

import os
import random
import subprocess
import sys

import pytest
import torch
from pydantic import ValidationError

from peer.link.memory import HEAD_BYTES, SLOT_BYTES, SLOTS, Head, SharedState
from peer.link.supervisor import create_descriptor

HEAD = Head(round=7, lineage_id="a" * 64, state_digest="b" * 64, contributed=3)
# By hand, as the layout is written down; an import of torch would take most of the time of this test.
CHILD = """
import array, json, mmap, os, struct, sys, zlib
state = mmap.mmap(int(sys.argv[1]), os.fstat(int(sys.argv[1])).st_size)
assert state[0] == 1  # the first slot
length, checksum = struct.unpack_from("<II", state, 8)
head = json.loads(state[16 : 16 + length])
assert zlib.crc32(state[16 : 16 + length]) == checksum
assert (head["round"], head["contributed"]) == (7, 3), head
anchor, snapshot, second_buffer = 4096, 4096 + 4000, 4096 + 3 * 4000
assert sum(array.array("f", state[anchor:snapshot])) == 499500.0
state[snapshot : snapshot + 4000] = state[anchor:snapshot]
state[second_buffer : second_buffer + 4000] = array.array("f", [2.5] * 1000).tobytes()
text = json.dumps({**head, "round": 8, "contributed": None}).encode()
struct.pack_into("<II", state, 2048, len(text), zlib.crc32(text))
state[2056 : 2056 + len(text)] = text
state[0] = 2
"""


@pytest.fixture
def descriptor():
    number = create_descriptor()
    yield number
    os.close(number)


def test_two_mappings_share_their_data(descriptor):
    one, two = SharedState(descriptor, 1000, 2), SharedState(descriptor, 1000, 2)
    vectors = [one.anchor, one.snapshot, *one.buffers]
    for value, vector in enumerate(vectors, start=1):
        vector.fill_(value)
    assert [v.tolist() for v in (two.anchor, two.snapshot, *two.buffers)] == [[float(v)] * 1000 for v in (1, 2, 3, 4)]
    two.buffers[0][999] = -1.0
    assert one.buffers[0].tolist() == [3.0] * 999 + [-1.0]
    assert [v.dtype for v in vectors] == [torch.float32] * 4


def test_the_layout_is_head_anchor_snapshot_buffers(descriptor):
    state = SharedState(descriptor, 5, 1)
    assert os.fstat(descriptor).st_size == HEAD_BYTES + 4 * 5 * 3
    state.anchor[0], state.snapshot[0], state.buffers[0][0] = 1.0, 2.0, 3.0
    raw = os.pread(descriptor, 60, HEAD_BYTES)
    assert torch.frombuffer(bytearray(raw), dtype=torch.float32)[::5].tolist() == [1.0, 2.0, 3.0]


def test_new_memory_is_zero_and_has_no_head(descriptor):
    state = SharedState(descriptor, 10, 1)
    assert state.head is None
    assert not state.anchor.any()
    assert not state.buffers[0].any()


def test_a_head_survives_in_another_mapping(descriptor):
    one, two = SharedState(descriptor, 10, 0), SharedState(descriptor, 10, 0)
    one.head = HEAD
    assert two.head == HEAD
    shorter = HEAD.model_copy(update={"contributed": None, "round": 8})
    two.head = shorter
    assert one.head == shorter
    one.head = None
    assert two.head is None
    assert one.head is None


def test_a_head_of_impossible_length_is_no_head(descriptor):
    state = SharedState(descriptor, 10, 0)
    state.head = HEAD
    for length in (0, SLOT_BYTES - 3, 2**32 - 1):
        os.pwrite(descriptor, length.to_bytes(4, "little"), SLOTS[0])
        assert state.head is None
    for slot in (3, 255):
        os.pwrite(descriptor, bytes([slot]), 0)
        assert state.head is None


def test_whoever_dies_while_it_writes_a_head_leaves_the_one_before(descriptor):
    """Whatever of the new one has been written, in any order, and whichever slot it goes to."""
    memory, rng = SharedState(descriptor, 5, 1), random.Random(1)
    for round in range(9, 14):
        old = Head(round=round, lineage_id="1" * 64, contributed=round)
        memory.head = old
        before = os.pread(descriptor, HEAD_BYTES, 0)
        memory.head = new = old.model_copy(update={"state_digest": "4" * 64})
        after = os.pread(descriptor, HEAD_BYTES, 0)
        changed = [place for place in range(1, HEAD_BYTES) if before[place] != after[place]]
        for _ in range(100):
            os.pwrite(descriptor, before, 0)
            for place in rng.sample(changed, rng.randrange(len(changed) + 1)):
                os.pwrite(descriptor, after[place : place + 1], place)
            assert memory.head == old
        os.pwrite(descriptor, after, 0)
        assert memory.head == new


def test_what_is_read_in_the_middle_of_a_write_is_no_head(descriptor):
    memory = SharedState(descriptor, 5, 1)
    memory.head = HEAD
    for place in (SLOTS[0], SLOTS[0] + 4, SLOTS[0] + 9):  # length, checksum, text
        byte = os.pread(descriptor, 1, place)
        os.pwrite(descriptor, bytes([byte[0] ^ 1]), place)
        assert memory.head is None
        os.pwrite(descriptor, byte, place)
    assert memory.head == HEAD


def test_a_head_is_strict_about_digests():
    with pytest.raises(ValidationError, match="state_digest"):
        Head(round=1, lineage_id="a" * 64, state_digest="B" * 64)


def test_the_state_survives_another_process(descriptor):
    state = SharedState(descriptor, 1000, 2)
    state.anchor.copy_(torch.arange(1000.0))
    state.head = HEAD
    command = [sys.executable, "-S", "-c", CHILD, str(descriptor)]
    subprocess.run(command, pass_fds=(descriptor,), check=True, timeout=60)
    assert state.head == HEAD.model_copy(update={"round": 8, "contributed": None})
    assert torch.equal(state.snapshot, state.anchor)
    assert state.buffers[1].tolist() == [2.5] * 1000
    again = SharedState(descriptor, 1000, 2)
    assert torch.equal(again.anchor, torch.arange(1000.0))


def test_a_descriptor_is_not_inherited_by_accident(descriptor):
    assert not os.get_inheritable(descriptor)
