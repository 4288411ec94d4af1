"""GRPO under a policy, with TRL: a small LLaMA learns to solve countdown puzzles. fp4graph's lines end in "# fp4graph".

    python examples/rl_grpo.py                                  # six policies, three seeds, a table
    python examples/rl_grpo.py --policies mxfp4-rl --seeds 1 --steps 50

A puzzle is a prompt such as "3,5,7=09:"; "7+5-3" solves it. The reward is 1 for an answer that a program finds right
and 0 for any other. A supervised start in high precision, the same for all policies of a seed, solves some puzzles.
TRL's GRPOTrainer goes on from there. The model that trains generates its own rollouts, in evaluation mode.

Policies are shipped ones, files, and three parts of mxfp4-rl by themselves: macro_block_scaling, outlier_fallback and
adaptive_quantization_noise, each on top of mxfp4-full. The noise falls in ten stages over the run.

Each run is a file in --output, written when the run has ended. The same command again makes the runs that are missing.
"""

import argparse
import json
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from operator import itemgetter
from pathlib import Path

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")  # rollout_func warns that it is new

import datasets
import torch
import transformers
import yaml
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch.nn.functional import log_softmax
from transformers import PreTrainedTokenizerFast
from trl import GRPOConfig, GRPOTrainer

import fp4graph  # fp4graph
from fp4graph.lab import decompose  # fp4graph
from fp4graph.lab.data import countdown
from fp4graph.lab.tasks.reinforcement import (
    POSITIONS,
    before_end,
    check_length,
    divergence,
    make_model,
    rewards_of,
    rollout,
    supervise,
)
from fp4graph.model.runtime import runtime_of  # fp4graph

PARTS = ("macro_block_scaling", "outlier_fallback", "adaptive_quantization_noise")
POLICIES = ("bf16", "mxfp4", "mxfp4-rl", *PARTS)
NUMBERS = {
    "seeds": 3, "steps": 120, "start": 350, "prompts": 32, "generations": 8, "completion": countdown.ANSWER + 1,
    "lr": 1e-3, "held-out": 512, "jobs": 2,
}  # fmt: skip
#: Options that do not change a run.
APART = {"seeds", "jobs", "output", "policies"}
#: Times that the held-out reward is measured after the start, and that gradients are.
LOOKS = 5
#: Columns of the table: a key of a run's results, a heading, a factor, a format.
COLUMNS = (
    ("start", "held-out reward, start", 1, ".3f"), ("held_out", "end", 1, ".3f"),
    ("reward", "training reward, end", 1, ".3f"), ("entropy_first", "entropy, first tenth", 1, ".3f"),
    ("entropy", "last tenth", 1, ".3f"), ("kl", "KL", 1, ".1e"), ("log_ratio", "largest log ratio", 1, ".1e"),
    ("gradient_error", "gradient error, %", 100, ".1f"), ("dy_total", "error of dY, %", 100, ".2f"),
    ("dy_scale_bias", "scale bias", 100, ".2f"), ("dy_dead_zone", "dead zone", 100, ".2f"),
    ("dy_grid_noise", "grid noise", 100, ".2f"), ("cpu", "CPU, s", 1, ".0f"),
)  # fmt: skip


def policy_of(name, steps):
    """Return a policy by its name, with the noise of mxfp4-rl in ten stages over ``steps``, as data."""
    shipped = fp4graph.load_policy("mxfp4-rl" if name in PARTS else name)
    data = yaml.safe_load(shipped.to_yaml())
    given = [
        next(iter(entry.items())) if isinstance(entry, dict) else (entry, {}) for entry in data.get("techniques", ())
    ]
    kept = [(technique, options) for technique, options in given if name not in PARTS or technique == name]
    for technique, options in kept:
        if technique == "adaptive_quantization_noise":
            options["steps_per_stage"] = -(-steps // options["stages"])
    return {**data, "name": Path(name).stem, "techniques": [{technique: options} for technique, options in kept]}


def tokenizer():
    """Return a tokenizer of characters, with the tokens of ``countdown.encode``."""
    words = {"<pad>": countdown.PAD, "<end>": countdown.END}
    words |= {character: countdown.FIRST + place for place, character in enumerate(countdown.CHARACTERS)}
    made = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    made.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    made.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", eos_token="<end>", padding_side="left",
        clean_up_tokenization_spaces=False,
    )  # fmt: skip


