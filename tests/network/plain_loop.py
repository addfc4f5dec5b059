"""A language model in a loop as one writes it by hand: batches from a file, its losses into another."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
import yaml
from safetensors.torch import load_file
from torch.nn import functional
from transformers import AutoConfig, AutoModelForCausalLM

import atoll


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("address")
    parser.add_argument("--manifest", type=Path, required=True)
    parser.add_argument("--batches", type=Path, required=True)
    parser.add_argument("--output-dir", required=True)
    arguments = parser.parse_args()
    document = yaml.safe_load(arguments.manifest.read_text())
    spec, inner = document["model"], document["inner"]
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(spec["architecture"], **spec["config"]))
    decays = [one for one in model.parameters() if one.dim() >= 2]
    others = [one for one in model.parameters() if one.dim() < 2]
    groups = [{"params": decays, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=inner["learning_rate"], betas=(0.9, 0.95))
    losses = []
    with atoll.Swarm(arguments.address, model, optimizer, output_dir=arguments.output_dir) as swarm:
        for step, ids in enumerate(load_file(arguments.batches)["ids"]):
            warm = min(1.0, (swarm.global_step + 1) / inner["warmup_steps"]) * min(1.0, (step + 1) / 10)
            for group in optimizer.param_groups:
                group["lr"] = inner["learning_rate"] * warm
            logits = model(input_ids=ids[:, :-1]).logits
            loss = functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            swarm.after_step(tokens=ids[:, 1:].numel(), loss=loss.item())
    (Path(arguments.output_dir) / "losses.json").write_text(json.dumps(losses))


if __name__ == "__main__":
    main()
