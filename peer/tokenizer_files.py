"""The files of a tokenizer: those in the organiser's folder, and those that a run's peers keep for each other."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

from peer.errors import ProtocolError, UserError
from peer.protocol import hashing
from peer.protocol.tokenizer_spec import MAX_TOKENIZER_BYTES, TokenizerFile
from peer.system.output_files import replace_file

FILE_NAMES: tuple[str, ...] = get_args(TokenizerFile.model_fields["name"].annotation)
FOLDER = "tokenizer"  # of a peer's or a bootstrap's own folder
_HOW = "save one there with save_pretrained, or make one with atoll tokenizer train"


def read_folder(folder: Path) -> dict[str, bytes]:
    """What a tokenizer is made of, by the names of its files; whatever else is in the folder stays unread.

    Raises:
        UserError: no such folder, no tokenizer.json in it, a file that cannot be read, too many bytes.
    """
    if not folder.is_dir():
        raise UserError(f"tokenizer.name={folder}: no such folder", f"name the folder of a tokenizer; {_HOW}")
    contents: dict[str, bytes] = {}
    for name in FILE_NAMES:
        path, left = folder / name, MAX_TOKENIZER_BYTES - sum(map(len, contents.values()))
        if not path.is_file():
            continue
        try:
            with path.open("rb") as file:
                content = file.read(left + 1)
        except OSError as error:
            raise UserError(f"cannot read {path}: {error.strerror}", "mend it, or name another folder") from None
        if len(content) > left:
            what = f"the tokenizer's files in {folder} are larger than {MAX_TOKENIZER_BYTES} bytes together"
            raise UserError(what, "use a smaller vocabulary")
        if content:
            contents[name] = content
    if "tokenizer.json" not in contents:
        raise UserError(f"tokenizer.name={folder}: holds no tokenizer.json", _HOW)
    return contents


def list_files(contents: dict[str, bytes]) -> tuple[TokenizerFile, ...]:
    """What the manifest says of these files."""
    return tuple(
        TokenizerFile.model_validate({"name": name, "size": len(content), "digest": hashing.digest(content).hex()})
        for name, content in contents.items()
    )


class TokenizerFiles:
    """The files of one run's tokenizer in a node's own folder, each named by its digest.

    Args:
        home: the node's folder.
        files: what the manifest says of them.
    """

    def __init__(self, home: Path, files: tuple[TokenizerFile, ...]) -> None:
        self._folder, self._files = home / FOLDER, files

    @property
    def missing(self) -> tuple[TokenizerFile, ...]:
        """Those that are not here, or damaged."""
        return tuple(file for file in self._files if self._content(file) is None)

    def path_of(self, digest: str) -> Path | None:
        """Where the file of this digest is; None if the run's tokenizer has none such."""
        return self._folder / digest if any(file.digest == digest for file in self._files) else None

    def put(self, file: TokenizerFile, content: bytes | bytearray) -> None:
        """Keep a file.

        Raises:
            ProtocolError: its content has another digest.
            UserError: the disk failed.
        """
        if not _is(file, content):
            raise ProtocolError(f"the tokenizer's {file.name} has another digest than the manifest says")
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            replace_file(self._folder / file.digest, bytes(content))
        except OSError as error:
            raise UserError(f"cannot write the tokenizer to {self._folder}: {error.strerror}", "check the disk") \
                from None

    def read(self) -> dict[str, bytes]:
        """The files by name, each with the manifest's digest.

        Raises:
            UserError: one is missing or damaged.
        """
        contents: dict[str, bytes] = {}
        for file in self._files:
            content = self._content(file)
            if content is None:
                what = f"the tokenizer's {file.name} in {self._folder} is missing or damaged"
                raise UserError(what, "start again: it is taken from the swarm once more")
            contents[file.name] = content
        return contents

    def _content(self, file: TokenizerFile) -> bytes | None:
        try:
            with (self._folder / file.digest).open("rb") as opened:
                content = opened.read(file.size + 1)
        except OSError:
            return None
        return content if _is(file, content) else None


def _is(file: TokenizerFile, content: bytes | bytearray) -> bool:
    return len(content) == file.size and hashing.digest(content).hex() == file.digest
