"""What tensor-parallel shards mean for amaxes, gathers and plans, from formats and sizes alone (cases 23, 24, 27)."""

import pytest
import torch

import megatron_hybrid as mh
from megatron_hybrid.distributed.tp import column_index_maps, column_sharding, row_sharding
from megatron_hybrid.formats import parse_format
from megatron_hybrid.gather import start_grad_output
from megatron_hybrid.linear import Communication
from megatron_hybrid.mcore import planning
from megatron_hybrid.model_shape import ModelShape
from megatron_hybrid.roles import ModuleRole
from megatron_hybrid.runtime import LinearRuntime
from megatron_hybrid.sharding import COLUMNS, ROWS, Shard, column_gather, covers_other_ranks, cuts_blocks, row_gather

RANKS = dict(tensor_model_parallel_size=2, sequence_parallel=True)
SHAPE = ModelShape(2, 256, 4, 512, 64, 4, 128, 2, 512, swiglu=True, **RANKS)


@pytest.mark.parametrize(
    "fmt, rows, columns",  # (rowwise, columnwise) amaxes that cover other ranks, of shards along rows and columns
    [
        ("fp8_current_e4m3", (True, True), (True, True)),
        ("nvfp4", (True, True), (True, True)),
        ("nvfp4:row_scaled", (False, True), (True, False)),
        ("fp8_rowwise_e4m3", (False, True), (True, False)),
        ("fp8_delayed_e4m3", (False, False), (False, False)),
        ("mxfp8_e4m3", (False, False), (False, False)),
        ("fp8_block_e4m3:2d", (False, False), (False, False)),
        ("high_precision", (False, False), (False, False)),
    ],
)
def test_c27_which_amaxes_cover_other_ranks(fmt, rows, columns):
    fmt = parse_format(fmt)
    for dim, expected in ((ROWS, rows), (COLUMNS, columns)):
        found = tuple(covers_other_ranks(fmt, direction, Shard(dim)) for direction in ("rowwise", "columnwise"))
        assert found == expected


class Louder(Communication):
    """The other rank's amaxes are three times as large."""

    size = 2

    def start_max(self, amaxes):
        return lambda: [3 * amax for amax in amaxes]


@pytest.mark.parametrize("fmt", ["fp8_current_e4m3", "fp8_rowwise_e4m3", "nvfp4", "nvfp4:row_scaled"])
@pytest.mark.parametrize("split", [column_sharding, row_sharding])
def test_a_derived_column_alone_comes_from_the_row_that_all_ranks_scale(split, fmt):
    """As from a cast of both directions: in backward of a weight that is not kept, or where no input gradient is needed."""
    derived = dict.fromkeys(("input", "weight", "grad_output"), "rowwise_dequantized")
    use = {"fprop": fmt, "dgrad": fmt, "wgrad": "mxfp8_e4m3", "columnwise_source": derived}
    recipe = mh.Recipe.from_dict({"version": 1, "name": "derived", "defaults": use})
    hq = LinearRuntime(recipe, ModuleRole("linear", name="fc"), "cpu", sharding=split(2, 128, sequence_parallel=False))
    call = hq.call(torch.device("cpu"), Louder(), training=True)
    x = torch.randn(64, 64, generator=torch.Generator().manual_seed(1)).bfloat16()
    assert any(row for row, _ in call.plan.reduced.values())
    for operand in call.plan.reduced:
        both, alone = (call.cast(operand, x, rowwise=rowwise, columnwise=True)[1] for rowwise in (True, False))
        for name, buffer in both.buffers().items():
            assert torch.equal(buffer, alone.buffers()[name]), (operand, name)


class Doubled(Louder):
    """The other rank's rows are this one's."""

    def start_gather(self, *tensors):
        return lambda: [torch.cat([t, t]) for t in tensors]


