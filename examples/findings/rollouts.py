"""Draw how far a server's rollouts and the trainer are apart, and the reward, step by step.

    options="--server --seeds 1 --steps 200"
    python examples/rl_grpo.py $options --policies nvfp4-w4a16,nvfp4-w4a16-unshared --output runs/w4a16
    python examples/rl_grpo.py $options --policies nvfp4-rl,nvfp4-rl-unshared --output runs/w4a4
    python examples/findings/rollouts.py runs/w4a16 runs/w4a4          # [-o PICTURE]

The trainings take a quarter of an hour on one core. The script prints the divergences and the last training rewards of
docs/findings.md; the comparisons print the held-out ones.
"""

from __future__ import annotations

import json
from pathlib import Path
from statistics import fmean, median
from typing import Annotated

import typer

from fp4graph.lab.pictures.style import PALETTE, styled, subplots


def points(folder: Path) -> list[tuple[int, float, float]]:
    """Return the step, the divergence and the reward of each line of a run's log."""
    lines = map(json.loads, (folder / "log.jsonl").read_text("utf-8").splitlines())
    return [(line["step"], line["kl"], 1 - line["loss"]) for line in lines]


def main(
    folders: Annotated[list[Path], typer.Argument(help="Folders of comparisons.")],
    output: Annotated[Path, typer.Option("--output", "-o")] = Path("docs/images/rollouts.png"),
) -> None:
    runs = {
        run.parent.name[:-2]: points(run.parent) for folder in folders for run in sorted(folder.glob("*-0/log.jsonl"))
    }
    print(f"{'policy':24} median kl  largest kl  reward of the last twentieth")
    for name, run in runs.items():
        _, divergences, rewards = zip(*run, strict=True)
        end = fmean(rewards[-len(run) // 20 :])
        print(f"{name:24} {median(divergences):9.1e}  {max(divergences):10.1e}  {end:.3f}")
    with styled():
        picture, (left, right) = subplots(3.4, 1, 2)
        for (name, run), color in zip(runs.items(), PALETTE, strict=False):
            steps, divergences, rewards = zip(*run, strict=True)
            left.plot(steps, divergences, color=color, linewidth=1, label=name)
            width = 10
            means = [fmean(rewards[max(0, place - width) : place + 1]) for place in range(len(rewards))]
            right.plot(steps, means, color=color, linewidth=1.4)
        left.set_yscale("log")
        left.set_ylabel("KL, nats per token")
        right.set_ylabel("reward, mean of ten steps")
        for axes in (left, right):
            axes.set_xlabel("step")
        picture.legend(loc="outside lower center", ncols=3)
        picture.savefig(output)
    print(f"picture: {output}")


if __name__ == "__main__":
    typer.run(main)
