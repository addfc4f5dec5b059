"""Names of the hub are looked up there, at a commit, and never on this machine's disk."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from peer import hub
from peer.data.tokenizer import load_tokenizer
from peer.errors import UserError
from peer.hub import CONFIG_FILES, MODEL_FILES, fetch, pin
from peer.protocol.identity import Identity
from peer.protocol.manifest import ALONE, ModelSpec, RunManifest, TokenizerSpec
from peer.protocol.records import open_manifest, seal_manifest
from peer.train.model import build_model
from tests.train.tiny import tiny_model

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def _manifest(revision: str) -> RunManifest:
    return RunManifest(name="a", model=ModelSpec(pretrained="o/n", revision=revision))


def test_a_model_on_the_hub_is_never_a_folder_of_this_machine(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tiny_model().save_pretrained("Documents/private")
    with pytest.raises(UserError, match="cannot load the model Documents/private"):
        build_model(ModelSpec(pretrained="Documents/private"), 259, 0)
    assert build_model(ModelSpec.model_validate({"pretrained": "./Documents/private"}, context=ALONE), 259, 0).training


def test_a_tokenizer_on_the_hub_is_never_a_folder_or_file_of_this_machine(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    from peer.data.tokenizer import ByteTokenizer

    ByteTokenizer().save(tmp_path / "my" / "words")
    ByteTokenizer().save(tmp_path / "words")
    for name in ("my/words", "words"):
        with pytest.raises(UserError, match=f"cannot load the tokenizer {name}"):
            load_tokenizer(TokenizerSpec(kind="hub", name=name))


@pytest.mark.parametrize(
    ("file", "document"),
    [
        ("model.safetensors.index.json", {"weight_map": {"w": "../../other.safetensors"}}),
        ("model.safetensors.index.json", {"weight_map": {"w": "/srv/other.safetensors"}}),
        ("model.safetensors.index.json", {"weight_map": "/srv/other.safetensors"}),
        ("tokenizer_config.json", {"vocab_file": "/home/me/diary.txt"}),
        ("tokenizer_config.json", {"tokenizer_file": ["/home/me/diary.txt"]}),
        ("tokenizer_config.json", []),
    ],
)
def test_a_download_that_names_files_elsewhere_is_refused(tmp_path, monkeypatch, file, document):
    (tmp_path / file).write_text(json.dumps(document))
    monkeypatch.setattr(hub, "snapshot_download", lambda *_args, **_kwargs: str(tmp_path))
    with pytest.raises(ValueError, match=r"outside of itself|no mapping"):
        fetch("o/n", COMMIT, MODEL_FILES)


class Hub:
    """The hub's own word on the sizes of a repository's files, and what is downloaded of it."""

    def __init__(self, monkeypatch, folder, **sizes):
        self.siblings = [SimpleNamespace(rfilename=name.replace("__", "/"), size=size) for name, size in sizes.items()]
        self.taken = []

        def download(*_args, allow_patterns, **_kwargs):
            self.taken.append(tuple(allow_patterns))
            return str(folder)

        monkeypatch.setattr(hub, "HfApi", lambda: self)
        monkeypatch.setattr(hub, "snapshot_download", download)

    def model_info(self, *_args, files_metadata, **_kwargs):
        assert files_metadata
        return self


def test_weights_larger_than_the_config_allows_are_not_downloaded(tmp_path, monkeypatch):
    model = tiny_model()
    model.save_pretrained(tmp_path)
    spec = ModelSpec(pretrained="o/n", revision=COMMIT)
    most = 8 * sum(parameter.numel() for parameter in model.parameters()) + 256 * 2**20
    large = Hub(monkeypatch, tmp_path, **{"a.safetensors": most // 2, "b.safetensors": most // 2 + 2})
    with pytest.raises(UserError, match=r"the files of o/n are 0\.25 GiB; its config allows 0\.25 GiB") as caught:
        build_model(spec, 259, 0)
    assert "a model whose weights are those of its config" in caught.value.hint
    assert large.taken == [CONFIG_FILES]
    others = {"a.safetensors": most, "other__b.safetensors": 2**40, "weights.bin": 2**40}
    enough = Hub(monkeypatch, tmp_path, **others)
    assert build_model(spec, 259, 0).training
    assert enough.taken == [CONFIG_FILES, MODEL_FILES]


def test_a_branch_becomes_the_commit_that_it_is_now(tmp_path, monkeypatch):
    monkeypatch.setattr(hub, "snapshot_download", lambda *_args, **_kwargs: str(Path(tmp_path, COMMIT)))
    assert pin(_manifest("main")).model.revision == COMMIT
    other = COMMIT[::-1]
    assert pin(_manifest(other)).model.revision == other


def test_a_branch_that_no_one_can_look_up_is_the_organisers_problem():
    with pytest.raises(UserError, match="does not say which commit revision 'main' of o/n is") as caught:
        pin(_manifest("main"))
    assert "40 hex digits" in caught.value.hint


@pytest.mark.parametrize("revision", ["main", "v1.0", COMMIT[:-1], COMMIT.upper()])
def test_a_manifest_from_the_network_names_commits(revision):
    identity = Identity.generate()
    with pytest.raises(UserError, match=r"names model\.revision=.* of o/n, which is no commit"):
        open_manifest(seal_manifest(identity, _manifest(revision), 1))
    assert open_manifest(seal_manifest(identity, _manifest(COMMIT), 1))[1].model.revision == COMMIT


def test_what_fetches_nothing_needs_no_commit():
    manifest = RunManifest(name="a", model=ModelSpec(architecture="llama"))
    assert open_manifest(seal_manifest(Identity.generate(), manifest, 1))[1] == manifest


def test_a_manifest_from_the_network_says_what_its_tokenizer_does():
    identity, model = Identity.generate(), ModelSpec(architecture="llama")
    spec = TokenizerSpec(kind="hub", name="o/n", revision=COMMIT)
    with pytest.raises(UserError, match=r"does not say which tokenizer\.digest its peers must have"):
        open_manifest(seal_manifest(identity, RunManifest(name="a", model=model, tokenizer=spec), 1))
    whole = RunManifest(name="a", model=model, tokenizer=spec.model_copy(update={"digest": "a" * 64}))
    assert open_manifest(seal_manifest(identity, whole, 1)).manifest == whole
