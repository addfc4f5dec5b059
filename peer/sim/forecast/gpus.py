"""How long a step takes on a card that is not here: from its maker's figures, and the share of them that is reached."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from peer.errors import UserError, did_you_mean
from peer.train.utilisation import PEAK_TFLOPS

COMMON_MFU = 0.4  # of dense models of about 1B parameters in bf16 on one card, without tuning
SOURCES: Final[Mapping[str, str]] = MappingProxyType({
    "B200": "NVIDIA DGX B200 datasheet, without sparsity", "H200": "NVIDIA H200 Tensor Core GPU datasheet",
    "H100": "NVIDIA H100 Tensor Core GPU datasheet, SXM", "H100 PCIe": "NVIDIA H100 Tensor Core GPU datasheet, PCIe",
    "A100": "NVIDIA A100 Tensor Core GPU datasheet", "A800": "NVIDIA A800 datasheet: that of the A100",
    "L40S": "NVIDIA L40S datasheet", "L4": "NVIDIA L4 Tensor Core GPU datasheet", "A10": "NVIDIA A10 datasheet",
    "A6000": "NVIDIA RTX A6000 datasheet", "V100": "NVIDIA V100 Tensor Core GPU datasheet",
    "T4": "NVIDIA T4 Tensor Core GPU datasheet", "RTX 5090": "NVIDIA RTX Blackwell GPU architecture, appendix A",
    "RTX 4090": "NVIDIA Ada GPU architecture, appendix A", "RTX 4080": "NVIDIA Ada GPU architecture, appendix B",
    "RTX 3090": "NVIDIA Ampere GA102 GPU architecture, table 3",
})  # fmt: skip
"""Where each figure of `PEAK_TFLOPS` is published: bf16 or fp16 with fp32 sums, dense."""


def gpu_step_s(name: str, parameters: int, tokens_per_step: int, mfu: float = COMMON_MFU) -> float:
    """Seconds of a step in bf16: 6 N floating-point operations a token (arXiv 2001.08361) at `mfu` of the card's peak.

    Raises:
        UserError: an unknown card, a share outside of (0, 1].
    """
    if not 0.0 < mfu <= 1.0:
        raise UserError(f"--mfu={mfu:g}: must be in (0, 1]", f"{COMMON_MFU:g} is common")
    known = {card.lower().replace(" ", ""): card for card in PEAK_TFLOPS}
    asked = name.lower().replace(" ", "").replace("nvidia", "")
    ends = [card for key, card in known.items() if key.endswith(asked)]  # 4090
    card = known.get(asked, ends[0] if len(ends) == 1 else None)
    if card is None:
        raise UserError(f"unknown GPU {name!r}", f"{did_you_mean(name, PEAK_TFLOPS)}\nor give --step-time")
    return 6.0 * parameters * tokens_per_step / (mfu * PEAK_TFLOPS[card][0] * 1e12)
