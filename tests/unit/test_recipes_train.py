"""Every shipped recipe trains a small language model on real text, and resumes bitwise (issue 3; cases 63, 64, 68, 82)."""

import inspect
import io
import math
import textwrap
from collections import Counter

import pytest
import torch
import torch.nn.functional as F

import megatron_hybrid as mh
from megatron_hybrid.explain import plans_of
from megatron_hybrid import HybridSelfAttention
from megatron_hybrid.modules.norm import Norm

HIDDEN, FFN, LAYERS, VOCAB = 64, 64, 3, 128
BATCH, SEQUENCE, STEPS, RESUME_AT = 3, 24, 50, 25
TEXT = torch.tensor(list(inspect.getsource(textwrap).encode("ascii", "replace")))  # a module of the standard library


class Experts(torch.nn.Module):
    """Two experts over one grouped linear each way; a token goes to the expert of its parity."""

    def __init__(self, **made):
        super().__init__()
        name = made.pop("name")
        self.fc1 = mh.HybridGroupedLinear(2, HIDDEN, FFN, name=f"{name}.experts.linear_fc1", **made)
        self.fc2 = mh.HybridGroupedLinear(2, FFN, HIDDEN, name=f"{name}.experts.linear_fc2", **made)

    def forward(self, x, tokens):
        expert = tokens.flatten() % 2
        order = torch.argsort(expert, stable=True)
        splits = [int((expert == e).sum()) for e in range(2)]
        y = self.fc2(F.gelu(self.fc1(x.flatten(0, 1)[order], splits)), splits)
        return torch.empty_like(y).index_copy(0, order, y).view_as(x)


class Layer(torch.nn.Module):
    """The first and the last layer are an MLP; the one between, attention and experts."""

    def __init__(self, number: int, recipe):
        super().__init__()
        made = dict(recipe=recipe, layer=number, num_layers=LAYERS)
        name, norm = f"layers.{number - 1}", dict(normalization="RMSNorm")
        self.has_experts = number == 2
        self.norm = Norm(HIDDEN, **norm)
        if self.has_experts:
            self.attention_norm = Norm(HIDDEN, **norm)
            self.attention = HybridSelfAttention(HIDDEN, 4, name=f"{name}.attention", **made)
            self.mlp = Experts(name=f"{name}.mlp", **made)
        else:
            self.mlp = mh.HybridMLP(HIDDEN, FFN, name=f"{name}.mlp", **made)

    def forward(self, x, tokens):
        if not self.has_experts:
            return x + self.mlp(self.norm(x))
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.norm(x), tokens)


class LanguageModel(torch.nn.Module):
    def __init__(self, recipe):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = torch.nn.Embedding(VOCAB, HIDDEN)
        self.layers = torch.nn.ModuleList(Layer(i + 1, recipe) for i in range(LAYERS))
        self.norm = Norm(HIDDEN, normalization="RMSNorm")
        self.head = torch.nn.Linear(HIDDEN, VOCAB, bias=False)

    def forward(self, tokens):
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x, tokens)
        return self.head(self.norm(x))


class Training:
    """A model, its optimizer and controller; `run` makes steps and returns their losses."""

    def __init__(self, recipe):
        self.model = LanguageModel("bf16")
        self.controller = mh.prepare(self.model, recipe, seed=11)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=4e-3)

    def run(self, first: int, last: int) -> list[float]:
        losses = []
        for step in range(first, last + 1):
            self.controller.begin_step(step)
            starts = torch.randint(len(TEXT) - SEQUENCE - 1, (BATCH,), generator=torch.Generator().manual_seed(step))
            rows = torch.stack([TEXT[s : s + SEQUENCE + 1] for s in starts])
            logits = self.model(rows[:, :-1])
            loss = F.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.controller.end_step()
            losses.append(loss.item())
        return losses

    def save(self) -> bytes:
        buffer = io.BytesIO()
        torch.save({"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}, buffer)
        return buffer.getvalue()

    def load(self, saved: bytes) -> None:
        state = torch.load(io.BytesIO(saved), weights_only=True)
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])


def shipped(name: str) -> mh.Recipe:
    """A shipped recipe; one that changes late changes inside this run, at the first step after the resume."""
    recipe = mh.Recipe.load(name)
    if not recipe.change_steps():
        return recipe
    data = recipe.to_dict()
    for rule in data["rules"]:
        if "steps" in rule["match"]:
            rule["match"]["steps"] = f"{RESUME_AT + 1}:"
    return mh.Recipe.from_dict(data)


@pytest.mark.parametrize("name", [name for name, _ in mh.list_recipes()])
def test_c63_c64_c68_it_trains_and_resumes_bitwise(name):
    whole = Training(shipped(name))
    losses = whole.run(1, RESUME_AT)
    saved = whole.save()
    losses += whole.run(RESUME_AT + 1, STEPS)
    assert all(map(math.isfinite, losses))
    assert sum(losses[-5:]) < 0.75 * sum(losses[:5])

    resumed = Training(shipped(name))
    resumed.load(saved)
    assert resumed.run(RESUME_AT + 1, STEPS) == losses[RESUME_AT:]
    ends = zip(whole.model.state_dict().values(), resumed.model.state_dict().values(), strict=True)
    assert all(torch.equal(a, b) for a, b in ends)

    ran = sum((plan.counts() for _, plan in plans_of(resumed.model)), start=Counter())
    assert (ran["emulated"] > 0) == (name != "bf16")  # case 82: nothing fell back silently


def test_c67_a_change_of_recipe_through_a_resume_goes_on_from_the_same_weights():
    first = Training("fp8_delayed")
    first.run(1, 3)
    shorter, grad = "fp8_delayed_e4m3:history=4", "fp8_delayed_e5m2:history=4"
    slots = {"fprop": shorter, "dgrad": {"grad_output": grad, "weight": shorter}, "wgrad": "mxfp8_e4m3"}
    for recipe in ("bf16", mh.Recipe.from_dict({"version": 1, "defaults": slots})):
        other = Training(recipe)
        weights = {k: v for k, v in first.model.state_dict().items() if ".hq." not in k}
        missing, unexpected = other.model.load_state_dict(weights, strict=False)
        assert not unexpected and all(".hq." in k for k in missing)  # histories of another length start anew
        assert all(map(math.isfinite, other.run(4, 6)))
