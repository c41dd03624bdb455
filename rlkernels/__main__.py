"""`python -m rlkernels demo | bench | doctor`: arguments only; the work is in `rlkernels.cli`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from rlkernels.recipes import RECIPES


def main(arguments: list[str] | None = None) -> int:
    """Runs one command; returns the exit code: 0 done, 1 failed, 2 bad arguments, 130 interrupted."""
    options = _parser().parse_args(arguments)
    try:
        return options.run(options)
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return 130
    except (ValueError, RuntimeError, OSError) as error:
        print(f"rlkernels {options.command}: {error}", file=sys.stderr)
        return 1


# Each command imports its own module: doctor must work where the others' dependencies are broken.


def _demo(options: argparse.Namespace) -> int:
    from rlkernels.cli import demo

    return demo.run(options.objective, options.steps, options.seed, options.device, not options.skip_table)


def _bench(options: argparse.Namespace) -> int:
    from rlkernels.cli import bench

    return bench.run(options.select, options.out, options.quick)


def _doctor(options: argparse.Namespace) -> int:
    from rlkernels.cli import doctor

    if options.batch:
        return doctor.diagnose(options.batch)
    return doctor.explain(*options.explain) if options.explain else doctor.run()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m rlkernels",
        description="Fused kernels for the losses of reinforcement-learning post-training.",
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="demo | bench | doctor")

    demo = commands.add_parser(
        "demo",
        help="train a small transformer through policy_loss, then compare the loss with PyTorch's",
        description="Trains a small causal transformer to sort digits, from random weights and rewards alone, "
        "then measures the fused loss beside naive PyTorch and torch.compile at a vocabulary of 151,936. "
        "At most two minutes on two cores; downloads nothing.",
    )
    demo.add_argument(
        "--objective",
        choices=sorted(RECIPES),
        default="grpo",
        metavar="NAME",
        help=f"recipe that trains: {', '.join(RECIPES)} (default: %(default)s)",
    )
    demo.add_argument("--steps", type=_positive, default=160, metavar="N", help="training steps (default: %(default)s)")
    demo.add_argument(
        "--seed", type=int, default=0, metavar="N", help="of weights, prompts and samples (default: %(default)s)"
    )
    demo.add_argument("--device", default="cpu", help="a torch device, such as cuda (default: %(default)s)")
    demo.add_argument("--skip-table", action="store_true", help="train only; measure nothing")
    demo.set_defaults(run=_demo)

    bench = commands.add_parser(
        "bench",
        help="run the microbenchmarks of bench/",
        description="Runs the microbenchmarks of a source checkout's bench/ with pytest-benchmark and writes "
        "results.json, results.md and, where matplotlib is installed, results.png of the comparisons and scaling.png "
        "of what was measured as tokens grow.",
    )
    bench.add_argument("--select", metavar="KEYWORD", help="only benchmarks whose name matches (pytest -k)")
    bench.add_argument(
        "--out", type=Path, metavar="DIR", help="where the results go (default: bench/results of the checkout)"
    )
    bench.add_argument(
        "--quick", action="store_true", help="small shapes: checks that everything runs; the figures mean nothing"
    )
    bench.set_defaults(run=_bench)

    doctor = commands.add_parser(
        "doctor",
        help="print every backend, and why one is unavailable",
        description="Prints versions, machine, and every backend with the reason where one is unavailable. "
        "Paste it into bug reports.",
    )
    doctor.add_argument(
        "--explain",
        nargs=3,
        type=_positive,
        metavar=("N", "V", "H"),
        help="print how linear_policy_loss cuts up N tokens, vocabulary V and hidden size H (bfloat16)",
    )
    doctor.add_argument(
        "--batch",
        type=Path,
        metavar="FILE",
        help="a batch saved by rlkernels.testing.save_call: print which token, quantity and input is the first that is "
        "not finite, and how far each backend is from float64",
    )
    doctor.set_defaults(run=_doctor)
    return parser


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected an integer >= 1, got {text!r}")
    return int(text)


if __name__ == "__main__":
    sys.exit(main())
