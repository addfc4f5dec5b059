"""Scores of a model on the tasks of lm-eval, which is imported when it is asked for (`atoll[eval]`)."""

from __future__ import annotations

import importlib
import importlib.util
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from peer.data.tokenizer import Tokenizer, as_transformers
from peer.errors import UserError

Scores = dict[str, dict[str, float]]
BATCH = 8


def check_tasks(folder: Path | None = None) -> None:
    """Raises UserError where lm-eval is not installed, or the folder of further tasks is none."""
    try:
        found = importlib.util.find_spec("lm_eval")
    except ValueError:
        found = None
    if found is None:
        raise UserError("tasks need lm-eval, which is not installed", "pip install '.[eval]' in a clone")
    if folder is not None and not folder.is_dir():
        raise UserError(f"{folder} is no folder of tasks", "give one with YAML files of lm-eval")


def score(
    model: PreTrainedModel, tokenizer: Tokenizer, tasks: Sequence[str], folder: Path | None = None,
    limit: int | None = None,
) -> Scores:  # fmt: skip
    """What lm-eval measures, by task and metric; the model is in the mode of before afterwards.

    Args:
        folder: of further tasks (YAML files).
        limit: documents of a task at most.

    Raises:
        UserError: not installed, no such task, or it failed of one.
    """
    check_tasks(folder)
    lm_eval, training = importlib.import_module("lm_eval"), model.training
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    manager = _manager(tasks, folder)
    window = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    try:
        with torch.random.fork_rng([model.device] if model.device.type == "cuda" else []):
            wrapped = importlib.import_module("lm_eval.models.huggingface").HFLM(
                pretrained=model, tokenizer=as_transformers(tokenizer), batch_size=BATCH, max_length=window
            )
            found: dict[str, Any] = lm_eval.simple_evaluate(
                model=wrapped, tasks=list(tasks), task_manager=manager, limit=limit, bootstrap_iters=0,
                log_samples=False,
            )
    except Exception as error:  # of tasks that people write, anything
        what = f"tasks {', '.join(tasks)}: {type(error).__name__}: {' '.join(str(error).split())[:300]}"
        raise UserError(what, "check their names (lm-eval ls tasks), and the network that their data needs") from error
    finally:
        model.train(training)
    return {
        task: {key.removesuffix(",none"): value for key, value in scores.items() if type(value) in (int, float)}
        for task, scores in found["results"].items()
    }


def _manager(tasks: Sequence[str], folder: Path | None) -> Any:
    """Knows the tasks of the folder, and where these are not enough those of lm-eval, which take seconds to list."""
    build = importlib.import_module("lm_eval.tasks").TaskManager
    if folder is not None:
        own = build(include_path=str(folder), include_defaults=False)
        if set(tasks) <= set(own.all_tasks):
            return own
    return build(include_path=None if folder is None else str(folder))
