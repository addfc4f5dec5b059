"""The initial state in a node's folder: built by a real child once, and found whole by whoever starts again."""

from __future__ import annotations

import asyncio
import json
import logging

import pytest
import torch

from bootstrap.genesis import GenesisBuild
from peer.base_folder import read_organisers
from peer.data.tokenizer import ByteTokenizer, load_tokenizer
from peer.data.train_bpe import train_bpe
from peer.errors import UserError
from peer.genesis import build_initial_model, built_genesis
from peer.outer.recipe.plan import RunPlan
from peer.outer.state.flat_layout import Cut, FlatLayout
from peer.protocol.identity import Identity
from peer.protocol.manifest import parse_manifest
from peer.protocol.records import open_manifest, seal_manifest
from tests.network.bootstraps import DILOCO, MANIFEST
from tests.network.forked import ForkedBuild
from tests.train.tiny import tiny_model

TEXT = MANIFEST.format(hidden=16, recipe=DILOCO, steps=5, wait=5.0, total="")


class Node:
    """A node's folder, and what each of its starts found or built there."""

    def __init__(self, folder):
        self.folder, self.path = folder, folder / "run.yaml"
        self.state, self.figures = folder / "genesis.bin", folder / "genesis.json"

    def start(self, seed=3, genesis=None, new_run=False, text=TEXT, build=ForkedBuild):
        """-> (genesis, whether a child built it)"""
        text = text.replace("seed: 3", f"seed: {seed}")
        self.path.write_text(text + (f"genesis: '{genesis}'\n" if genesis else ""))

        async def run():
            manifest = parse_manifest(self.path.read_bytes(), "run.yaml")
            building = build(manifest, self.path, self.folder, new_run=new_run)
            await building.start()
            found = await building.finish()
            return found, building._child is not None

        before = self.state.stat().st_mtime_ns if self.state.exists() else None
        found, early = asyncio.run(run())
        built = self.state.stat().st_mtime_ns != before
        assert built or not early
        return found, built


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    node = Node(tmp_path_factory.mktemp("built"))
    assert node.start(build=GenesisBuild)[1]  # in a process as a bootstrap starts it
    return node


@pytest.fixture
def node(built, tmp_path):
    """A folder in which a node has been before."""
    for path in (built.state, built.figures):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    return Node(tmp_path)


def test_what_the_child_builds_is_the_state_that_any_peer_builds(built):
    state, *_ = built_genesis(RunPlan.of(parse_manifest(TEXT, "run.yaml")), ByteTokenizer())
    assert built.state.read_bytes() == state.anchor.numpy().tobytes() + b"".join(
        buffer.numpy().tobytes() for buffer in state.buffers
    )
    figures = json.loads(built.figures.read_bytes())
    assert (figures["digest"], figures["fragments"]) == (state.digest(), [state.numel])


def test_a_node_that_starts_again_finds_it_and_builds_nothing(node):
    figures = json.loads(node.figures.read_bytes())
    found, built = node.start()
    assert not built
    assert found.manifest.genesis == found.snapshot.meta.lineage_id == figures["digest"]
    assert [digest.hex() for digest in found.snapshot.digests] == figures["chunks"]
    found, built = node.start(genesis=figures["digest"])
    assert not built


def test_a_manifest_that_names_another_genesis_is_refused(node):
    before = node.figures.read_bytes()
    with pytest.raises(UserError, match=r"holds the run test, which was opened with another manifest") as refused:
        node.start(genesis="0" * 64)
    assert f"there, {'0' * 64} in the manifest" in refused.value.hint
    with pytest.raises(UserError, match=r"the manifest names genesis 000000.*; this machine builds"):
        node.start(genesis="0" * 64, new_run=True)
    assert node.figures.read_bytes() == before
    assert not node.start()[1]


def test_a_run_whose_state_is_damaged_is_not_begun_anew_with_another(node):
    node.state.write_bytes(b"damaged")
    figures = json.loads(node.figures.read_bytes())
    node.figures.write_text(json.dumps({**figures, "digest": "0" * 64}))  # as if other libraries had built it
    with pytest.raises(UserError, match=r"the run began with 0000.* is damaged; this machine builds") as refused:
        node.start()
    assert "restore the file" in refused.value.hint


async def test_who_gives_up_leaves_no_child(node, tmp_path):
    node.figures.unlink()
    node.path.write_text(TEXT)
    building = GenesisBuild(parse_manifest(TEXT, "run.yaml"), node.path, tmp_path)
    await building.start()
    finishing = asyncio.ensure_future(building.finish())
    await asyncio.sleep(0)
    finishing.cancel()
    await asyncio.wait({finishing})
    assert finishing.cancelled()
    assert building._child.returncode == -9


