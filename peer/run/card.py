"""The model card of an export: what the run was, in words that a person and the hub read."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import yaml

from peer.protocol.address import Reach, reach_of
from peer.protocol.manifest import DataSpec, RunManifest

CARD = "README.md"
_MODEL = """

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained(".")
tokenizer = AutoTokenizer.from_pretrained(".")
```
"""
_ADAPTER = """

```python
from peft import AutoPeftModelForCausalLM
from transformers import AutoTokenizer

model = AutoPeftModelForCausalLM.from_pretrained(".")
tokenizer = AutoTokenizer.from_pretrained(".")
```
"""


def write_card(
    folder: Path, manifest: RunManifest, facts: Mapping[str, object], *, adapter: bool = False, address: str = ""
) -> None:
    """Write it.

    Args:
        facts: rows of the table, in their order; those that are None are left out.
        adapter: the folder holds an adapter, and not the model that it stands on.
        address: of a run that has not ended. The card names it if all who read the card can use it.
    """
    strangers = manifest.trust.mode == "open" and not manifest.trust.invited
    reached = strangers and address and reach_of(address) is Reach.PUBLIC
    hub = [source.name for source in manifest.data.sources if source.name]
    head = {
        "library_name": "peft" if adapter else "transformers", "pipeline_tag": "text-generation", "tags": ["atoll"],
        **({"datasets": hub} if hub else {}),
        **({"base_model": manifest.model.pretrained} if manifest.model.pretrained else {}),
    }  # fmt: skip
    rows = {
        "run": f"{manifest.name}, `{manifest.run_id}`",
        "recipe": f"`{manifest.recipe.name}`",
        "data": _data(manifest.data),
        **facts,
        "train with us": f"`atoll join {address} --run {manifest.name}`" if reached else None,
    }
    lines = [f"| {key} | {value} |" for key, value in rows.items() if value is not None]
    text = (
        f"---\n{yaml.safe_dump(head, sort_keys=False)}---\n\n# {manifest.name}\n\n"
        "Trained with Atoll by peers that share nothing but the internet.\n\n| | |\n|---|---|\n" + "\n".join(lines)
        + (_ADAPTER if adapter else _MODEL)
    )
    (folder / CARD).write_text(text, encoding="utf-8")


def names_run(folder: Path, run_id: str) -> bool:
    """Whether an export is of this run, by its card."""
    card = folder / CARD
    return card.is_file() and f"`{run_id}`" in card.read_text(encoding="utf-8", errors="replace")


def _data(spec: DataSpec) -> str:
    said = []
    for source in spec.sources:
        if source.kind == "hub":
            said.append(f"`{source.name}` at `{source.revision}`")
        elif source.kind == "web":
            said.append(f"{len(source.files)} files, SHA-256 `{source.files[0].sha256[:16]}`...")
        elif source.kind == "instructions":
            said.append("Atoll's instructions")
        else:
            said.append("the source of Python's standard library")
    return "; ".join(said)
