"""GRPO under policies, with TRL: a small LLaMA learns to solve countdown puzzles. fp4graph's lines end in "# fp4graph".

    python examples/rl_grpo.py                                  # six policies, three seeds, a table
    python examples/rl_grpo.py --policies mxfp4-rl --seeds 1 --steps 50
    python examples/rl_grpo.py --server --policies nvfp4-w4a16,nvfp4-w4a16-unshared --seeds 1 --steps 200

With ``--server`` another model generates, as a server does: before every step it gets the packed weights that changed,
and reads them as vLLM does, in fused matrices. Each step logs kl, the divergence of the trainer from it. A policy's
name with ``-unshared`` gives every weight a tensor scale of its own, but servers read one for a fused matrix.

Puzzles, model, supervised start, rollouts and held-out rewards are those of the task ``countdown`` (docs/tasks.md);
TRL's GRPOTrainer trains the model here. ``--policies`` takes shipped policies, files, and the names of three techniques
of mxfp4-rl, each used alone. The noise falls in ten stages over the run. After a stop, the same command resumes.
"""

import argparse
import copy
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
from fp4graph.exports.readers import fuse
from fp4graph.lab.runs.run import Run
from fp4graph.lab.tasks import countdown

PARTS = ("macro_block_scaling", "outlier_fallback", "adaptive_quantization_noise")
UNSHARED = "-unshared"
#: The policies that ``--server`` takes. Under the last one, the server quantizes activations too.
SERVED = ("bf16", "nvfp4-w4a16", "nvfp4-rl")
#: The configuration of a checkpoint of NVFP4 weights in ModelOpt's layout.
CONFIG = {"quantization_config": {"quant_method": "modelopt", "quant_algo": "W4A16_NVFP4"}}


def policy_of(name, steps):
    """Return a policy as data, with the noise of mxfp4-rl in stages over ``steps``."""
    shipped = "mxfp4-rl" if name in PARTS else name.removesuffix(UNSHARED)
    data = yaml.safe_load(fp4graph.load_policy(shipped).to_yaml())
    entries = [entry if isinstance(entry, dict) else {entry: {}} for entry in data.get("techniques", ())]
    data["techniques"] = [entry for entry in entries if name not in PARTS or name in entry]
    for entry in data["techniques"]:
        if name.endswith(UNSHARED):
            entry.get("tensor_scaling", {}).pop("share", None)
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


class Rollouts:
    """Generates a step's completions in evaluation mode, in the form of TRL's ``rollout_func``."""

    def __init__(self, server=None):
        self.server, self.divergence = server, {}

    def __call__(self, prompts, trainer):
        model, ids = trainer.accelerator.unwrap_model(trainer.model), countdown.encode(prompts)
        gumbel = -torch.empty(len(ids), countdown.COMPLETION, countdown.VOCABULARY).exponential_().log()
        tokens, logits = countdown.rollout(self.server.refitted(model) if self.server else model, ids, gumbel)
        if self.server:
            self.divergence = {"kl": divergence(model, ids, tokens, logits)}
        logs = logits.log_softmax(-1).gather(-1, tokens[:, : logits.shape[1], None])[..., 0]
        lengths = countdown.before_end(tokens).sum(1).int().tolist()
        cut = [[row[:length].tolist() for row, length in zip(side, lengths, strict=True)] for side in (tokens, logs)]
        return {"prompt_ids": ids.tolist(), "completion_ids": cut[0], "logprobs": cut[1]}


@torch.no_grad()
def divergence(model, prompts, tokens, logits):
    """Return KL(rollout ‖ trainer), the mean over the tokens of the rollout, in nats."""
    training, longest = model.training, logits.shape[1]
    ids = torch.cat([prompts, tokens[:, :longest]], 1)
    ours = model.eval()(input_ids=ids, use_cache=False).logits[:, prompts.shape[1] - 1 : -1]
    model.train(training)
    theirs, ours = (each.double().log_softmax(-1) for each in (logits, ours))
    mask = countdown.before_end(tokens)[:, :longest]
    return (((theirs.exp() * (theirs - ours)).sum(-1) * mask).sum() / mask.sum()).item()


