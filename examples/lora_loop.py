"""LoRA fine-tuning in a loop of one's own: the base stays on each machine, and only the adapter travels.

The organiser writes the adapter's initial weights and a manifest, and opens the run:

    python examples/lora_loop.py --model HuggingFaceTB/SmolLM2-135M --init lora
    atoll-bootstrap lora/run.yaml

Everyone trains on a text file of their own, with the address that the bootstrap prints:

    python examples/lora_loop.py --model HuggingFaceTB/SmolLM2-135M --data mine.txt --join /ip4/203.0.113.7/tcp/...
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer

import atoll

MANIFEST = """\
name: lora
model: {weights: WEIGHTS}                 # the adapter alone; each peer loads the base itself
recipe: {name: diloco, compressor: int8, steps_per_round: 20}
inner: {batch_sequences: 4}
data: {sequence_length: LENGTH}
rounds: {total: ROUNDS}
trust: {identity_work: 0}
"""
ROWS = 4


def build(name: str) -> PeftModel:
    base = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32)  # or in 4 bits: it does not train
    return get_peft_model(base, LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, metavar="NAME", help="the base: on the hub, or a folder")
    parser.add_argument("--init", type=Path, metavar="DIR", help="write the weights and the manifest of a run")
    parser.add_argument("--rounds", type=int, default=50, metavar="N", help="of the run, with --init")
    parser.add_argument("--length", type=int, default=128, metavar="N", help="tokens of a row")
    parser.add_argument("--data", type=Path, metavar="FILE", help="text to train on")
    parser.add_argument("--join", metavar="ADDRESS", help="train with the swarm at an address")
    parser.add_argument("--output-dir", default="runs/lora", metavar="DIR", help="of this peer")
    arguments = parser.parse_args()
    model = build(arguments.model)
    if arguments.init:
        arguments.init.mkdir(parents=True, exist_ok=True)
        weights = arguments.init / "initial.safetensors"
        atoll.save_weights(model, weights)
        text = MANIFEST.replace("WEIGHTS", str(weights)).replace("ROUNDS", str(arguments.rounds))
        (arguments.init / "run.yaml").write_text(text.replace("LENGTH", str(arguments.length)))
        return
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    ids = torch.tensor(AutoTokenizer.from_pretrained(arguments.model)(arguments.data.read_text()).input_ids)
    optimizer = torch.optim.AdamW((one for one in model.to(device).parameters() if one.requires_grad), lr=1e-3)
    with atoll.Swarm(arguments.join, model, optimizer, output_dir=arguments.output_dir) as swarm:
        while not swarm.finished:
            starts = torch.randint(len(ids) - arguments.length, (ROWS,)).tolist()
            rows = torch.stack([ids[start : start + arguments.length] for start in starts]).to(device)
            loss = model(input_ids=rows, labels=rows).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            swarm.after_step(tokens=rows.numel(), loss=loss.item())
            if swarm.step % 50 == 0:
                print(f"step {swarm.step}, round {swarm.round}: loss {loss.item():.3f}", flush=True)
    model.save_pretrained(f"{arguments.output_dir}/adapter")  # what the run yields


if __name__ == "__main__":
    main()
