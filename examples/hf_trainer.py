"""`transformers.Trainer` as a peer: the callback is all that a script needs.

    atoll-bootstrap configs/runs/quickstart.yaml
    python examples/hf_trainer.py /ip4/203.0.113.7/tcp/31337/p2p/12D3KooW... --text book.txt
"""

from __future__ import annotations

import argparse
from pathlib import Path

import yaml
from datasets import Dataset
from transformers import AutoConfig, AutoModelForCausalLM, Trainer, TrainingArguments

from atoll.hf import SwarmCallback

LENGTH = 128


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("address", metavar="ADDRESS", help="of the bootstrap, or of any peer")
    parser.add_argument("--manifest", type=Path, default=Path("configs/runs/quickstart.yaml"), help="of the run")
    parser.add_argument("--text", type=Path, required=True, metavar="FILE", help="to train on, as bytes")
    parser.add_argument("--output-dir", default="runs/trainer", metavar="DIR", help="of this peer")
    parser.add_argument("--max-steps", type=int, default=10_000, metavar="N", help="at most")
    arguments = parser.parse_args()
    spec = yaml.safe_load(arguments.manifest.read_text())["model"]
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(spec["architecture"], **spec["config"]))
    data = [byte + 3 for byte in arguments.text.read_bytes()]  # the ids of the run's byte tokenizer
    length = min(LENGTH, model.config.max_position_embeddings)
    rows = [data[i : i + length] for i in range(0, len(data) - length, length)]
    trainer = Trainer(
        model=model,
        args=TrainingArguments(
            output_dir=f"{arguments.output_dir}/trainer", per_device_train_batch_size=8, max_steps=arguments.max_steps,
            learning_rate=1e-3, logging_steps=20, save_strategy="no", report_to=[], use_cpu=True,
        ),
        train_dataset=Dataset.from_dict({"input_ids": rows, "labels": rows}),
        callbacks=[SwarmCallback(arguments.address, output_dir=arguments.output_dir)],
    )  # fmt: skip
    trainer.train()
    trainer.save_model(f"{arguments.output_dir}/model")  # what the run yields


if __name__ == "__main__":
    main()
