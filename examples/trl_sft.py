"""TRL's `SFTTrainer` as a peer: people fine-tune one model together, each on conversations of their own.

The organiser opens a run that begins with the model, a folder or a name on the hub (`model.pretrained`):

    atoll-bootstrap run.yaml --from model

Everyone trains, with the address that the bootstrap prints and rows with "messages" or "text":

    python examples/trl_sft.py /ip4/203.0.113.7/tcp/31337/p2p/12D3KooW... --model model --data chats.jsonl
"""

from __future__ import annotations

import argparse

import torch
from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import SFTConfig, SFTTrainer

from atoll.hf import SwarmCallback


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("address", metavar="ADDRESS", help="of the bootstrap, or of any peer")
    parser.add_argument("--model", required=True, metavar="NAME", help="that of the run: on the hub, or a folder")
    parser.add_argument("--data", required=True, metavar="FILE", help="rows with messages or text, as JSON lines")
    parser.add_argument("--output-dir", default="runs/sft", metavar="DIR", help="of this peer")
    parser.add_argument("--max-length", type=int, default=512, metavar="N", help="tokens of a row")
    parser.add_argument("--max-steps", type=int, default=1_000_000, metavar="N", help="at most; the run ends before")
    arguments = parser.parse_args()
    model = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=torch.float32)
    on_cpu = not torch.cuda.is_available()
    trainer = SFTTrainer(
        model=model,
        processing_class=AutoTokenizer.from_pretrained(arguments.model),
        args=SFTConfig(
            output_dir=f"{arguments.output_dir}/trainer", per_device_train_batch_size=4, max_steps=arguments.max_steps,
            max_length=arguments.max_length, learning_rate=1e-3, lr_scheduler_type="constant", logging_steps=20,
            save_strategy="no", report_to=[], use_cpu=on_cpu, bf16=not on_cpu, include_num_input_tokens_seen=True,
        ),
        train_dataset=load_dataset("json", data_files=arguments.data, split="train"),
        callbacks=[SwarmCallback(arguments.address, output_dir=arguments.output_dir)],
    )  # fmt: skip
    trainer.train()
    trainer.save_model(f"{arguments.output_dir}/model")  # what the run yields


if __name__ == "__main__":
    main()
