"""Fine-tune a quantized model by LoRA: ordinary PyTorch and PEFT. fp4graph's lines end in "# fp4graph".

    python examples/finetune_lora.py                                   # from Python's source to Python's manual
    python examples/finetune_lora.py --policy tetrajet --rank 16 --output adapter
    python examples/finetune_lora.py --policy nvfp4-te --pack          # stores the frozen weights as FP4 bytes

A small LLaMA learns the bytes of Python's standard library in high precision. Then it is frozen and quantized under
the policy, and adapters in high precision learn the bytes of Python's manual: W·x + (α/r)·B·A·x (Hu et al. 2021), as
in QLoRA (Dettmers et al. 2023). The adapters are saved, loaded next to the frozen model, and merged into its weights.
`--policy bf16` runs the same training in high precision.
"""

import argparse
import copy
import math
import sys
import sysconfig
import tempfile
from pathlib import Path
from pydoc_data.topics import topics

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

import fp4graph  # fp4graph

SMALL = {"vocab_size": 256, "hidden_size": 128, "intermediate_size": 352, "num_attention_heads": 4}
CONTEXT = 64


def bytes_of(text):
    """Return the bytes of ``text`` for training and for validation (the last tenth)."""
    tokens = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    return tokens.split([len(tokens) - len(tokens) // 10, len(tokens) // 10])


def source():
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    return bytes_of(b"\n".join(file.read_bytes() for file in files))


def manual():
    return bytes_of("\n".join(topics[name] for name in sorted(topics)).encode())


def batch(tokens, size, seed):
    """Return ``[size, CONTEXT]`` tokens from random places; equal seeds give equal tokens."""
    places = torch.randint(len(tokens) - CONTEXT, (size, 1), generator=torch.Generator().manual_seed(seed))
    return tokens[places + torch.arange(CONTEXT)].long()


def train(model, optimizer, tokens, steps, size, seed):
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: (1 + math.cos(math.pi * step / steps)) / 2)
    model.train()
    for step in range(steps):
        rows = batch(tokens, size, seed * steps + step)
        model(input_ids=rows, labels=rows, use_cache=False).loss.backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()


@torch.no_grad()
def loss_on(model, tokens, batches):
    """Return the mean loss over ``batches`` of validation data, in nats per byte."""
    model.eval()
    rows = [batch(tokens, 16, number) for number in range(batches)]
    return sum(model(input_ids=part, labels=part, use_cache=False).loss.item() for part in rows) / batches


def untrained(args):
    torch.manual_seed(args.seed)
    return LlamaForCausalLM(LlamaConfig(num_hidden_layers=args.layers, **SMALL))


def pretrained(args):
    """Return a model trained on Python's source in high precision."""
    model = untrained(args)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    train(model, optimizer, source()[0], args.base_steps, args.batch_size, args.seed)
    return model


def adapted(base, args):
    """Return the frozen ``base`` with untrained adapters on its linear layers, except the head."""
    torch.manual_seed(args.seed)
    config = LoraConfig(r=args.rank, lora_alpha=2 * args.rank, target_modules="all-linear", task_type="CAUSAL_LM")
    return get_peft_model(base, config)


def options_of(args):
    return {"backend": args.backend, "seed": args.seed, "total_forwards": args.steps}


def quantized(base, args, policy):
    """Return :func:`adapted` under a policy; with ``--pack``, store its frozen weights as FP4 bytes."""
    model, rows = adapted(base, args), torch.zeros(1, CONTEXT, dtype=torch.long)
    call = {"input_ids": rows, "labels": rows, "use_cache": False}  # lets apply() raise every error of the policy
    fp4graph.apply(model.get_base_model(), policy, example_inputs=call, **options_of(args))  # fp4graph
    if args.pack:
        fp4graph.pack_frozen(model.get_base_model())  # fp4graph
    return model


def main(args):
    learning, held_out = manual()

    def report(what, model):
        print(f"{what:40}{loss_on(model, held_out, args.validation_batches):8.4f}", flush=True)

    policy, options = fp4graph.load_policy(args.policy), options_of(args)  # fp4graph
    quantized(untrained(args), args, policy)  # raises now if the policy cannot be applied or packed
    base = pretrained(args)
    report("pre-trained", base)
    model = quantized(copy.deepcopy(base), args, policy)
    report("pre-trained, quantized", model)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=args.lr)
    optimizer = fp4graph.prepare_optimizer(model.get_base_model(), optimizer)  # fp4graph
    train(model, optimizer, learning, args.steps, args.batch_size, args.seed + 1)
    report("adapted", model)

    with tempfile.TemporaryDirectory() as temporary:
        folder = args.output or temporary
        model.save_pretrained(folder)  # only the adapters, without keys of fp4graph
        loaded = PeftModel.from_pretrained(base, folder)
    fp4graph.apply(loaded.get_base_model(), policy, **options)  # fp4graph
    report("loaded beside the quantized model", loaded)
    fp4graph.remove(loaded.get_base_model())  # fp4graph
    merged = loaded.merge_and_unload()
    report("merged, in high precision", merged)
    merged = fp4graph.apply(merged, policy, **options)  # fp4graph
    report("merged, then quantized", merged)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policy", default="nvfp4", help="a shipped policy's name, or a policy file")
    parser.add_argument("--backend", default="inductor", choices=["inductor", "aot_eager", "eager"])
    parser.add_argument("--pack", action="store_true", help="store the frozen weights as FP4 bytes: nvfp4-te, tetrajet")
    parser.add_argument("--output", type=Path, help="folder for the adapters [a temporary one]")
    numbers = {"base-steps": 400, "steps": 200, "batch-size": 16, "lr": 2e-3, "rank": 8, "layers": 4, "seed": 0}
    for name, default in {**numbers, "validation-batches": 8}.items():
        parser.add_argument(f"--{name}", type=type(default), default=default)
    try:
        main(parser.parse_args())
    except fp4graph.Error as error:
        sys.exit(f"finetune_lora.py: {error}")
