"""`name:key=value,...` as it is typed."""

from __future__ import annotations

from dataclasses import replace

import pytest

from peer.errors import UserError
from peer.outer.optim.optimizers import Nesterov
from peer.outer.policy.merge_rules import Mix
from peer.outer.policy.schedules import Every, Strided
from peer.outer.recipe.published import RECIPES
from peer.outer.state.flat_layout import FlatLayout
from peer.protocol.manifest import InnerSpec
from peer.sim.campaign.label import at_pace, parse_label, parse_labels, with_room


def layout(num_blocks):
    names = tuple(f"layers.{block}.w" for block in range(num_blocks))
    return FlatLayout(names=names, shapes=((2,),) * num_blocks, offsets=tuple(range(0, 2 * num_blocks, 2)),
                      numel=2 * num_blocks)


def refusal(label):
    with pytest.raises(UserError) as caught:
        parse_label(label)
    return caught.value.render()


@pytest.mark.parametrize("name", RECIPES)
def test_a_name_alone_is_the_published_recipe(name):
    assert parse_label(name).recipe() == RECIPES[name]


def test_keys_of_the_recipe_of_its_parts_and_of_the_inner_loop():
    choice = parse_label("streaming-diloco:schedule.num_fragments=4,compressor=fp32,outer_learning_rate=0.7,"
                         "merge.alpha=0,inner.learning_rate=4e-3,inner.betas=[0.9, 0.99],inner.optimizer=muon")
    recipe = choice.recipe()
    assert recipe.schedule == Strided(period=100, num_fragments=4, overlap_steps=1)
    assert (recipe.compressor, recipe.outer, recipe.merge) == ("fp32", Nesterov(lr=0.7, momentum=0.9), Mix(alpha=0))
    inner = choice.apply_to(InnerSpec(weight_decay=0.25))
    assert (inner.learning_rate, inner.betas, inner.optimizer) == (4e-3, (0.9, 0.99), "muon")
    assert inner.weight_decay == 0.25


@pytest.mark.parametrize("label", [
    "diloco:schedule=strided,schedule.period=40,schedule.num_fragments=2",
    "diloco:schedule.period=40,schedule.num_fragments=2,schedule=strided",
    "diloco:schedule.name=strided,schedule.period=40,schedule.num_fragments=2",
])
def test_another_kind_of_part_and_its_numbers_in_any_order(label):
    assert parse_label(label).recipe().schedule == Strided(period=40, num_fragments=2)


@pytest.mark.parametrize(("label", "parts"), [
    ("dilocco", ["unknown recipe 'dilocco'", "did you mean 'diloco'?", "atoll recipes"]),
    ("diloco:", ["nothing follows the colon"]),
    ("diloco:compressor=int8,compressor=fp32", ["'compressor' is set twice", "remove one of them"]),
    ("diloco:outer.momentum=0.8,outer.momentum=.9", ["'outer.momentum' is set twice"]),
    ("diloco:int8", ["'int8' is not key=value", "write it as"]),
    ("diloco:compressr=int8", ["unknown key 'compressr'", "did you mean 'compressor'?"]),
    ("diloco:compressor=int9", ["'diloco:compressor=int9'", "int9"]),
    ("diloco:outer.momentun=0.8", ["recipe.outer.momentun", "did you mean 'momentum'?"]),
    ("diloco:outerr.momentum=0.8", ["'outerr' in 'outerr.momentum' is no part", "did you mean 'outer'?"]),
    ("diloco:outer_momentum=1.5", ["outer_momentum=1.5", "less than 1"]),
    ("diloco:inner.learning_rat=1", ["inner.unknown key 'learning_rat'", "did you mean 'learning_rate'?"]),
    ("diloco:inner.learning_rate=0", ["inner.learning_rate=0", "greater than 0"]),
    ("diloco:name=ddp", ["'name' cannot be set"]),
    ("diloco:compressor=[", ["cannot be read"]),
    ("ddp:steps_per_round=5", ["steps_per_round=5", "payload: delta"]),
])
def test_a_mistake_names_the_label_and_the_nearest_word(label, parts):
    message = refusal(label)
    assert all(part in message for part in [label.partition(":")[0], *parts]), message


def test_all_is_every_recipe_and_baselines_come_first_unless_they_are_named():
    assert [choice.label for choice in parse_labels(["all"], ["ddp"])] == list(RECIPES)
    assert [choice.label for choice in parse_labels(["diloco"], ["ddp"])] == ["ddp", "diloco"]
    assert [choice.label for choice in parse_labels(["diloco", "ddp"], ["ddp"])] == ["diloco", "ddp"]
    with_muon = parse_labels(["ddp:inner.optimizer=muon"], ["ddp"])
    assert [choice.label for choice in with_muon] == ["ddp", "ddp:inner.optimizer=muon"]
    assert [choice.label for choice in parse_labels(["diloco"], ["ddp", "fedavg"])] == ["ddp", "fedavg", "diloco"]
    assert len(parse_labels(["diloco", "all"], ["ddp"])) == len(RECIPES)
    with pytest.raises(UserError, match="'diloco' is named twice"):
        parse_labels(["diloco", "diloco"], ["ddp"])


@pytest.mark.parametrize(("label", "limit", "steps"), [
    ("diloco", 30, 30), ("diloco", 1000, 500), ("easgd", 30, 16), ("diloco:steps_per_round=60", 30, 60),
    ("diloco:schedule.steps=60", 30, 60), ("diloco:schedule.growth=2.0", 30, 30), ("streaming-diloco", 30, 30),
    ("streaming-diloco:schedule.overlap_steps=0", 30, 30), ("streaming-diloco:schedule.period=60", 30, 60),
    ("ddp", 30, 1), ("selsync", 30, 1),
])
def test_rounds_are_made_shorter_unless_the_label_says_how_long_they_are(label, limit, steps):
    assert at_pace(parse_label(label), limit).steps_per_round == steps


def test_a_recipe_gets_no_more_fragments_than_the_model_has_blocks():
    choice = parse_label("streaming-diloco")
    fitted = with_room(choice, choice.recipe(), layout(2))
    assert fitted.schedule == Strided(period=100, num_fragments=2, overlap_steps=1)
    assert with_room(choice, choice.recipe(), layout(3)).schedule == replace(fitted.schedule, num_fragments=3)
    explicit = parse_label("streaming-diloco:schedule.num_fragments=4")
    with pytest.raises(UserError, match="num_fragments=4: must be from 1 to 3"):
        with_room(explicit, explicit.recipe(), layout(3))
    assert with_room(parse_label("diloco"), RECIPES["diloco"], layout(1)).schedule == Every(steps=500)
