"""The manifest of a test run, and the bootstrap that opens it."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor

from bootstrap import cli, serve
from peer.system.death_signal import die_with_parent
from tests.network.forked import ForkedBuild, ForkedProcess

MANIFEST = """
name: test
seed: 3
model:
  architecture: llama
  config: {{vocab_size: 264, hidden_size: {hidden}, intermediate_size: {hidden}, num_hidden_layers: 1,
           num_attention_heads: 2, num_key_value_heads: 2, max_position_embeddings: 64, tie_word_embeddings: true,
           bos_token_id: null, eos_token_id: 1, pad_token_id: 0}}
data: {{sequence_length: 8, assignment: free}}
inner: {{batch_sequences: 4}}
recipe: {{{recipe}, steps_per_round: {steps}}}
trust: {{identity_work: 0}}
rounds: {{straggler_wait_s: {wait}, timeout_s: 20{total}}}
"""
DILOCO = "name: diloco, compressor: int8, outer_learning_rate: 0.7, outer_momentum: 0.6"


class BootstrapProcess:
    """`atoll-bootstrap` as a child; `address` is what a peer joins with, `page` what a browser opens.

    The initial state of a manifest is built once in a test run: later nodes find it in their folders, as one finds it
    that is started again.
    """

    _built: ClassVar[dict[str, dict[str, bytes]]] = {}

    def __init__(
        self, folder: Path, manifest_text: str, initial_peers: Sequence[str] = (), port: int = 0,
        host: str = "127.0.0.1", flags: Sequence[str] = (),
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / "run.yaml"
        path.write_text(manifest_text)
        built_of = manifest_text + " ".join(flags if "--from" in flags else ())
        for name, content in self._built.get(built_of, {}).items():
            (folder / name).write_bytes(content)
            (folder / name).chmod(0o600)  # as the bootstrap writes it
        self.folder = folder
        arguments = [str(path), "--json", "--state-dir", str(folder), "--host-maddrs", f"/ip4/{host}/tcp/{port}"]
        arguments += flags
        if initial_peers:
            arguments += ["--initial-peers", *initial_peers]
        reading, writing = os.pipe()
        self.output = os.fdopen(reading, "rb")
        parent = os.getpid()

        def main() -> None:
            die_with_parent(parent)
            serve.GenesisBuild = ForkedBuild  # type: ignore[attr-defined]
            cli.main()

        self.process = ForkedProcess(main, arguments, folder / "bootstrap.log", stdout=writing)
        os.close(writing)
        try:
            started = json.loads(self._first_line())
        except BaseException:
            self.kill()
            raise
        self.address: str = started["addresses"][0]
        self.run_id: str = started["run_id"]
        self.page: str = started.get("page", "")
        self._built[built_of] = {name: (folder / name).read_bytes() for name in ("genesis.bin", "genesis.json")}

    @property
    def port(self) -> int:
        return int(self.address.split("/")[4])

    def _first_line(self) -> bytes:
        line = self.output.readline()
        assert line, (self.folder / "bootstrap.log").read_text()
        return line

    def genesis(self) -> Tensor:
        """The initial state, anchor first."""
        return torch.frombuffer(bytearray((self.folder / "genesis.bin").read_bytes()), dtype=torch.float32)

    def fragments(self) -> tuple[int, ...]:
        """Elements of each fragment of the model."""
        return tuple(json.loads((self.folder / "genesis.json").read_text())["fragments"])

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def close(self) -> None:
        self.process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(20)
        self.kill()
        self.output.close()