def solved(prompts, completions, **_):
    """Return the reward of each completion, for TRL."""
    return rewards_of(countdown.reward, prompts, completions)


def generate(model, prompts, completion):
    """Draw a completion for each prompt: tokens ``[n, completion]``, and their log-probabilities ``[n, longest]``."""
    gumbel = -torch.empty(len(prompts), completion, countdown.VOCABULARY).exponential_().log()
    tokens, logits = rollout(model, countdown.encode(prompts), gumbel)
    return tokens, log_softmax(logits, -1).gather(-1, tokens[:, : logits.shape[1], None])[..., 0]


def rollouts(prompts, trainer, completion):
    """Generate what a step trains on, in the form that TRL's ``rollout_func`` has."""
    tokens, logs = generate(trainer.accelerator.unwrap_model(trainer.model), prompts, completion)
    lengths = before_end(tokens).sum(1).int().tolist()
    cut = [[row[:length].tolist() for row, length in zip(side, lengths, strict=True)] for side in (tokens, logs)]
    return {"prompt_ids": countdown.encode(prompts).tolist(), "completion_ids": cut[0], "logprobs": cut[1]}


def held_out_reward(model, args):
    """Return the mean reward on puzzles with numbers that training never shows; the draws are the same each time."""
    prompts = countdown.prompts(args.held_out, 0, held_out=True)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        tokens, _ = generate(model, prompts, args.completion)
    return statistics.fmean(solved(prompts, [countdown.decode(row) for row in tokens.tolist()]))


class Taking:
    """Decomposes the error of dY at every site, by the policy's own quantizer: an observer of a step."""

    def __init__(self):
        self.shares = []

    def operands(self, site):
        return self.measure

    def output(self, site, y):
        pass

    def measure(self, *sides):
        for seen in sides:
            is_gradient = str(seen.operand).endswith("grad_output")
            if is_gradient and seen.program.spec is not None and seen.x.any():
                parts = decompose(seen.x, seen.program, draw=seen.draw, state=seen.state)
                self.shares.append(parts.shares(seen.x))


class Recorded(GRPOTrainer):
    """GRPO that keeps how far rollouts and training forwards differ, and how far gradients are from exact ones."""

    def __init__(self, model, looks, **options):
        super().__init__(model, **options)
        self.looks, self.taking = looks, Taking()
        self.kl, self.log_ratios, self.gradient_errors, self.sampled = [], [], [], None

    def compute_loss(self, model, inputs, *args, **kwargs):
        self.sampled = inputs["sampling_per_token_logps"], inputs["completion_mask"]
        return super().compute_loss(model, inputs, *args, **kwargs)

    def _get_per_token_logps_and_entropies(self, model, *args, **kwargs):
        found = super()._get_per_token_logps_and_entropies(model, *args, **kwargs)
        if self.sampled is not None and model.training:
            kl, log_ratio = divergence(found[0], *self.sampled)
            self.kl.append(kl)
            self.log_ratios.append(log_ratio)
            self.sampled = None
        return found

    def training_step(self, model, inputs, *args, **kwargs):
        if self.state.global_step not in self.looks:
            return super().training_step(model, inputs, *args, **kwargs)
        runtime = runtime_of(self.accelerator.unwrap_model(model))
        runtime.observe(self.taking)
        loss = super().training_step(model, inputs, *args, **kwargs)
        runtime.observe(None)
        parameters = [parameter for parameter in model.parameters() if parameter.grad is not None]
        quantized = [parameter.grad.clone() for parameter in parameters]
        model.zero_grad()
        with fp4graph.bypass(model):  # fp4graph
            super().compute_loss(model, self._buffered_inputs[0]).backward()
        exact = torch.cat([parameter.grad.flatten() for parameter in parameters])
        for parameter, gradient in zip(parameters, quantized, strict=True):
            parameter.grad = gradient
        difference = torch.cat([gradient.flatten() for gradient in quantized]) - exact
        if exact.any():  # not where every group of rollouts has equal rewards
            self.gradient_errors.append((difference.square().sum() / exact.square().sum()).item())
        return loss


