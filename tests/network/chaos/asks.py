"""G16: what a stranger's manifest may ask of a volunteer: the real `atoll join` refuses the rest, in words, in time.

The volunteer stands in a folder that has what the manifest names. Every ask must end with exit code 2, a message that
names it, no traceback, no escape byte, and nothing read that is the volunteer's own.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from peer import cli
from peer.protocol.manifest import PROTOCOL_VERSION
from tests.network.forked import ForkedProcess
from tests.network.processes import LOOPBACK, environment

AT_ONCE = 4
SECRET = "the volunteer's own diary, which must stay private"
COMMIT = "0123456789abcdef0123456789abcdef01234567"
LIMIT_S = 90.0
MODEL = {"architecture": "llama", "config": {
    "vocab_size": 264, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "tie_word_embeddings": True,
}}  # fmt: skip
BILLION = 10**9


def asked(**changes: Any) -> dict[str, Any]:
    """A manifest that is fine but for these sections."""
    return {"protocol": PROTOCOL_VERSION, "name": "asks", "genesis": "0" * 64, "model": MODEL, **changes}


def llama(**config: Any) -> dict[str, Any]:
    return asked(model={"architecture": "llama", "config": {**MODEL["config"], **config}})


def hub(name: str, revision: str = COMMIT, **more: Any) -> dict[str, Any]:
    return {"sources": [{"kind": "hub", "name": name, "revision": revision, **more}]}


ASKS: dict[str, tuple[dict[str, Any], str]] = {
    "a folder of the volunteer as data": (asked(data=hub("Documents/private")), "Documents/private"),
    "the same without a commit": (asked(data=hub("Documents/private", "main")), "is no commit"),
    "an absolute folder as data": (asked(data=hub("<home>/Documents/private")), "data.sources.0.name"),
    "the volunteer's home as data": (asked(data=hub("~/Documents")), "data.sources.0.name"),
    "a way out of the name": (asked(data=hub("../Documents/private")), "data.sources.0.name"),
    "a loader of local files as data": (asked(data=hub("json", subset="Documents/private")), "data.sources.0.name"),
    "a folder of the volunteer as the model": (
        asked(model={"pretrained": "Documents/private", "revision": COMMIT}), "Documents/private"),
    "an absolute folder as the model": (
        asked(model={"pretrained": "<home>/Documents/private", "revision": COMMIT}), "model.pretrained"),
    "a folder of the volunteer as the tokenizer": (
        asked(tokenizer={"kind": "hub", "name": "Documents/private", "revision": COMMIT, "digest": "0" * 64}),
        "Documents/private"),
    "an absolute folder as the tokenizer": (
        asked(tokenizer={"kind": "folder", "name": "<home>/Documents/private"}), "tokenizer.name"),
    "a file of the volunteer as the tokenizer": (
        asked(tokenizer={"kind": "folder", "digest": "0" * 64, "files": [
            {"name": "../../Documents/private", "size": 1, "digest": "0" * 64}]}), "tokenizer.files"),
    "bart with a billion decoder layers": (
        asked(model={"architecture": "bart", "config": {"decoder_layers": BILLION, "is_decoder": True}}),
        "decoder_layers"),
    "65,536 sequences a batch": (
        asked(inner={"batch_sequences": 65_536}, data={"sequence_length": 131_072}), "GiB"),
    "layers by another name": (
        asked(model={"architecture": "gpt2", "config": {"n_layer": BILLION, "vocab_size": 264}}), "n_layer"),
    "a billion experts": (
        asked(model={"architecture": "mixtral", "config": {"num_local_experts": BILLION, "vocab_size": 264}}),
        "num_local_experts"),
    "layers as a list, and wide": (
        asked(model={"architecture": "qwen2", "config": {
            "layer_types": ["full_attention"] * 100, "num_hidden_layers": 100, "hidden_size": 2**23,
            "num_attention_heads": 32, "num_key_value_heads": 32, "vocab_size": 264}}), "GiB"),
    "a size hidden in a nested config": (llama(rope_parameters={"rope_type": "default", "factor": 1e308}), ""),
    "a vocabulary without end": (llama(vocab_size=BILLION), "vocab_size"),
    "heads without end": (llama(num_attention_heads=BILLION), "num_attention_heads"),
    "positions without end": (llama(max_position_embeddings=2**40), "max_position_embeddings"),
    "no feed-forward at all": (llama(intermediate_size=-1), "intermediate_size"),
    "code from elsewhere": (llama(auto_map={"AutoModelForCausalLM": "evil/repo--m.M"}), "auto_map"),
    "escape sequences in a key": (llama(**{"\x1b]0;owned\x07": 1}), ""),
    "a number of thousands of digits": (asked(seed=int("9" * 4000)), "seed"),
}  # fmt: skip




def run(
    folder: Path, *, names: Iterable[str] = tuple(ASKS), tell: Callable[[dict[str, Any]], None] = lambda _: None
) -> dict[str, Any]:
    """Let a volunteer meet each of these organisers; -> counts, and what was wrong."""
    home = _home(folder / "home")
    wanted = {name: json.loads(json.dumps(ASKS[name][0]).replace("<home>", str(home))) for name in names}
    command = [sys.executable, "-m", "tests.network.chaos.organisers", str(os.getpid()), str(folder)]
    counts: dict[str, Any] = {"asks": 0, "granted": 0, "what_was_granted": [], "longest_refusal_s": 0.0}
    with (
        (folder / "organisers.log").open("wb") as log,
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True) as organisers,
    ):
        assert organisers.stdin is not None
        assert organisers.stdout is not None
        try:
            print(json.dumps(wanted), file=organisers.stdin, flush=True)
            line = organisers.stdout.readline()
            assert line, (folder / "organisers.log").read_text()
            left = list(json.loads(line).items())
            while left:
                joining = [_Join(name, address, home, folder / f"join{len(left)}-{place}")
                           for place, (name, address) in enumerate(left[:AT_ONCE])]  # fmt: skip
                del left[:AT_ONCE]
                for join in joining:
                    wrong = join.wrong()
                    counts["asks"] += 1
                    counts["granted"] += bool(wrong)
                    counts["what_was_granted"] += [f"{join.name}: {wrong}"] if wrong else []
                    counts["longest_refusal_s"] = max(counts["longest_refusal_s"], round(join.seconds, 1))
                tell(counts)
        finally:
            organisers.kill()
    counts["largest_volunteer_mb"] = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss // 1024
    return counts


class _Join:
    """One volunteer and one organiser."""

    def __init__(self, name: str, address: str, home: Path, folder: Path) -> None:
        self.name, self.seconds, self._folder, self._began = name, 0.0, folder, time.monotonic()
        folder.mkdir()

        def main() -> None:
            os.chdir(home)
            os.environ.clear()
            os.environ.update(environment({"HOME": str(home)}))
            cli.main()

        places = ["--output-dir", str(folder / "out"), "--host-maddrs", LOOPBACK]
        arguments = ["join", address, *places, "--max-rounds", "1"]
        self._process = ForkedProcess(main, arguments, folder / "log")

    def wrong(self) -> str:
        """Why this was no refusal; empty if it was one."""
        try:
            code = self._process.wait(max(1.0, LIMIT_S - (time.monotonic() - self._began)))
        except subprocess.TimeoutExpired:
            self._process.kill()
            code = -1
        self.seconds = time.monotonic() - self._began
        said = (self._folder / "log").read_text()
        files = [path for path in (self._folder / "out").rglob("*") if path.is_file()]
        read = [path for path in files if SECRET.encode() in path.read_bytes()]
        if code == 2 and "Traceback" not in said and "\x1b" not in said and ASKS[self.name][1] in said and not read:
            return ""
        return f"code {code}, read {read}: {said[-600:]}"


def _home(folder: Path) -> Path:
    """Where the volunteer is, with a folder that bears the asked name."""
    private = folder / "Documents" / "private"
    private.mkdir(parents=True)
    (private / "train.txt").write_text(f"{SECRET}\n" * 1000)
    (private / "train.jsonl").write_text(json.dumps({"text": SECRET}) + "\n")
    (private / "config.json").write_text(json.dumps({"model_type": "llama", **MODEL["config"]}))
    return folder