def test_another_manifest_in_the_same_folder_is_built_where_that_is_wanted(node):
    before = node.state.read_bytes()
    with pytest.raises(UserError, match="holds the run test") as refused:
        node.start(seed=2)
    assert refused.value.hint.splitlines()[0] == "seed: 3 there, 2 in the manifest"
    assert node.state.read_bytes() == before
    found, built = node.start(seed=2, new_run=True)
    assert built
    assert node.state.read_bytes() != before
    assert json.loads(node.figures.read_bytes())["digest"] == found.manifest.genesis


@pytest.mark.parametrize("damage", ["a byte", "the end", "the whole", "figures"])
def test_what_is_damaged_is_built_again(node, damage, caplog):
    caplog.set_level(logging.WARNING)
    whole, figures = node.state.read_bytes(), json.loads(node.figures.read_bytes())
    if damage == "a byte":
        node.state.write_bytes(whole[:100] + bytes([whole[100] ^ 1]) + whole[101:])
    elif damage == "the end":
        node.state.write_bytes(whole[:-4])
    elif damage == "the whole":
        node.state.unlink()
    else:
        node.figures.write_text("{")
    found, built = node.start()
    assert built
    assert "built again" in caplog.text
    assert node.state.read_bytes() == whole
    assert found.manifest.genesis == figures["digest"]


@pytest.fixture
def words(tmp_path):
    """A manifest's text whose tokenizer is a folder beside the node's."""
    folder = tmp_path / "words"
    folder.mkdir()
    train_bpe(["the words of a run\n" * 9], 262).save(folder)
    return folder, TEXT + f"tokenizer: {{kind: folder, name: {folder}}}\n"


def open_run(folder, text, **more):
    """What a bootstrap finds or builds in a folder."""
    folder.mkdir(exist_ok=True)
    (folder / "run.yaml").write_text(text)

    async def run():
        manifest = read_organisers(folder / "run.yaml", more.get("base"))
        building = ForkedBuild(manifest, folder / "run.yaml", folder, **more)
        await building.start()
        return await building.finish(), building._child is not None

    return asyncio.run(run())


def test_a_tokenizer_of_a_folder_is_published_by_its_files(words, tmp_path):
    folder, text = words
    found, built = open_run(tmp_path / "node", text)
    spec = found.manifest.tokenizer
    assert built
    assert (spec.name, spec.digest) == (None, load_tokenizer(spec, tmp_path / "node").digest)
    assert [file.name for file in spec.files] == ["tokenizer.json", "tokenizer_config.json"]
    assert str(folder) not in found.manifest.canonical().decode()  # no path of the organiser's
    assert open_manifest(seal_manifest(Identity.generate(), found.manifest, 1)).manifest == found.manifest
    again, built = open_run(tmp_path / "node", text)
    assert not built
    assert again.manifest == found.manifest
    train_bpe(["other words of it\n" * 9], 262).save(folder)
    with pytest.raises(UserError, match="holds the run test") as refused:
        open_run(tmp_path / "node", text)
    assert f"tokenizer.files.0.digest: {spec.files[0].digest} there, " in refused.value.hint


@pytest.mark.parametrize(("spoil", "message"), [
    (lambda folder: train_bpe(["words and more words of a run\n" * 9], 270).save(folder),
     "vocab_size=264 is smaller than the tokenizer's 270"),
    (lambda folder: (folder / "tokenizer.json").unlink(), r"holds no tokenizer\.json"),
], ids=["ids that do not fit", "nothing there"])  # fmt: skip
def test_a_tokenizer_that_no_peer_could_use_is_refused_before_any_joins(words, tmp_path, spoil, message):
    folder, text = words
    spoil(folder)
    with pytest.raises(UserError, match=message):
        open_run(tmp_path / "node", text)
    assert not (tmp_path / "node" / "genesis.json").exists()


def test_files_without_their_folder_are_nothing_to_open_a_run_with(words, tmp_path):
    found, _ = open_run(tmp_path / "node", words[1])
    manifest = found.manifest.model_copy(update={"genesis": None})
    with pytest.raises(UserError, match=r"tokenizer\.files is for atoll-bootstrap to write"):
        GenesisBuild(manifest, tmp_path / "run.yaml", tmp_path / "other")