@pytest.mark.parametrize("source", ["original", "rowwise_dequantized"])
@pytest.mark.parametrize("fmt", ["fp8_current_e4m3", "nvfp4"])
def test_a_gathered_gradient_s_column_alone_has_the_scale_of_all_ranks(fmt, source):
    """As where both directions are wanted: a linear whose input needs no gradient."""
    use = {"fprop": fmt, "dgrad": fmt, "wgrad": fmt, "columnwise_source": {"grad_output": source}}
    recipe = mh.Recipe.from_dict({"version": 1, "name": "gathered", "defaults": use})
    hq = LinearRuntime(recipe, ModuleRole("linear", name="fc"), "cpu", sharding=row_sharding(2, 128, sequence_parallel=True))
    call, columns = hq.call(torch.device("cpu"), Doubled(), training=True), []
    dy = torch.randn(40, 64, generator=torch.Generator().manual_seed(1)).bfloat16()
    for rowwise in (True, False):
        amax = call.start_amaxes("grad_output", dy, rowwise, True)
        get_row, get_col = start_grad_output(call, dy, rowwise=rowwise, columnwise=True, amax=amax)
        if rowwise:
            get_row()
        columns.append(get_col().buffers())
    for name, buffer in columns[0].items():
        assert torch.equal(buffer, columns[1][name]), name


def gathers(row, col, rows, source="original", row_is_there=False):
    quantizer = mh.HybridQuantizer(row, col, source)
    return row_gather(quantizer, rows), column_gather(quantizer, rows, row_is_there=row_is_there)


def test_c23_c24_what_travels():
    derived = "rowwise_dequantized"
    assert gathers("mxfp8_e4m3", "nvfp4", 32) == ("payload", "payload")
    assert gathers("mxfp8_e4m3", "nvfp4", 40) == ("payload", "high precision")
    assert gathers("mxfp8_e4m3:2d", "mxfp8_e4m3:2d", 40) == ("high precision", "high precision")
    assert gathers("mxfp8_e4m3", "nvfp4", 40, derived) == ("payload", "row payload")
    assert gathers("mxfp8_e4m3", "nvfp4", 32, derived) == ("payload", "payload")
    assert gathers("mxfp8_e4m3", "nvfp4", 32, derived, True) == ("payload", "row payload")
    assert gathers("mxfp8_e4m3:2d", "nvfp4", 40, derived) == ("high precision", "high precision")
    assert gathers("mxfp8_e4m3", "high_precision", 33, derived) == ("payload", "row payload")
    assert gathers("high_precision", "nvfp4", 32, derived) == ("as it is", "payload")
    assert gathers("mxfp8_e4m3", "high_precision", 33) == ("payload", "as it is")
    assert gathers("fp8_current_e4m3", "fp8_rowwise_e4m3", 33) == ("payload", "payload")
    assert gathers("fp8_current_e4m3", "fp8_current_e4m3", 33, "original", True) == ("payload", "row payload")
    assert gathers("fp8_current_e4m3", "fp8_current_e5m2", 33, "original", True) == ("payload", "payload")
    assert gathers("nvfp4:sr", "nvfp4:sr", 32, "original", True) == ("payload", "payload")
    assert gathers("mxfp8_e4m3:2d", "mxfp8_e4m3:2d", 32, "original", True) == ("payload", "row payload")


def test_shards_and_runs_that_end_inside_a_block():
    fmt = parse_format("nvfp4")
    assert not cuts_blocks(fmt, "rowwise", Shard(ROWS), 7) and cuts_blocks(fmt, "columnwise", Shard(ROWS), 24)
    assert not cuts_blocks(fmt, "columnwise", Shard(ROWS), 32)
    assert cuts_blocks(fmt, "columnwise", Shard(ROWS, pieces=2), 48)
    assert not cuts_blocks(parse_format("fp8_rowwise_e4m3"), "rowwise", Shard(COLUMNS), 7)