class HeldOut(transformers.TrainerCallback):
    """Measures the held-out reward as the training goes on."""

    def __init__(self, args):
        self.args, self.history = args, []

    def on_step_end(self, args, state, control, model=None, **_):
        if state.global_step % max(1, state.max_steps // LOOKS) == 0 or state.global_step == state.max_steps:
            self.history.append((state.global_step, held_out_reward(model, self.args)))


def settings_of(args, data):
    """Return all that a run is a function of, but for its seed: the options and the content of the policy."""
    options = {name: value for name, value in vars(args).items() if name not in APART}
    return {**options, "policy": fp4graph.load_policy(data).fingerprint}


def run(policy, seed, args, file):
    """Train under a policy, and write the results."""
    torch.set_num_threads(1)  # a process for each core; sums, and so all digits, depend on the number of threads
    transformers.logging.set_verbosity_error()
    began, worked = time.perf_counter(), time.process_time()
    model = make_model(seed, max_position_embeddings=args.positions)
    check_length(model, countdown.PROMPT, args.completion)
    supervise(model, seed, args.start)
    torch.manual_seed(seed)
    data = policy_of(policy, args.steps)
    model = fp4graph.apply(model, data, backend=args.backend, seed=seed, total_forwards=args.steps)  # fp4graph
    start, callback = held_out_reward(model, args), HeldOut(args)
    batch, every = args.prompts * args.generations, max(1, args.steps // LOOKS)
    folder = tempfile.TemporaryDirectory()  # TRL wants one, and writes nothing to it here
    trainer = Recorded(
        model,
        {step for step in range(1, args.steps) if step % every == every // 2},
        reward_funcs=solved,
        rollout_func=partial(rollouts, completion=args.completion),
        args=GRPOConfig(
            folder.name, use_cpu=True, bf16=False, report_to=[], save_strategy="no", disable_tqdm=True,
            logging_steps=1, seed=seed, max_steps=args.steps, per_device_train_batch_size=batch,
            num_generations=args.generations, max_completion_length=args.completion, gradient_checkpointing=False,
            learning_rate=args.lr, lr_scheduler_type="constant_with_warmup", warmup_steps=args.steps // 20,
            optim="adamw_torch", loss_type="grpo", temperature=1.0, beta=0.0,
        ),
        train_dataset=datasets.Dataset.from_dict({"prompt": countdown.prompts(args.prompts * args.steps, seed, 1)}),
        processing_class=tokenizer(),
        callbacks=[callback],
    )  # fmt: skip
    trainer.remove_callback(transformers.PrinterCallback)
    fp4graph.prepare_optimizer(model, trainer.create_optimizer())  # fp4graph
    trainer.train()
    torch._dynamo.reset()  # a process makes several runs, and its caches keep every model alive
    folder.cleanup()
    lines = [entry for entry in trainer.state.log_history if "reward" in entry]
    tenth = max(1, len(lines) // 10)
    shares = trainer.taking.shares
    found = {
        "policy": policy, "seed": seed, "settings": settings_of(args, data),
        "seconds": time.perf_counter() - began, "cpu": time.process_time() - worked,
        "start": start, "held_out": callback.history[-1][1], "held_out_history": callback.history,
        "reward": statistics.fmean(entry["reward"] for entry in lines[-tenth:]),
        "reward_history": [entry["reward"] for entry in lines],
        "entropy_first": statistics.fmean(entry["entropy"] for entry in lines[:tenth]),
        "entropy": statistics.fmean(entry["entropy"] for entry in lines[-tenth:]),
        "entropy_history": [entry["entropy"] for entry in lines],
        "kl": statistics.fmean(trainer.kl), "log_ratio": max(trainer.log_ratios),
        "gradient_error": statistics.fmean(trainer.gradient_errors) if trainer.gradient_errors else None,
        **{f"dy_{name}": statistics.fmean(own[name] for own in shares) if shares else None for name in
           ("total", "scale_bias", "dead_zone", "grid_noise")},
    }  # fmt: skip
    whole = file.with_suffix(".tmp")
    whole.write_text(json.dumps(found))
    whole.replace(file)
    print(f"{policy}, seed {seed}: {start:.3f} to {found['held_out']:.3f} in {found['seconds']:.0f} s", file=sys.stderr)


def wanted(args):
    """Return (policy, seed, file) of every run, and the same of those to be made."""
    everything, missing, named = [], [], {}
    for policy in args.policies.split(","):
        settings, name = settings_of(args, policy_of(policy, args.steps)), Path(policy).stem
        if named.setdefault(name, policy) != policy:
            raise fp4graph.Error(f"policies {named[name]} and {policy} would share the files {name}-*.json; rename one")
        for seed in range(args.seeds):
            file = args.output / f"{name}-{seed}.json"
            everything.append((policy, seed, file))
            if not file.exists():
                missing.append((policy, seed, file))
            elif (found := json.loads(file.read_text())["settings"]) != settings:
                differs = sorted(name for name in settings if found.get(name) != settings[name])
                raise fp4graph.Error(
                    f"{file} holds a run with another {', '.join(differs) or 'set of options'}; give the same, or "
                    "another --output"
                )
    by_seed = itemgetter(1)
    return sorted(everything, key=by_seed), sorted(missing, key=by_seed)


def table(files):
    """Return a Markdown table: mean ± standard deviation of the seeds of each policy."""
    by_policy = defaultdict(list)
    for file in files:
        found = json.loads(file.read_text())
        by_policy[found["policy"]].append(found)
    lines = [
        "| policy | " + " | ".join(heading for _, heading, _, _ in COLUMNS) + " |",
        "| --- |" + " ---: |" * len(COLUMNS),
    ]
    for policy, runs in by_policy.items():
        cells = []
        for key, _, factor, form in COLUMNS:
            values = [factor * run[key] for run in runs if run[key] is not None]
            spread = f" ± {statistics.stdev(values):{form}}" if len(values) > 1 else ""
            cells.append(f"{statistics.fmean(values):{form}}{spread}" if values else "-")
        lines.append(f"| {policy} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def parse(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policies", default=",".join(POLICIES))
    parser.add_argument("--backend", default="eager", choices=["inductor", "aot_eager", "eager"])
    parser.add_argument("--output", type=Path, default=Path("runs/rl"))
    for name, default in {**NUMBERS, "positions": POSITIONS}.items():
        parser.add_argument(f"--{name}", type=type(default), default=default)
    return parser.parse_args(arguments)


def main(args):
    """Make the runs that are missing, and print the table."""
    check_length(make_model(0, max_position_embeddings=args.positions), countdown.PROMPT, args.completion)
    everything, missing = wanted(args)
    args.output.mkdir(parents=True, exist_ok=True)
    if args.jobs == 1 or len(missing) < 2:
        for policy, seed, file in missing:
            run(policy, seed, args, file)
    else:
        os.environ["OMP_NUM_THREADS"] = "1"
        with ProcessPoolExecutor(args.jobs, multiprocessing.get_context("spawn")) as pool:
            for done in [pool.submit(run, policy, seed, args, file) for policy, seed, file in missing]:
                done.result()
    print(table([file for _, _, file in everything]))


if __name__ == "__main__":
    try:
        main(parse())
    except fp4graph.Error as error:
        sys.exit(f"rl_grpo.py: {error}")