def test_a_run_whose_fragments_are_of_so_many_blocks_is_published_with_their_number(tmp_path):
    recipe = "name: streaming-diloco, schedule: {blocks_per_fragment: 2, order: consecutive, ends: apart}"
    text = MANIFEST.format(hidden=16, recipe=recipe, steps=9, wait=5.0, total="")
    genesis, _ = Node(tmp_path).start(text=text.replace("num_hidden_layers: 1", "num_hidden_layers: 4"))
    published = RunPlan.of(parse_manifest(genesis.manifest.canonical(), "published")).recipe
    assert published.cut == Cut(3, "consecutive", "apart")
    assert published.schedule.blocks_per_fragment is None
    sizes = json.loads((tmp_path / "genesis.json").read_text())["fragments"]
    assert len(sizes) == 3
    assert sizes[0] == sizes[1]  # two blocks each
    assert sizes[2] == 264 * 16 + 16  # tied embeddings and the last norm


@pytest.fixture
def exported(tmp_path):
    """A folder with a model that has trained, its tokenizer of bytes, and no run."""
    folder = tmp_path / "export"
    model = tiny_model(seed=11)
    with torch.no_grad():
        model.model.norm.weight.add_(0.25)  # no seed gives that
    model.save_pretrained(folder)
    ByteTokenizer().save(folder)
    return folder, model


def test_a_folder_of_the_organiser_goes_out_as_config_and_genesis(exported, tmp_path):
    folder, model = exported
    in_words = f"{TEXT[: TEXT.index('model:')]}model: {{pretrained: {folder}}}\n{TEXT[TEXT.index('data:') :]}"
    for start, (text, base) in enumerate([(TEXT, folder), (in_words, None)], start=1):
        found, built = open_run(tmp_path, text, base=base)
        assert built == (start == 1)
        published = open_manifest(seal_manifest(Identity.generate(), found.manifest, 1)).manifest
        assert published == found.manifest
        assert str(folder) not in published.canonical().decode()  # no path of the organiser's
        spec = published.model
        assert (spec.architecture, spec.pretrained, published.tokenizer.kind) == ("llama", None, "bytes")
        assert spec.config["intermediate_size"] == 32  # the folder's, not the file's 16
        other = build_initial_model(published, ByteTokenizer())  # what a peer builds, which has never seen the folder
        layout = FlatLayout.of(other)
        anchor = torch.frombuffer(bytearray((tmp_path / "genesis.bin").read_bytes()), dtype=torch.float32)
        layout.copy_from_flat(anchor[: layout.numel], other)
        ids = torch.arange(3, 19)[None]
        assert torch.equal(other(input_ids=ids).logits, model(input_ids=ids).logits)
        assert other.config.eos_token_id == model.config.eos_token_id


@pytest.mark.parametrize(("spoil", "message"), [
    (lambda folder: (folder / "model.safetensors").rename(folder / "pytorch_model.bin"), "weights in safetensors"),
    (lambda folder: (folder / "config.json").unlink(), r"config\.json and weights"),
    (lambda folder: (folder / "adapter_config.json").write_text("{}"), "holds an adapter"),
    (lambda folder: (folder.parent / "run.yaml").write_text(
        TEXT.replace("model:\n", "model:\n  adapter: {kind: lora}\n")), "an adapter stands on a model that every peer"),
], ids=["pickled", "no config", "an adapter", "as base of an adapter"])  # fmt: skip
def test_a_folder_that_no_run_can_begin_with_is_refused(exported, tmp_path, spoil, message):
    folder, _ = exported
    (tmp_path / "run.yaml").write_text(TEXT)
    spoil(folder)
    with pytest.raises(UserError, match=message):
        read_organisers(tmp_path / "run.yaml", folder)


def test_the_tokenizer_of_a_folder_comes_with_it_unless_the_manifest_names_one(words, tmp_path):
    folder, _ = words
    tiny_model().save_pretrained(folder)
    path = tmp_path / "run.yaml"
    path.write_text(TEXT)
    assert read_organisers(path, folder).tokenizer.name == str(folder)
    path.write_text(TEXT + "tokenizer: {kind: bytes}\n")
    assert read_organisers(path, folder).tokenizer.kind == "bytes"


def test_a_manifest_of_another_machine_names_no_folder(exported):
    with pytest.raises(UserError) as refused:
        parse_manifest(f"name: test\nmodel: {{pretrained: {exported[0]}}}\n", "a peer")
    assert "other peers cannot read a folder of this machine" in refused.value.hint
