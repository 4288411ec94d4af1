"""GRPO under policies, with TRL: a small LLaMA learns to solve countdown puzzles. fp4graph's lines end in "# fp4graph".

    python examples/rl_grpo.py                                  # six policies, three seeds, a table
    python examples/rl_grpo.py --policies mxfp4-rl --seeds 1 --steps 50

Puzzles, model, supervised start, rollouts and held-out rewards are those of the task ``countdown`` (docs/tasks.md);
TRL's GRPOTrainer trains the model here. ``--policies`` takes shipped policies, files, and the names of three techniques
of mxfp4-rl, each used alone. The noise falls in ten stages over the run. After a stop, the same command resumes.
"""

import argparse
import os
import sys
import tempfile
from functools import partial
from pathlib import Path

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")  # rollout_func warns that it is new

import torch
import yaml
from datasets import Dataset
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, PrinterCallback, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

import fp4graph  # fp4graph
from fp4graph.lab.runs.run import Run
from fp4graph.lab.tasks import countdown

PARTS = ("macro_block_scaling", "outlier_fallback", "adaptive_quantization_noise")


def policy_of(name, steps):
    """Return a policy as data, with the noise of mxfp4-rl in stages over ``steps``."""
    data = yaml.safe_load(fp4graph.load_policy("mxfp4-rl" if name in PARTS else name).to_yaml())
    entries = [entry if isinstance(entry, dict) else {entry: {}} for entry in data.get("techniques", ())]
    data["techniques"] = [entry for entry in entries if name not in PARTS or name in entry]
    for entry in data["techniques"]:
        if noise := entry.get("adaptive_quantization_noise"):
            noise["steps_per_stage"] = -(-steps // noise["stages"])
    return {**data, "name": Path(name).stem}


def tokenizer():
    """Return a character tokenizer with the tokens of ``countdown.encode``."""
    words = {"<pad>": countdown.PAD, "<end>": countdown.END}
    words |= {character: countdown.FIRST + place for place, character in enumerate(countdown.CHARACTERS)}
    characters = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    characters.pre_tokenizer, characters.decoder = pre_tokenizers.Split(Regex("."), "isolated"), decoders.Fuse()
    special = {"pad_token": "<pad>", "eos_token": "<end>", "padding_side": "left"}
    return PreTrainedTokenizerFast(tokenizer_object=characters, **special)


def solved(prompts, completions, **_):
    return countdown.rewards_of(countdown.reward, prompts, completions)


def rollouts(prompts, trainer):
    """Generate a step's completions in evaluation mode, in the form of TRL's ``rollout_func``."""
    ids = countdown.encode(prompts)
    gumbel = -torch.empty(len(ids), countdown.COMPLETION, countdown.VOCABULARY).exponential_().log()
    tokens, logits = countdown.rollout(trainer.accelerator.unwrap_model(trainer.model), ids, gumbel)
    logs = logits.log_softmax(-1).gather(-1, tokens[:, : logits.shape[1], None])[..., 0]
    lengths = countdown.before_end(tokens).sum(1).int().tolist()
    cut = [[row[:length].tolist() for row, length in zip(side, lengths, strict=True)] for side in (tokens, logs)]
    return {"prompt_ids": ids.tolist(), "completion_ids": cut[0], "logprobs": cut[1]}


@torch.no_grad()
def held_out(problem, model):
    """Return the mean loss (the share without reward), reward and entropy on held-out puzzles."""
    measured = [problem.measure(model.eval(), batch) for batch in problem.validation()]
    return {name: torch.cat([part[name] for part in measured]).mean().item() for name in measured[0]}


class Logging(TrainerCallback):
    def __init__(self, log):
        self.log = log

    def on_log(self, args, state, control, logs, **_):
        if "reward" in logs:
            self.log(state.global_step, 1 - logs["reward"])


def train(policy, seed, log, steps, prompts, start):
    torch.set_num_threads(1)  # the number of threads changes the rounding of sums
    settings = countdown.COUNTDOWN.settings(Run("countdown", seed=seed, device="cpu"))
    problem = countdown.Countdown(settings, warm_up=start)
    model = fp4graph.apply(problem.model, policy, backend="eager", seed=seed, total_forwards=steps)  # fp4graph
    begin = held_out(problem, model)["reward"]
    with tempfile.TemporaryDirectory() as folder:  # TRL needs a folder, but writes no files here
        config = GRPOConfig(
            folder, use_cpu=True, bf16=False, report_to=[], save_strategy="no", disable_tqdm=True, logging_steps=1,
            seed=seed, max_steps=steps, per_device_train_batch_size=prompts * problem.group, temperature=1.0, beta=0.0,
            num_generations=problem.group, max_completion_length=problem.completion, gradient_checkpointing=False,
            learning_rate=1e-3, lr_scheduler_type="constant_with_warmup", warmup_steps=steps // 20, loss_type="grpo",
        )  # fmt: skip
        data = Dataset.from_dict({"prompt": countdown.prompts(prompts * steps, seed, 1)})
        options = {"rollout_func": rollouts, "processing_class": tokenizer(), "callbacks": [Logging(log)]}
        trainer = GRPOTrainer(model, solved, config, train_dataset=data, **options)
        trainer.remove_callback(PrinterCallback)
        fp4graph.prepare_optimizer(model, trainer.create_optimizer())  # fp4graph
        trainer.train()
    return {**held_out(problem, model), "start": begin}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policies", default=",".join(("mxfp4", "mxfp4-rl", *PARTS)), help="compared with bf16")
    parser.add_argument("--output", default="runs/rl")
    for name, default in {"seeds": 3, "steps": 120, "prompts": 32, "start": 350, "jobs": 2}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    try:
        policies = [policy_of(name, args.steps) for name in args.policies.split(",")]
        training = partial(train, steps=args.steps, prompts=args.prompts, start=args.start)
        options = {"seeds": args.seeds, "processes": args.jobs, "timing": False, "statistics": 0}
        print(fp4graph.compare(training, policies, folder=args.output, **options))  # fp4graph
    except fp4graph.Error as error:
        sys.exit(f"rl_grpo.py: {error}")
