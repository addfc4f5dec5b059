"""Tasks of lm-eval: from an export and from a checkpoint, without a network."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from peer import cli
from peer.data.tokenizer import ByteTokenizer
from peer.errors import UserError
from peer.run.tasks import score
from peer.use.trained import open_trained
from tests.use.test_trained import Saved, manifest_of

TASK = """\
task: colours
dataset_path: json
dataset_kwargs: {data_files: {validation: FILE}}
validation_split: validation
output_type: multiple_choice
doc_to_text: "{{q}}"
doc_to_choice: ["red", "blue", "green"]
doc_to_target: a
metric_list: [{metric: acc}]
"""


class Manager:
    """Lists what it knows; that of lm-eval takes seconds where it lists its own."""

    def __init__(self, include_path: str | None, include_defaults: bool = True) -> None:
        self.place, self.all_tasks = (include_path, include_defaults), ["colours"]


def refusal(argv: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as caught:
        cli.main(argv)
    assert caught.value.code == 2
    return capsys.readouterr().err


def test_without_lm_eval_a_message_says_how_to_get_it(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    said = refusal(["evaluate", str(tmp_path), "--tasks", "colours"], capsys)
    assert "tasks need lm-eval" in said
    assert "pip install '.[eval]'" in said


def test_the_harness_gets_the_model_in_evaluation_mode_and_its_numbers_come_back(tmp_path: Path, monkeypatch) -> None:
    model = open_trained(Saved(tmp_path / "peer", manifest_of()).output).model.train()
    asked: list[dict[str, Any]] = []

    def evaluate(**given: Any) -> dict[str, Any]:
        asked.append(given)
        given["model"]["pretrained"].eval()
        torch.rand(1)
        return {"results": {"colours": {"alias": "colours", "acc,none": 0.25, "acc_stderr,none": "N/A"}}}

    harness: Any = SimpleNamespace(simple_evaluate=evaluate, __spec__=SimpleNamespace())
    for name, module in {
        "lm_eval": harness, "lm_eval.tasks": SimpleNamespace(TaskManager=Manager),
        "lm_eval.models.huggingface": SimpleNamespace(HFLM=dict),
    }.items():  # fmt: skip
        monkeypatch.setitem(sys.modules, name, module)
    before = torch.random.get_rng_state()
    assert score(model, ByteTokenizer(), ["colours"], tmp_path, 7) == {"colours": {"acc": 0.25}}
    assert torch.equal(before, torch.random.get_rng_state())
    assert model.training
    given = asked[0]
    assert (given["tasks"], given["task_manager"].place, given["limit"]) == (["colours"], (str(tmp_path), False), 7)
    score(model, ByteTokenizer(), ["colours", "hellaswag"], tmp_path)
    assert asked[1]["task_manager"].place == (str(tmp_path), True)
    assert given["model"]["tokenizer"]("ab")["input_ids"] == ByteTokenizer().encode("ab").tolist()
    with pytest.raises(UserError, match="is no folder of tasks"):
        score(model, ByteTokenizer(), ["colours"], tmp_path / "none")


@pytest.mark.long
def test_a_local_task_scores_an_export_and_a_checkpoint_alike(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    saved, tasks = Saved(tmp_path / "peer", manifest_of()), tmp_path / "tasks"
    tasks.mkdir()
    rows = [{"q": f"{number} is ", "a": number % 3} for number in range(40)]
    (tmp_path / "rows.json").write_text("\n".join(map(json.dumps, rows)))
    (tasks / "colours.yaml").write_text(TASK.replace("FILE", str(tmp_path / "rows.json")))
    with pytest.raises(SystemExit) as caught:
        cli.main(["export", str(saved.output), "--to", str(tmp_path / "out"), "--device", "cpu"])
    assert caught.value.code == 0
    found = []
    for model in (tmp_path / "out", saved.checkpoint):
        capsys.readouterr()
        with pytest.raises(SystemExit) as caught:
            cli.main(["evaluate", str(model), "--tasks", "colours", "--task-folder", str(tasks), "--limit", "30",
                      "--json", "--device", "cpu"])  # fmt: skip
        assert caught.value.code == 0
        found.append(json.loads(capsys.readouterr().out)["tasks"])
    assert found[0] == found[1]
    model, right = open_trained(saved.output).model, 0
    for row in rows[:30]:  # the plain way of the same
        likely = []
        for word in ("red", "blue", "green"):
            ids = ByteTokenizer().encode(f"{row['q']} {word}").tolist()  # the harness puts a space between them
            asked = len(ByteTokenizer().encode(str(row["q"]).rstrip()))
            with torch.no_grad():
                logits = model(input_ids=torch.tensor([ids])).logits[0].log_softmax(-1)
            likely.append(sum(float(logits[place - 1, ids[place]]) for place in range(asked, len(ids))))
        right += likely.index(max(likely)) == row["a"]
    assert 0 < right < 30
    assert "no such" not in refusal(["evaluate", str(tmp_path / "out"), "--tasks", "nothing"], capsys)
    assert found[0]["colours"]["acc"] == pytest.approx(right / 30)
