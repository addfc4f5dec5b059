"""The data section of a manifest: where the text of a run comes from, and how peers share it out."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from peer.protocol.spec import HUB_PATTERN, Digest, Revision, Spec, Text

MAX_SHARDS = 1 << 17  # of all sources together
PARTS_PER_SHARD = 16
BLOCK_TOKENS = 1 << 22  # of a streamed shard that is made in one piece

# With an owner: without one it is a format, such as `text`, of files in the working directory.
DataName = Annotated[str, Field(pattern=HUB_PATTERN.replace("?$", "$"))]
URL_PATTERN = r"^https?://[A-Za-z0-9._~:/?#@!$&'()*+,;=%\[\]-]{1,1000}$"


class FileSpec(Spec):
    """A file on the web, and its content's SHA-256."""

    url: Annotated[str, Field(pattern=URL_PATTERN)]
    sha256: Digest


class SourceSpec(Spec):
    """Where text comes from: the standard library of Python, a few instructions of Atoll's own, a data set on the hub,
    or files on the web.

    Sources of more weight give more windows; `text_column` is of formats that have columns.
    """

    kind: Literal["python-stdlib", "instructions", "hub", "web"] = "python-stdlib"
    name: DataName | None = None
    revision: Revision = "main"
    subset: Text | None = None
    split: Text = "train"
    text_column: Text = "text"
    files: Annotated[tuple[FileSpec, ...], Field(max_length=64)] = ()
    weight: float = Field(default=1.0, gt=0.0, le=1000.0)

    @model_validator(mode="after")
    def _needs_its_own(self) -> SourceSpec:
        if (self.kind == "hub") != (self.name is not None):
            raise ValueError("'name' goes with kind 'hub', and only with it")
        if (self.kind == "web") != bool(self.files):
            raise ValueError("'files' goes with kind 'web', and only with it")
        return self


class SharedData(Spec):
    """The data that peers share out, written by `atoll-bootstrap`: a peer that reads other text shares nothing out.

    Attributes:
        digest: of the text.
        shards: that each source is cut into, of files as many each; 0 of a source that is not leased.
        shard_tokens: of one, about.
    """

    digest: Digest
    shards: Annotated[tuple[Annotated[int, Field(ge=0, le=MAX_SHARDS)], ...], Field(min_length=1, max_length=16)]
    shard_tokens: int = Field(ge=1, lt=2**40)

    @model_validator(mode="after")
    def _not_too_many(self) -> SharedData:
        if sum(self.shards) > MAX_SHARDS:
            raise ValueError(f"{sum(self.shards)} shards; at most {MAX_SHARDS}")
        return self

    @property
    def block_parts(self) -> int:
        """Parts of a streamed shard that are made in one piece: all of them, or fewer of a large one."""
        parts = PARTS_PER_SHARD
        while parts > 1 and self.shard_tokens * parts > BLOCK_TOKENS * PARTS_PER_SHARD:
            parts //= 2
        return parts


class DataSpec(Spec):
    """The text of the run; a peer may train on its own files instead (setting `train_files`).

    A document is for validation, and never trained on, if a hash of its content falls into `validation_fraction`. With
    `document_mask`, no token attends to another document of its sequence. Of conversations the assistant's turns are
    learned, or all of them (`train_on`).

    `assignment`: whether each peer reads everything in an order of its own (`free`), a part that follows from its
    identity (`seeded`), or shards that it leases, of `shard_sequences` each; what cannot be leased is then seeded.
    """

    sources: Annotated[tuple[SourceSpec, ...], Field(min_length=1, max_length=16)] = (SourceSpec(),)
    sequence_length: int = Field(default=128, ge=8, le=131072)
    validation_fraction: float = Field(default=0.05, ge=0.001, le=0.5)
    validation_tokens: int = Field(default=1_000_000, ge=1024, le=100_000_000)
    document_mask: bool = False
    train_on: Literal["assistant", "all"] = "assistant"
    assignment: Literal["free", "seeded", "leases"] = "leases"
    shard_sequences: int | None = Field(default=None, ge=1, le=2**24)
    shared: SharedData | None = None

    @model_validator(mode="after")
    def _shares_what_it_names(self) -> DataSpec:
        if self.shared is not None and len(self.shared.shards) != len(self.sources):
            raise ValueError(f"shared.shards: {len(self.shared.shards)} of {len(self.sources)} sources")
        return self
