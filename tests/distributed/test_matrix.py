"""Every row of matrix_rows.py through pretrain(), two steps from one checkpoint, in one launch of four CPU ranks."""

from __future__ import annotations

import json

import pytest
from launch import script_module
from matrix_rows import LAYOUTS, MODELS, NONE, RECIPES, RECOMPUTE, REFUSED, ROWS, Refusal, Row, pairs_met, references
from mcore_cases import MOCK, MODEL, SCRIPT, Case, assert_ended, numbers, run_cases, same

import megatron_hybrid as mh

pytestmark = pytest.mark.dist
LEFT_OUT = ("--use-distributed-optimizer", "--untie-embeddings-and-output-weights")
COMMON = [flag for flag in MODEL if flag not in LEFT_OUT]
COMMON += ["--num-layers", "4", "--train-iters", "3", "--group-query-attention", "--num-query-groups", "2"]
START = ["--load", "{folder}/base_%s", "--ckpt-step", "1", "--no-load-optim", "--no-load-rng", "--hq-switch-recipe"]
# Loss and gradient norm against one rank: sums of bf16 numbers in another order move a mean of 256 losses by less than
# bf16's rounding, 2^-9; quantized operands whose blocks or scales are a rank's own differ by up to their own rounding,
# 2^-4 an element, of which means of hundreds leave a sixteenth. A step later both have acted through one update.
CLOSE = {True: (2.0**-9, 2.0**-5), False: (2.0**-8, 2.0**-4)}


def case(row: Row) -> Case:
    layout, (_, model) = LAYOUTS[row.layout], MODELS[row.model]
    tensor = 2 if "--tensor-model-parallel-size" in layout.flags else 1
    flags = [*COMMON, *model, *layout.flags, *RECOMPUTE[row.recompute], *(flag.replace("%s", row.model) for flag in START)]
    flags += ["--use-distributed-optimizer"] if layout.optimizer else []
    flags += ["--make-vocab-size-divisible-by", str(128 // tensor), "--hq-recipe", f"{{folder}}/{row.recipe}.json"]
    return Case(row.name, [SCRIPT, *flags, *MOCK, "--hq-metrics-file", f"{{folder}}/{row.name}.metrics"], layout.ranks)


def base(model: str) -> Case:
    flags = [*COMMON, *MODELS[model][1], "--make-vocab-size-divisible-by", "128", "--save", f"{{folder}}/base_{model}"]
    return Case(f"base_{model}", [SCRIPT, *flags, *MOCK, "--save-interval", "1", "--exit-interval", "1"], 1)


def refused(refusal: Refusal) -> Case:
    name = "refused" + "".join(flag.replace("/", "_") for flag in refusal.flags)
    return Case(name, [SCRIPT, *COMMON, *MODELS["dense"][1], *MOCK, "--hq-recipe", "mxfp8", *refusal.flags], refusal.ranks)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("matrix")
    for name, (_, shipped, changes) in RECIPES.items():
        fields = {**mh.Recipe.load(shipped).to_dict(), **changes, "name": name}
        (folder / f"{name}.json").write_text(json.dumps(fields))
    cases = [*map(base, MODELS), *map(case, references()), *map(case, ROWS), *map(refused, REFUSED)]
    return folder, run_cases(cases, folder, ranks=4, timeout=1200)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_row(row, runs):
    for name in (f"base_{row.model}", row.reference.name, row.name):
        assert_ended(runs[1][name])
    found, expected = (numbers(runs, name) for name in (row.name, row.reference.name))
    assert sorted(found) == [2, 3]
    if row.is_exact:
        same(found, expected)
        return
    loss, norm = CLOSE[row.recipe == "bf16"]
    for iteration, factor in ((2, 1), (3, 4)):
        assert found[iteration]["loss"] == pytest.approx(expected[iteration]["loss"], rel=factor * loss)
        assert found[iteration]["grad_norm"] == pytest.approx(expected[iteration]["grad_norm"], rel=factor * norm)


@pytest.mark.parametrize("refusal", REFUSED, ids=lambda refusal: refusal.flags[0])
def test_refusal(refusal, runs):
    done = runs[1][refused(refusal).name]
    assert len(done.exit) == refusal.ranks and all(done.exit) and refusal.message in done.output[0]
    assert "Traceback" not in done.output[0]


def test_pairs_are_met():
    """Every layout with two recipes or more, every recipe in two layouts, every recomputation in some row."""
    met = pairs_met()
    for layout in LAYOUTS.keys() - {"one"}:
        assert len({recipe for l, recipe in met["layout x recipe"] if l == layout}) >= 2, layout
    for recipe in RECIPES:
        assert len({layout for layout, r in met["layout x recipe"] if r == recipe}) >= 2, recipe
    for mode in RECOMPUTE.keys() - {NONE}:
        assert any(m == mode for _, m in met["recipe x recomputation"]), mode
    assert all(row.reference in ROWS for row in ROWS if row.is_exact)


def test_the_document_is_made_of_the_rows():
    with script_module("compatibility") as module:
        assert module.TABLE.read_text() == module.text(), "python scripts/compatibility.py --write"
