"""Losses beside bf16 (cases 60, 78): sixteen layers of experts, and a fine-tuning, recipe by recipe.

The models are the ones of test_recipes_train. `pytest -s` prints the tables.
"""

import functools
import io

import pytest
import torch
import torch.nn.functional as F
from test_recipes_train import BATCH, HIDDEN, SEQUENCE, TEXT, VOCAB, Experts, Training
from torch.utils.checkpoint import checkpoint

import megatron_hybrid as mh
from megatron_hybrid.modules.norm import Norm

RECIPES = ["fp8_delayed", "fp8_current", "fp8_block", "mxfp8", "nvfp4", "mxfp8_fprop_nvfp4_bwd", "nvfp4_rowscaled_fprop_mxfp8_bwd"]
DEPTH, STEPS = 16, 8


class DeepExperts(torch.nn.Module):
    """Sixteen residual layers of two experts each, recomputed in backward or not."""

    def __init__(self, recomputed: bool):
        super().__init__()
        torch.manual_seed(0)
        self.recomputed = recomputed
        self.embedding = torch.nn.Embedding(VOCAB, HIDDEN)
        made = dict(recipe="bf16", num_layers=DEPTH)
        self.layers = torch.nn.ModuleList(Experts(name=f"layers.{i}.mlp", layer=i + 1, **made) for i in range(DEPTH))
        self.norms = torch.nn.ModuleList(Norm(HIDDEN, normalization="RMSNorm") for _ in range(DEPTH + 1))
        self.head = torch.nn.Linear(HIDDEN, VOCAB, bias=False)

    def forward(self, tokens):
        x = self.embedding(tokens)
        for norm, layer in zip(self.norms, self.layers):
            step = lambda x, norm=norm, layer=layer: x + layer(norm(x), tokens)  # noqa: E731
            x = checkpoint(step, x, use_reentrant=False) if self.recomputed else step(x)
        return self.head(self.norms[-1](x))


def batch(step):
    starts = torch.randint(len(TEXT) - SEQUENCE - 1, (BATCH,), generator=torch.Generator().manual_seed(step))
    return torch.stack([TEXT[s : s + SEQUENCE + 1] for s in starts])


@functools.cache
def losses(recipe: str, recomputed: bool) -> tuple[float, ...]:
    model = DeepExperts(recomputed)
    controller, optimizer = mh.prepare(model, recipe, seed=5), torch.optim.AdamW(model.parameters(), lr=2e-3)
    seen = []
    for step in range(1, STEPS + 1):
        controller.begin_step(step)
        rows = batch(step)
        loss = F.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        controller.end_step()
        seen.append(loss.item())
    return tuple(seen)


@pytest.mark.parametrize("recipe", RECIPES)
def test_c60_experts_in_sixteen_layers_recompute_bitwise_and_stay_by_bf16(recipe):
    plain, bf16 = losses(recipe, False), losses("bf16", False)
    assert losses(recipe, True) == plain
    gap = sum(plain[-3:]) / sum(bf16[-3:]) - 1
    print(f"\n{recipe:36} {sum(plain[-3:]) / 3:.4f} {gap:+.2%}")
    assert bf16[-1] < 0.9 * bf16[0] and abs(gap) < 0.02


@functools.cache
def pretrained() -> bytes:
    training = Training("bf16")
    training.run(1, 30)
    return training.save()


@pytest.mark.parametrize("recipe", RECIPES)
def test_c78_fine_tuning_from_a_bf16_checkpoint_stays_by_bf16(recipe):
    """Twenty steps on other text than the checkpoint saw, from the same weights and optimizer states."""
    ends = []
    for name in ("bf16", recipe):
        training = Training(name)
        saved = torch.load(io.BytesIO(pretrained()), weights_only=True)
        training.model.load_state_dict(saved["model"], strict=False)
        training.optimizer.load_state_dict(saved["optimizer"])
        seen = training.run(1001, 1020)
        ends.append(sum(seen[-5:]) / 5)
        assert ends[-1] < sum(seen[:5]) / 5
    print(f"\n{recipe:36} {ends[1]:.4f} {ends[1] / ends[0] - 1:+.2%}")
    assert abs(ends[1] / ends[0] - 1) < 0.02
