"""How a row of matrix_rows.py is run and what it must come to; for test_matrix.py and run_matrix.py."""

from __future__ import annotations

import json
from pathlib import Path

from matrix_rows import BITS, LOSSES, MODELS, NONE, OUTPUT, RECIPES, TENSOR, Refusal, Row, references
from mcore_cases import MOCK, MODEL, SCRIPT, Case, assert_ended, numbers, same

import megatron_hybrid as mh

SEQUENCES = 8  # of a step, however they are divided
LEFT_OUT = ("--use-distributed-optimizer", "--untie-embeddings-and-output-weights")
COMMON = [flag for flag in MODEL if flag not in LEFT_OUT]
COMMON += ["--num-layers", "4", "--train-iters", "3"]
# no evaluation; a norm that is reported and never clips, as its last bits depend on how gradients are divided
COMMON += ["--eval-iters", "0", "--clip-grad", "1e6", *MOCK]
GROUPS = ["--group-query-attention", "--num-query-groups", "2"]
START = ["--load", "{folder}/base_%s", "--ckpt-step", "1", "--no-load-optim", "--no-load-rng", "--hq-switch-recipe"]
STEPS = (2, 3)
# Loss and gradient norm against one rank: sums of bf16 numbers in another order move a mean of 256 losses by less than
# bf16's rounding, 2^-9; quantized operands whose blocks or scales are a rank's own differ by up to their own rounding,
# 2^-4 an element, of which means of hundreds leave a sixteenth. A step later both have acted through one update.
BOUNDS = {True: (2.0**-9, 2.0**-5), False: (2.0**-8, 2.0**-4)}
# FP32 sums of the squares of 10^5 gradients, in another order
NORM = 2.0**-18


def vocabulary(tensor: str) -> list[str]:
    """The same padded vocabulary however many ranks divide it."""
    return ["--make-vocab-size-divisible-by", str(128 // TENSOR[tensor].ranks)]


def base_name(row: Row) -> str:
    return f"{row.model}_{row.output}"


def base(row: Row, *more: str) -> Case:
    """One step of the row's model on one rank, saved: every row goes on from there."""
    name = f"base_{base_name(row)}"
    flags = [*MODELS[row.model][1], *OUTPUT[row.output], *vocabulary(NONE), "--use-distributed-optimizer"]
    save = ["--save", f"{{folder}}/{name}", "--save-interval", "1", "--exit-interval", "1"]
    return Case(name, [SCRIPT, *COMMON, *GROUPS, *flags, *save, *more], 1)


def case(row: Row, *more: str) -> Case:
    sequences = SEQUENCES // (row.replicas * row.microbatches)
    flags = [*COMMON, *GROUPS, *row.flags, *vocabulary(row.tensor), "--micro-batch-size", str(sequences)]
    flags += [*(flag.replace("%s", base_name(row)) for flag in START), "--hq-recipe", f"{{folder}}/{row.recipe}.json"]
    flags += [*more, *["--use-distributed-optimizer"] * row.distributed_optimizer]
    # Megatron wants 1 for tensor and context parallelism on GPUs before Blackwell, and anything else for FSDP2
    environment = {"CUDA_DEVICE_MAX_CONNECTIONS": "8" if row.data.startswith("FSDP2") else "1"}
    metrics = ["--hq-metrics-file", f"{{folder}}/{row.name}.metrics"]
    return Case(row.name, [SCRIPT, *flags, *metrics], row.ranks, environment=environment)


def refused(refusal: Refusal) -> Case:
    name = "refused" + "".join(flag.replace("/", "_") for flag in refusal.flags)
    flags = [*OUTPUT["own"], "--hq-recipe", "mxfp8", *refusal.flags]
    return Case(name, [SCRIPT, *COMMON, *flags], refusal.ranks)


def all_cases(rows: list[Row], *more: str) -> list[Case]:
    """Of rows, what they are compared with, and what all begin from. more: flags of every run."""
    runs = [*references(rows), *rows]
    return [*{base_name(row): base(row, *more) for row in runs}.values(), *(case(row, *more) for row in runs)]


def write_recipes(folder: Path) -> None:
    for name, (_, shipped, changes) in RECIPES.items():
        fields = {**mh.Recipe.load(shipped).to_dict(), **changes, "name": name}
        (folder / f"{name}.json").write_text(json.dumps(fields))


def check(row: Row, runs, *, exact: tuple[str, ...] = (BITS, LOSSES)) -> None:
    """The row ran, and to its reference's numbers. runs: (folder, cases by name); exact: what is compared bit for bit."""
    reference, how = row.reference
    for name in (f"base_{base_name(row)}", reference.name, row.name):
        assert_ended(runs[1][name])
    found, expected = (numbers(runs, each.name) for each in (row, reference))
    assert tuple(sorted(found)) == STEPS
    if how == BITS and how in exact:
        same(found, expected)
        return
    loss, norm = BOUNDS[row.recipe == "bf16"]
    for iteration, factor in zip(STEPS, (1, 4)):
        bounds = (0.0, NORM) if how == LOSSES and how in exact else (factor * loss, factor * norm)
        for what, bound in zip(("loss", "grad_norm"), bounds):
            a, b = found[iteration][what], expected[iteration][what]
            assert abs(a - b) <= bound * abs(b), (what, iteration, a, b, how, row.other_sums)
