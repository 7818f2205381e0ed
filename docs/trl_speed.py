"""Seconds a rollout of TRL's GRPOTrainer on a Llama of our size, and the writing in it.

128 stories of at most 200 tokens, two passes, minibatches of 16. In a venv of its own:

    pip install torch==2.13.0 trl==1.16.0 transformers==5.24.0
    python docs/trl_speed.py --rollouts 2 --precision fp32

The weights are random, so that stories run to all 200 tokens: time ours the same way, by
`python bench.py --only "writing, 128" "rollout, random"`. The first rollout warms up; quote the rest, and take it several
times, in turn with ours.
"""

import argparse
import tempfile
import time

import torch
from datasets import Dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

args = argparse.ArgumentParser()
args.add_argument("--rollouts", type=int, default=2)
args.add_argument("--precision", choices=["bf16", "fp32"], default="bf16")
args.add_argument("--layers", type=int, default=8)
args.add_argument("--vocab", type=int, default=4096)
args.add_argument("--loss", default="grpo")
args = args.parse_args()

torch.manual_seed(0)
words = [f"w{i}" for i in range(3000)]
bpe = Tokenizer(models.BPE())
bpe.pre_tokenizer, bpe.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
bpe.train_from_iterator(
    [" ".join(words[i : i + 50]) for i in range(0, 3000, 7)],
    trainers.BpeTrainer(vocab_size=args.vocab, special_tokens=["<eos>", "<pad>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet()),
)
tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="<eos>", pad_token="<pad>")
folder = tempfile.mkdtemp()
LlamaForCausalLM(
    LlamaConfig(
        vocab_size=args.vocab,
        hidden_size=384,
        intermediate_size=1024,
        num_hidden_layers=args.layers,
        num_attention_heads=6,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
).save_pretrained(folder)
tokenizer.save_pretrained(folder)
model = LlamaForCausalLM.from_pretrained(folder)
written = 0.0
generate = model.generate


def timed_generate(*args, **kwargs):
    global written
    start = time.perf_counter()
    out = generate(*args, **kwargs)
    written += time.perf_counter() - start
    return out


model.generate = timed_generate
print(f"{sum(p.numel() for p in model.parameters()) / 1e6:.1f}M parameters")


class Clock(TrainerCallback):
    def on_train_begin(self, *_, **__):
        self.start = time.perf_counter()

    def on_step_end(self, args, state, control, **__):
        if state.global_step % 16 == 0:  # 8 minibatches, twice
            global written
            print(f"rollout {state.global_step // 16}: {time.perf_counter() - self.start:.1f} s, writing {written:.1f} s", flush=True)
            self.start, written = time.perf_counter(), 0.0


GRPOTrainer(
    model=model,
    reward_funcs=lambda completions, **_: [float(len(c) % 7) for c in completions],
    args=GRPOConfig(
        output_dir=folder,
        use_cpu=True,
        bf16=args.precision == "bf16",
        per_device_train_batch_size=16,
        gradient_accumulation_steps=1,
        steps_per_generation=8,
        num_generations=8,
        num_iterations=2,
        max_completion_length=200,
        beta=0.05,
        learning_rate=1e-5,
        loss_type=args.loss,
        max_steps=16 * args.rollouts,
        logging_steps=16,
        save_strategy="no",
        report_to=[],
        gradient_checkpointing=False,
    ),
    train_dataset=Dataset.from_dict({"prompt": ["w1 w2 w3 w4 w5 "] * 512}),
    processing_class=tokenizer,
    callbacks=[Clock()],
).train()
