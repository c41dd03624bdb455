"""verl's fused forward of Megatron models on this package: vocabulary and sequence spread over two gloo ranks."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("verl")
pytest.importorskip("megatron.core", reason="needs megatron-core: pip install --no-deps megatron-core")

TOKENS, HIDDEN, VOCAB, TEMPERATURE = 8, 16, 64, 0.7
TOLERANCE = 1e-5  # float32


def run(rank: int, world: int, store: str) -> None:
    """verl's output processor, which hands over Megatron's hidden states and shard, against Megatron's own loss."""
    # Megatron puts what it gathers on the current CUDA device
    torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment, return-value]
    dist.init_process_group("gloo", f"file://{store}", rank=rank, world_size=world)

    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import ColumnParallelLinear, vocab_parallel_cross_entropy
    from megatron.core.transformer.transformer_config import TransformerConfig

    parallel_state.initialize_model_parallel(tensor_model_parallel_size=world)
    from verl.models.mcore import model_forward_fused

    from rlkernels.integrations import verl

    verl.patch_fused_forward()
    config = TransformerConfig(
        num_layers=1,
        hidden_size=HIDDEN,
        num_attention_heads=2,
        use_cpu_initialization=True,
        tensor_model_parallel_size=world,
        sequence_parallel=world > 1,
    )
    head = ColumnParallelLinear(HIDDEN, VOCAB, config=config, init_method=torch.nn.init.normal_, bias=False)
    generator = torch.Generator().manual_seed(1)
    labels = torch.randint(VOCAB, (1, TOKENS), generator=generator)
    hidden = torch.randn(TOKENS, 1, HIDDEN, generator=generator).chunk(world)[rank].clone().requires_grad_()
    upstream = torch.randn(TOKENS, generator=generator)

    output = model_forward_fused.fused_output_processor(
        hidden_states=hidden,
        output_layer=head,
        output_weight=None,
        labels=labels,
        context=model_forward_fused.FusedOutputProcessorContext(temperature=TEMPERATURE),
        config=config,
    )
    inputs = (hidden, head.weight)
    gradients = torch.autograd.grad((output.log_probs * upstream).sum(), inputs)

    logits, _ = head(hidden)
    logp = -vocab_parallel_cross_entropy(logits / TEMPERATURE, labels.T.contiguous()).flatten()
    torch.testing.assert_close(output.log_probs, logp, atol=TOLERANCE, rtol=TOLERANCE)
    for mine, megatrons in zip(gradients, torch.autograd.grad((logp * upstream).sum(), inputs), strict=True):
        torch.testing.assert_close(mine, megatrons, atol=TOLERANCE, rtol=TOLERANCE)
    assert output.entropy.shape == (TOKENS,)


@pytest.mark.parametrize("world", [1, 2])
def test_vocabulary_of_megatron(world: int, tmp_path: Path) -> None:
    command = [sys.executable, __file__, str(tmp_path / "store"), str(world)]
    ranks = [
        subprocess.Popen([*command, str(rank)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for rank in range(world)
    ]
    said = [process.communicate(timeout=300)[0] for process in ranks]
    assert [process.returncode for process in ranks] == [0] * world, "\n".join(said)


if __name__ == "__main__":
    run(int(sys.argv[3]), int(sys.argv[2]), sys.argv[1])
