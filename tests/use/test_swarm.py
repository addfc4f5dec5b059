"""What `atoll.Swarm` refuses, and the weights of a script's model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import atoll
from peer.checkpoint.inventory import CheckpointError
from peer.data.tokenizer import ByteTokenizer
from peer.errors import UserError
from peer.free_weights import layout_of, layout_of_file, read_weights
from peer.genesis import built_genesis
from peer.outer.policy.straggler import ComputeTimeout
from peer.outer.recipe.plan import RunPlan
from peer.outer.recipe.published import RECIPES
from peer.outer.recipe.recipe import Recipe
from peer.protocol.manifest import ORGANISER, parse_manifest
from peer.train.model import measure_model
from peer.use.script_peer import check_recipe
from peer.use.script_state import load_state_tensors, state_tensors


def network() -> nn.Module:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 2))
    model[0].bias.requires_grad_(False)
    return model


def manifest_text(path: Path, recipe: str = "diloco") -> str:
    return f"name: free\nmodel: {{weights: {path}}}\nrecipe: {{name: {recipe}}}\n"


def test_the_genesis_of_a_script_is_its_trainable_parameters_by_name(tmp_path: Path) -> None:
    model, path = network(), tmp_path / "initial.safetensors"
    atoll.save_weights(model, path)
    layout = layout_of(model)
    assert layout.names == ("0.weight", "1.bias", "1.weight", "2.bias", "2.weight")
    assert layout_of_file(path) == layout
    manifest = parse_manifest(manifest_text(path), "test", ORGANISER)
    state, *_ = built_genesis(RunPlan.of(manifest), ByteTokenizer())
    expected = torch.cat([dict(model.named_parameters())[name].detach().flatten() for name in layout.names])
    assert torch.equal(state.anchor, expected)
    flat = torch.empty(layout.numel)
    layout.copy_to_flat(model, flat)
    assert torch.equal(flat, expected)
    layout.copy_from_flat(torch.zeros(layout.numel), model)
    assert all(bool((one == 0).all()) == (name in layout.names) for name, one in model.named_parameters())


def test_weights_name_a_file_of_the_organiser_alone(tmp_path: Path) -> None:
    with pytest.raises(UserError) as caught:
        parse_manifest(manifest_text(tmp_path / "x"), "the network")
    assert "model.weights" in caught.value.hint
    assert "names a file of the organiser's machine" in caught.value.hint


@pytest.mark.parametrize(("content", "reason"), [
    (None, "cannot be read"), (b"no tensors", "cannot be read"), ({}, "holds no tensor"),
    ({"a": torch.tensor([1.0, float("nan")])}, "not finite"),
])  # fmt: skip
def test_weights_that_are_none_are_refused(tmp_path: Path, content: object, reason: str) -> None:
    path = tmp_path / "initial.safetensors"
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif content is not None:
        save_file(content, path)
    with pytest.raises(UserError, match=reason):
        (read_weights if reason == "not finite" else layout_of_file)(path)


def test_fragments_need_blocks_that_are_known(tmp_path: Path) -> None:
    atoll.save_weights(network(), tmp_path / "x")
    manifest = parse_manifest(manifest_text(tmp_path / "x", "streaming-diloco"), "test", ORGANISER)
    with pytest.raises(UserError, match="synchronises fragments of transformer blocks"):
        built_genesis(RunPlan.of(manifest), ByteTokenizer())


def test_atoll_join_has_no_model_for_such_a_run() -> None:
    spec = parse_manifest(f"name: x\nmodel: {{layout: '{'0' * 64}'}}\n", "test").model
    with pytest.raises(UserError, match="this run's model is that of a script"):
        measure_model(spec, 259)


def allowed(recipe: Recipe) -> bool:
    try:
        check_recipe(recipe)
    except UserError:
        return False
    return True


def test_recipes_that_change_the_steps_themselves_are_refused() -> None:
    fine = {name for name, recipe in RECIPES.items() if allowed(recipe)}
    assert {"lagoon", "diloco", "streaming-diloco", "sparseloco", "fedadam", "eager-diloco"} <= fine
    assert not fine & {"ddp", "demo", "distro", "fedprox", "fedglomo", "selsync"}
    assert not allowed(replace(RECIPES["diloco"], straggler=ComputeTimeout(tau_s=1.0)))


def test_a_swarm_outside_of_its_block_says_so(tmp_path: Path) -> None:
    model = network()
    swarm = atoll.Swarm(
        "/ip4/127.0.0.1/tcp/1/p2p/12D3KooWKmmM9Y5H6oezr6EDRhBYuxX24zB2Ryv6XrVcmTra4uad", model,
        torch.optim.SGD(model.parameters(), 0.1), output_dir=tmp_path / "out",
    )  # fmt: skip
    with pytest.raises(UserError, match="this Swarm is closed"):
        swarm.after_step(tokens=1)
    with pytest.raises(UserError, match=r"after_step\(tokens=0\)"):
        swarm.after_step(tokens=0)
    with pytest.raises(UserError, match="connection refused"), swarm:
        pass
    with pytest.raises(UserError, match="this Swarm is closed"):
        swarm.after_step(tokens=1)
    with pytest.raises(UserError, match="connection refused"), swarm:  # no lock of the first try is left
        pass
    swarm.close()
    with pytest.raises(UserError, match="unknown setting"):
        atoll.Swarm("/ip4/127.0.0.1/tcp/1/p2p/12D3KooWKmmM9Y5H6oezr6EDRhBYuxX24zB2Ryv6XrVcmTra4uad", model,
                    torch.optim.SGD(model.parameters(), 0.1), nicknam="x")  # fmt: skip
    with pytest.raises(UserError, match="does not accept bf16, train_files"):
        atoll.Swarm("/ip4/127.0.0.1/tcp/1/p2p/12D3KooWKmmM9Y5H6oezr6EDRhBYuxX24zB2Ryv6XrVcmTra4uad", model,
                    torch.optim.SGD(model.parameters(), 0.1), bf16=True,
                    train_files="x")  # fmt: skip


@pytest.mark.parametrize("build", [
    lambda them: torch.optim.AdamW(them, 0.1), lambda them: torch.optim.SGD(them, 0.1),
    lambda them: torch.optim.SGD(them, 0.1, momentum=0.9), lambda them: torch.optim.Adagrad(them, 0.1),
    lambda them: torch.optim.RMSprop(them, 0.1, centered=True), lambda them: torch.optim.Adafactor(them, 0.1),
])  # fmt: skip
def test_an_optimizer_continues_from_its_tensors_bit_for_bit(build) -> None:
    def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad()
        model(torch.ones(2, 4) * torch.arange(2.0)[:, None]).square().sum().backward()
        optimizer.step()

    one, two = network(), network()
    first, second = build(one.parameters()), build(two.parameters())
    for _ in range(3):
        step(one, first)
    two.load_state_dict(one.state_dict())
    load_state_tensors(second, {name: tensor.clone() for name, tensor in state_tensors(first).items()})
    for _ in range(2):
        step(one, first)
        step(two, second)
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), two.parameters(), strict=True))


def test_the_state_of_another_optimizer_is_refused() -> None:
    optimizer = torch.optim.AdamW(network().parameters(), 0.1)
    for name, size in {"9.exp_avg": 3, "0.exp_avg": 500, "x.exp_avg": 1}.items():
        with pytest.raises(UserError, match="the optimizer has no such"):
            load_state_tensors(optimizer, {name: torch.zeros(size)})
    with pytest.raises(UserError, match="the optimizer has no such"):
        load_state_tensors(optimizer, {"0.step.number": torch.zeros(3)})
    with pytest.raises(UserError, match="does not fit AdamW: KeyError: 'step'"):
        load_state_tensors(torch.optim.AdamW(network().parameters(), 0.1), {"0.exp_avg": torch.zeros(2)})
    optimizer.state[network()[0].weight] = {"step": 3, "flag": "x"}
    optimizer.param_groups[0]["params"][0] = next(iter(optimizer.state))
    with pytest.raises(CheckpointError, match="'flag', which is neither a number"):
        state_tensors(optimizer)
