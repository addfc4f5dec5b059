"""What sections of a manifest and messages are made of."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, ClassVar

from pydantic import BaseModel, ConfigDict, Field

from peer.protocol.plain_json import TEXT_PATTERN
from peer.protocol.problems import DIGEST_PATTERN, NAME_PATTERN

MAX_PATH_CHARS = 1024

# No part begins with '.' or '-': as a path it stays below its folder, as an argument it is no flag.
Name = Annotated[str, Field(pattern=NAME_PATTERN)]
HUB_PATTERN = r"^[A-Za-z0-9_][A-Za-z0-9._-]{0,95}(/[A-Za-z0-9_][A-Za-z0-9._-]{0,95})?$"
Revision = Annotated[str, Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9._-]{0,95}(/[A-Za-z0-9_][A-Za-z0-9._-]{0,95}){0,3}$")]
COMMIT_PATTERN = r"[0-9a-f]{40}"
Text = Annotated[str, Field(pattern=TEXT_PATTERN)]
Digest = Annotated[str, Field(pattern=DIGEST_PATTERN)]
ALONE = {"alone": True}  # validation context of a manifest that no other machine will read
ORGANISER = {"organiser": True}  # of the organiser's own file: what it names here is published by content


class Spec(BaseModel):
    """Base of every section: frozen, strict about keys, finite numbers only."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)
    most_items: ClassVar[int] = 1 << 16
    """Commas and opening brackets in its JSON: a malformed text of many costs the reader far more than its length."""


class Message(Spec):
    """Base of what other peers send."""

    most_items: ClassVar[int] = 512


def own_folder(name: str) -> str:
    """The absolute path of a folder of this machine; it tells paths that loaders may open from names of the hub.

    Raises:
        ValueError: it is no path.
    """
    if not name.isprintable() or not 0 < len(name) <= MAX_PATH_CHARS:
        raise ValueError(f"must be a name on the hub or a folder of at most {MAX_PATH_CHARS} printable characters")
    try:
        return str(Path(name).expanduser().absolute())
    except RuntimeError:
        raise ValueError("names the home folder of a user that this machine does not have") from None