def by_rows(x):
    """Return activations ``[..., K]`` as nvfp4-rl quantizes them: NVFP4, a scale of each token, four over six."""
    gamma = x.abs().amax(-1, keepdim=True)[..., None] / (6 * 256)
    blocks = x.unflatten(-1, (-1, 16)) / gamma.where(gamma > 0, 1.0)
    rounded = []
    for largest in (6, 4):
        scales = (blocks.abs().amax(-1, keepdim=True) / largest).to(torch.float8_e4m3fn).float()
        elements = (blocks / scales.where(scales > 0, torch.inf)).clamp(-6, 6)
        spacing = torch.where(elements.abs() < 2, 0.5, torch.where(elements.abs() < 4, 1.0, 2.0))
        rounded.append((elements / spacing).round() * spacing * scales)
    six, four = ((each - blocks).abs().sum(-1, keepdim=True) for each in rounded)
    return (torch.where(four < six, *reversed(rounded)) * gamma).flatten(-2)


class Server:
    """A generator that does not run the policy: a plain model with the weights that vLLM makes of the packed ones."""

    def __init__(self, model, policy):
        self.model, self.sent, self.checkpoint = copy.deepcopy(model), {}, {}
        self.quantizes_inputs = policy.name.removesuffix(UNSHARED) == SERVED[-1]

    def refitted(self, trainer):
        """Return the model with the weights of ``trainer``."""
        for matrix in fp4graph.packed_weights(trainer, sent=self.sent, sibling_scales="own"):
            if self.quantizes_inputs and matrix.name not in self.sent:
                module = self.model.get_submodule(matrix.name)
                module.register_forward_pre_hook(lambda module, args: tuple(map(by_rows, args)))
            parts = {"weight": matrix.codes, "weight_scale": matrix.scales, "weight_scale_2": matrix.global_scale}
            self.checkpoint |= {f"{matrix.name}.{part}": tensor for part, tensor in parts.items()}
        kept = {name: x for name, x in fp4graph.strip(trainer.state_dict()).items() if name not in self.checkpoint}
        self.model.load_state_dict(kept, strict=False)
        for layer in fuse(self.checkpoint, CONFIG, "vllm").values():
            for module, weight in zip(layer.modules, torch.tensor(layer.dequantized()).split(layer.rows), strict=True):
                self.model.get_submodule(module).weight.data.copy_(weight)
        return self.model


@torch.no_grad()
def held_out(problem, model):
    """Return the mean loss (the share without reward), reward and entropy on held-out puzzles."""
    measured = [problem.measure(model.eval(), batch) for batch in problem.validation()]
    return {name: torch.cat([part[name] for part in measured]).mean().item() for name in measured[0]}


class Logging(TrainerCallback):
    def __init__(self, log, rollouts):
        self.log, self.rollouts = log, rollouts

    def on_log(self, args, state, control, logs, **_):
        if "reward" in logs:
            self.log(state.global_step, 1 - logs["reward"], **self.rollouts.divergence)


def train(policy, seed, log, steps, prompts, start, server=False):
    torch.set_num_threads(1)  # the number of threads changes the rounding of sums
    settings = countdown.COUNTDOWN.settings(Run("countdown", seed=seed, device="cpu"))
    problem = countdown.Countdown(settings, warm_up=start)
    rollouts = Rollouts(Server(problem.model, fp4graph.load_policy(policy)) if server else None)
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
        options = {"rollout_func": rollouts, "processing_class": tokenizer(), "callbacks": [Logging(log, rollouts)]}
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
    parser.add_argument("--server", action="store_true", help="another model generates, from packed weights")
    args = parser.parse_args()
    try:
        for name in args.policies.split(",") if args.server else ():
            if name.removesuffix(UNSHARED) not in SERVED:
                raise fp4graph.Error(f"--server serves {', '.join(SERVED)}, each also with {UNSHARED}; got {name!r}")
        policies = [policy_of(name, args.steps) for name in args.policies.split(",")]
        training = partial(train, steps=args.steps, prompts=args.prompts, start=args.start, server=args.server)
        options = {"seeds": args.seeds, "processes": args.jobs, "timing": False, "statistics": 0}
        print(fp4graph.compare(training, policies, folder=args.output, **options))  # fp4graph
    except fp4graph.Error as error:
        sys.exit(f"rl_grpo.py: {error}")
