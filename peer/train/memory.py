"""What a peer's training takes of its device and of this machine's memory, before any of it is allocated."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from peer.errors import UserError
from peer.train.compute import Compute
from peer.train.device import available_memory
from peer.train.loss import chunk_bytes

WEIGHT_BYTES = 8  # of a parameter: fp32 weight and gradient
FROZEN_BYTES = 4  # of a parameter of the base that an adapter stands on
PACKED_BITS = 4.127  # of one in 4 bits: blocks of 64 have a scale of one byte, 256 scales one of fp32
MOMENT_BYTES = 8  # two of Adam, fp32
MOMENT_BYTES_8BIT = 2
# Of a parameter in RAM: shared with the agent are anchor, momentum and snapshot; base and a scratch are the trainer's.
SHARED_BYTES, BASE_BYTES = 12, 8
CARD_COPY_BYTES = 8  # on the only card of a peer, if it has memory of its own: what a merge brings there
# Bytes that a layer saves of a token, for each unit of width: about the least of what was measured (tests/train). OPT
# saves 57 in fp32, 37 in bf16; GPT-NeoX 65 and 35; Llama 105 and 67. Autocast leaves norms and residuals in fp32.
SAVED_BYTES = {"fp32": 56, "bf16": 34, "fp16": 34}
LOGITS_KEPT = 2  # times fp32: logits and their gradient
_GIB = 2**30
Free = Callable[[torch.device], int]
RuleBytes = tuple[int, int]
"""Of a parameter, what the recipe's local rule keeps: (on the device, in RAM)."""
NO_RULE: RuleBytes = (0, 0)


@dataclass(frozen=True, kw_only=True)
class ModelSize:
    """How large a model is: parameters (tied ones once), those of them that do not train, ids, width, layers."""

    parameters: int
    vocab_size: int
    hidden_size: int
    layers: int
    frozen: int = 0

    @property
    def trained(self) -> int:
        """Parameters that train, and travel."""
        return self.parameters - self.frozen


@dataclass(frozen=True, kw_only=True)
class Footprint:
    """The least bytes that training takes: of one device, or of all of a peer's that use the same memory.

    Attributes:
        parameters: of the model.
        training: weights, gradients, moments and what the local rule keeps, on the device; its part of them, where the
            devices share a model.
        activations: of one micro-batch until its backward pass, on the device.
        agent: in RAM, the shared state and the trainer's copy of the anchor: once for a peer.
    """

    parameters: int
    training: int
    activations: int
    agent: int

    @classmethod
    def of(
        cls, size: ModelSize, tokens: int, device: torch.device, compute: Compute, rule_bytes: RuleBytes = NO_RULE
    ) -> Footprint:
        """Of a model that learns from so many tokens in one forward pass."""
        moment_bytes = MOMENT_BYTES_8BIT if compute.eight_bit else MOMENT_BYTES
        ranks = compute.ranks
        copies = CARD_COPY_BYTES if device.type == "cuda" and ranks.count == 1 else 0
        training = size.trained * (WEIGHT_BYTES + moment_bytes + copies + rule_bytes[0])
        share = ranks.count if ranks.sharded else 1
        here = ranks.count if device.type == "cpu" else 1  # that use the same memory
        return cls(
            parameters=size.parameters,
            training=here * (training + frozen_bytes(size, compute.four_bit)) // share,
            activations=here * activation_bytes(size, tokens, device, compute),
            agent=size.trained * (SHARED_BYTES + BASE_BYTES + rule_bytes[1]),
        )

    def check(self, device: torch.device, free_bytes: Free = available_memory) -> None:
        """Refuse a model that cannot fit, before any of it is allocated.

        Args:
            free_bytes: of a device, or of RAM within the limits of this container.

        Raises:
            UserError: GiB needed and GiB free, on the device or in RAM.
        """
        ram = torch.device("cpu")
        own = device.type == "cuda"
        _check(self.parameters, self.training + (0 if own else self.agent), device if own else ram, free_bytes)
        if own:
            _check(self.parameters, self.agent, ram, free_bytes)
        needed = self.training + self.activations + (0 if own else self.agent)
        free = free_bytes(device)
        if needed > free:
            raise UserError(
                f"a step needs {needed / _GIB:.2f} GiB, {self.activations / _GIB:.2f} GiB of them for activations; "
                f"{free / _GIB:.2f} GiB free on {device}",
                "lower --per-device-train-batch-size, use --gradient-checkpointing, --adam-8bit or --bf16, "
                "free memory, or use a larger machine",
            )

    def in_words(self, device: torch.device, free_bytes: Free = available_memory) -> str:
        """One line: what will be used of what is free."""
        own, ram = device.type == "cuda", torch.device("cpu")
        needed = self.training + self.activations + (0 if own else self.agent)
        agent = f"{self.agent / _GIB:.2f} GiB of RAM for the agent"
        more = f", and {agent} of {free_bytes(ram) / _GIB:.2f}" if own else ""
        return (
            f"needs at least {needed / _GIB:.2f} of {free_bytes(device) / _GIB:.2f} GiB free on {device} "
            f"({self.training / _GIB:.2f} weights, gradients and moments, {self.activations / _GIB:.2f} activations"
            f"{'' if own else ', ' + agent}){more}"
        )


def frozen_bytes(size: ModelSize, four_bit: bool) -> int:
    """Of the base that an adapter stands on; in 4 bits its embeddings stay as they are."""
    whole = min(size.frozen, size.vocab_size * size.hidden_size) if four_bit else size.frozen
    return FROZEN_BYTES * whole + int(PACKED_BITS / 8 * (size.frozen - whole))


def activation_bytes(size: ModelSize, tokens: int, device: torch.device, compute: Compute) -> int:
    """The least that one forward pass keeps until its backward pass: what each layer saves, and fp32 logits with their
    gradient, as far as they are made at once. With recomputation, the input of each layer, and then the logits or one
    layer in full, whichever is larger.
    """
    layer = tokens * size.hidden_size * SAVED_BYTES[compute.precision]
    logits = LOGITS_KEPT * min(4 * size.vocab_size * tokens, max(chunk_bytes(device), 4 * size.vocab_size))
    if compute.checkpointing:
        return 4 * tokens * size.hidden_size * size.layers + max(layer, logits)
    return layer * size.layers + logits


def check_memory(
    parameters: int, needed: int, place: torch.device, free_bytes: Free = available_memory
) -> None:
    """Refuse what needs more than the free memory of one place.

    Raises:
        UserError: GiB needed and GiB free.
    """
    _check(parameters, needed, place, free_bytes)


def _check(parameters: int, needed: int, place: torch.device, free_bytes: Free) -> None:
    free = free_bytes(place)
    if needed > free:
        raise UserError(
            f"a model of {parameters / 1e6:.1f}M parameters needs {needed / _GIB:.2f} GiB; "
            f"{free / _GIB:.2f} GiB free on {place}",
            "free memory (or raise the limit of its container), use a larger machine, or choose a smaller model",
        )