def test_places_of_a_gated_shard():
    maps = column_index_maps(1, 4, 64, 80, pieces=2)
    assert maps["weight"].maps == ((10, 0, 64), (50, 0, 64)) and maps["weight"].dim == ROWS
    assert maps["grad_output"].maps == ((0, 10, 80), (0, 50, 80)) and maps["grad_output"].dim == COLUMNS


def test_shardings_of_a_models_linears():
    roles = {role.name.rpartition(".")[2]: role for role in planning.enumerate_modules(SHAPE) if role.layer != 2}
    leaves = ("linear_qkv", "linear_proj", "linear_fc1", "output_layer")
    found = {leaf: planning.sharding(roles[leaf], SHAPE) for leaf in leaves}
    assert found["linear_fc1"] == column_sharding(2, 1024, sequence_parallel=True, pieces=2)
    assert found["linear_qkv"] == column_sharding(2, 3 * 256, sequence_parallel=True)
    assert found["output_layer"] == column_sharding(2, 512, sequence_parallel=True)
    assert found["linear_proj"] == row_sharding(2, 256, sequence_parallel=True)
    assert planning.sharding(roles["linear_fc1"], None) is None
    assert SHAPE.rows_of_a_rank == 128


def test_shardings_of_experts():
    """Their own ranks, as many as other linears' where nothing is said; their tokens are whole on each."""
    flags = dict(num_layers=1, hidden_size=64, num_attention_heads=4, swiglu=True, num_experts=8, moe_router_topk=2,
                 moe_ffn_hidden_size=96, seq_length=32, tensor_model_parallel_size=4, sequence_parallel=True)  # fmt: skip
    for etp, rows in ((None, 8), (2, 4), (1, 2)):
        shape, ranks = ModelShape.of(flags | dict(expert_tensor_parallel_size=etp)), etp or 4
        fc1, fc2 = (role for role in planning.enumerate_modules(shape) if role.expert == 3)
        assert shape.linear(fc1).size("weight") == (192 // ranks, 64) and shape.linear(fc2).size("weight") == (64, 96 // ranks)
        assert shape.linear(fc1).rows == shape.linear(fc2).rows == rows
        split = [planning.sharding(role, shape) for role in (fc1, fc2)]
        column, row = (
            column_sharding(ranks, 192, sequence_parallel=False, pieces=2), row_sharding(ranks, 96, sequence_parallel=False)
        )  # fmt: skip
        assert split == ([None, None] if ranks == 1 else [column, row])


def test_c23_high_precision_gathers_and_cut_blocks_are_said():
    plans = planning.plan_model(mh.Recipe.load("mxfp8_fprop_nvfp4_bwd"), SHAPE, "cpu", shape=SHAPE)
    assert not planning.high_precision_gathers(plans, 128) and not planning.cut_shards(plans)
    said = planning.high_precision_gathers(plans, 40)
    what = "{} nvfp4 is gathered in high precision (40 rows a rank are not whole blocks of 16)"
    assert sorted(said) == [what.format(s) for s in ("grad_output.columnwise", "input.columnwise")]
    assert len(said[what.format("input.columnwise")]) == 4
    odd = ModelShape(1, 240, 4, 300, 60, 4, 128, 2, 512, tensor_model_parallel_size=2)
    plans = planning.plan_model(mh.Recipe.load("mxfp8"), odd, "cpu", shape=odd)
    assert any("linear_fc2" in name for name in planning.cut_shards(plans)["weight.rowwise mxfp8_e4m3"])


def test_a_packed_gather_of_one_rank_gives_what_was_put_in():
    """Codes of an odd number of bytes before FP32 scales."""
    import torch.distributed as dist

    from megatron_hybrid.distributed.tp import TensorParallel

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        codes, scales = torch.arange(3, dtype=torch.uint8).view(1, 3), torch.tensor([[0.5]])
        gathered = TensorParallel(dist.group.WORLD).start_gather(codes, scales)()
    finally:
        dist.destroy_process_group()
    assert torch.equal(gathered[0], codes) and torch.equal(gathered[1], scales)
