"""The initial state in a node's folder: built by a real child once, and found whole by whoever starts again."""

from __future__ import annotations

import asyncio
import json
import logging

import pytest

from bootstrap.genesis import GenesisBuild
from peer.data.tokenizer import ByteTokenizer, load_tokenizer
from peer.data.train_bpe import train_bpe
from peer.errors import UserError
from peer.genesis import checked_genesis
from peer.outer.recipe.plan import RunPlan
from peer.outer.state.flat_layout import Cut
from peer.protocol.identity import Identity
from peer.protocol.manifest import ORGANISER, parse_manifest
from peer.protocol.records import open_manifest, seal_manifest
from tests.network.bootstraps import DILOCO, MANIFEST

TEXT = MANIFEST.format(hidden=16, recipe=DILOCO, steps=5, wait=5.0, total="")


class Node:
    """A node's folder, and what each of its starts found or built there."""

    def __init__(self, folder):
        self.folder, self.path = folder, folder / "run.yaml"
        self.state, self.figures = folder / "genesis.bin", folder / "genesis.json"

    def start(self, seed=3, genesis=None, new_run=False, text=TEXT):
        """-> (genesis, whether a child built it)"""
        text = text.replace("seed: 3", f"seed: {seed}")
        self.path.write_text(text + (f"genesis: '{genesis}'\n" if genesis else ""))

        async def run():
            building = GenesisBuild(
                parse_manifest(self.path.read_bytes(), "run.yaml"), self.path, self.folder, new_run=new_run
            )
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
    assert node.start()[1]
    return node


@pytest.fixture
def node(built, tmp_path):
    """A folder in which a node has been before."""
    for path in (built.state, built.figures):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    return Node(tmp_path)


def test_what_the_child_builds_is_the_state_that_any_peer_builds(built):
    state, _ = checked_genesis(parse_manifest(TEXT, "run.yaml"), ByteTokenizer())
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
        manifest = parse_manifest(text, "run.yaml", ORGANISER)
        building = GenesisBuild(manifest, folder / "run.yaml", folder, **more)
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
