"""The section `tokenizer` of a manifest."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import Field, ValidationInfo, field_validator, model_validator

from peer.protocol.spec import ALONE, HUB_PATTERN, ORGANISER, Digest, Revision, Spec, own_folder

MAX_TOKENIZER_BYTES = 32 * 2**20  # of all its files


class TokenizerFile(Spec):
    """One file of a tokenizer: its size in bytes, and its BLAKE3."""

    name: Literal["tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja"]
    size: Annotated[int, Field(ge=1, le=MAX_TOKENIZER_BYTES)]
    digest: Digest


class TokenizerSpec(Spec):
    """`bytes` needs no files (UTF-8 bytes, ids shifted by 3 as in ByT5); `hub` names a pretrained tokenizer; `folder`
    names the organiser's own.

    Attributes:
        files: of the folder, which `atoll-bootstrap` writes in place of its name; peers take them from each other.
        digest: of what a tokenizer of the hub or of a folder does, written by `atoll-bootstrap`; a peer whose tokenizer
            does something else does not train.
    """

    kind: Literal["bytes", "hub", "folder"] = "bytes"
    name: str | None = None
    revision: Revision = "main"
    files: Annotated[tuple[TokenizerFile, ...], Field(max_length=4)] = ()
    digest: Digest | None = None

    @field_validator("name")
    @classmethod
    def _hub_name_or_own_folder(cls, name: str | None, info: ValidationInfo) -> str | None:
        if name is None or info.data.get("kind") != "folder":
            if name is not None and not re.fullmatch(HUB_PATTERN, name):
                raise ValueError("must be a name on the hub, such as owner/model; a folder goes with kind 'folder'")
            return name
        if info.context not in (ALONE, ORGANISER):
            raise ValueError("must be given to atoll-bootstrap: other peers cannot read a folder of its machine")
        return own_folder(name)

    @model_validator(mode="after")
    def _parts_of_its_kind(self) -> TokenizerSpec:
        if (self.kind != "bytes") != (self.name is not None or bool(self.files)):
            raise ValueError("'name' goes with kind 'hub' or 'folder', which need one")
        if self.files and (self.kind != "folder" or self.name is not None):
            raise ValueError("'files' is written by atoll-bootstrap in place of the name of a folder")
        names = [file.name for file in self.files]
        if self.files and (len(set(names)) < len(names) or "tokenizer.json" not in names):
            raise ValueError("'files' must hold tokenizer.json, and no name twice")
        if sum(file.size for file in self.files) > MAX_TOKENIZER_BYTES:
            raise ValueError(f"'files' are larger than {MAX_TOKENIZER_BYTES} bytes together")
        return self
