"""What must not change a cast's bytes: strides, input type, payload layout, direction of the tensor, threads, CPU."""

import pytest
import torch
from test_cpp_golden import cast

from megatron_hybrid import kernels
from megatron_hybrid.formats import COLUMNWISE, DIRECTIONS, ROWWISE, parse_format

FORMATS = ("fp8_current_e4m3", "fp8_rowwise_e5m2:pow2", "fp8_block_e4m3", "fp8_block_e5m2:no_pow2", "fp8_block_e4m3:2d",
           "mxfp8_e4m3", "mxfp8_e5m2:2d", "nvfp4", "nvfp4:2d", "nvfp4:row_scaled", "nvfp4:rht")  # fmt: skip
SHAPES = ((1, 16), (33, 50), (130, 257), (300, 600), (7, 1))


def tensor(shape, dtype=torch.bfloat16, seed=0):
    """Rows of very different size, some zeros, a negative zero."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator) * torch.exp(2 * torch.randn(shape[0], 1, generator=generator))
    x[torch.rand(shape, generator=generator) < 0.05] = 0.0
    x[0, 0] = -0.0
    return x.to(dtype)


def assert_same(a, b):
    for left, right in zip(a[:3], b[:3], strict=True):
        assert (left is None and right is None) or torch.equal(left, right)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", FORMATS)
def test_columnwise_is_rowwise_of_the_transpose(name, shape):
    fmt, x = parse_format(name), tensor(shape)
    codes, scale, amax, _ = cast(x, fmt, COLUMNWISE, True)
    codes_t, scale_t, amax_t, _ = cast(x.T.contiguous(), fmt, ROWWISE, False)
    assert torch.equal(codes, codes_t.T)
    assert torch.equal(scale.T if scale.dim() else scale, scale_t)
    assert amax is None or torch.equal(amax.T if amax.dim() else amax, amax_t)


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("name", FORMATS)
def test_strides_and_payload_layout(name, direction):
    fmt, x = parse_format(name), tensor((130, 257))
    expected = cast(x, fmt, direction, False)
    views = {
        "transposed payload": (x, True),
        "transposed tensor": (x.T.contiguous().T, False),
        "transposed both": (x.T.contiguous().T, True),
        "every second column": (torch.stack((x, x * 3), dim=-1).flatten(1)[:, ::2], False),
        "rows of a wider tensor": (torch.cat((x, x), dim=1)[:, :257], True),
    }
    for what, (view, transposed) in views.items():
        assert torch.equal(view, x), what
        assert_same(cast(view, fmt, direction, transposed), expected)


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("name", ["mxfp8_e4m3", "nvfp4:rht", "fp8_rowwise_e4m3"])
def test_expanded_row(name, direction):
    x = tensor((1, 70)).expand(40, 70)
    assert_same(cast(x, parse_format(name), direction, False), cast(x.contiguous(), parse_format(name), direction, False))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", FORMATS)
def test_16_bit_inputs_are_read_exactly(name, dtype):
    x = tensor((65, 130), dtype)
    x[3, 5:8] = torch.tensor([float("inf"), -1e-7, 6e-8]).to(dtype)  # FP16 subnormals among them
    for direction in DIRECTIONS:
        fmt = parse_format(name)
        assert_same(cast(x, fmt, direction, True), cast(x.float(), fmt, direction, True))


@pytest.mark.parametrize("name", FORMATS)
def test_dequantize_into_strides(name):
    fmt, x = parse_format(name), tensor((130, 257))
    for direction in DIRECTIONS:
        results = []
        for transposed in (False, True):
            _, scale, amax, qdata = cast(x, fmt, direction, transposed)
            for out in (torch.empty(130, 257), torch.empty(257, 130).T, torch.empty(130, 514)[:, ::2]):
                out.fill_(float("nan"))
                kernels.dequantize(qdata, scale, amax, fmt, direction, 130, 257, transposed=transposed, out=out)
                results.append(out.contiguous())
        assert all(torch.equal(r, results[0]) for r in results)
        # and it is the tensor, to the step of the type: half a step, relative to the largest of a block
        step = 2.0 ** -(2 if "e5m2" in name else 3 if "e4m3" in name else 1)
        assert (results[0] - x.float()).abs().max() <= step * x.float().abs().max()


@pytest.fixture
def every_isa():
    extension = kernels.extension("cpu")
    before = extension.isa()
    yield extension
    extension.set_isa(before)


# payloads of 4 MiB and more, aligned: written past the caches
STREAMED = [("mxfp8_e4m3", (2112, 2048)), ("nvfp4", (2176, 4096))]


@pytest.mark.parametrize("name, shape", [(f, (300, 600)) for f in (*FORMATS, "nvfp4:sr", "nvfp4:rht,sr")] + STREAMED)
def test_instruction_sets_and_threads_agree(name, shape, every_isa):
    fmt, x = parse_format(name), tensor(shape)
    rng = torch.tensor([3, 4, 5, 6, 7, 10000]) if fmt.sr else None
    threads = torch.get_num_threads()

    def run(isa, num_threads, direction):
        every_isa.set_isa(isa)
        torch.set_num_threads(num_threads)
        try:
            codes, scale, amax, qdata = cast(x, fmt, direction, direction == COLUMNWISE, rng=rng)
            out = torch.empty_like(x)
            kernels.dequantize(qdata, scale, amax, fmt, direction, *x.shape, transposed=direction == COLUMNWISE, out=out)
        finally:
            torch.set_num_threads(threads)
        return [codes, scale] + ([] if amax is None else [amax]) + [out.view(torch.int16)]

    for direction in DIRECTIONS:
        expected = run("baseline", 1, direction)
        for isa in every_isa.isas():
            for num_threads in (1, 3):
                assert all(map(torch.equal, run(isa, num_threads, direction), expected)), (isa, num_threads)


@pytest.mark.parametrize("name", FORMATS)
def test_noop(name):
    fmt, x = parse_format(name), tensor((33, 50))
    for direction in DIRECTIONS:
        expected = cast(x, fmt, direction, False)
        qdata, scale = torch.full_like(expected[3], 0xAB), torch.full_like(expected[1], 99)
        args = dict(qdata=qdata, scale=scale, amax=expected[2])
        kernels.quantize(x, fmt, direction, noop=torch.tensor(1, dtype=torch.int32), **args)
        assert (qdata == 0xAB).all() and (scale == 99).all()
        kernels.quantize(x, fmt, direction, noop=torch.tensor(0, dtype=torch.int32), **args)
        assert torch.equal(qdata, expected[3]) and torch.equal(scale, expected[1])


def test_arguments_are_checked():
    extension = kernels.extension("cpu")
    good = dict(element=0, scale_rule=2, axis=0, block_m=1, block_k=32)
    for bad, message in (
        (dict(block_k=48), "not supported"),
        (dict(axis=2), "axis=2"),
        (dict(axis=1), "not supported"),
        (dict(element=2), "e2m1"),
        (dict(eps=-1.0), "eps"),
        (dict(rht=True), "rht"),
        (dict(outer_rows=True), "outer_rows"),
    ):
        with pytest.raises(ValueError, match=message):
            extension.FormatSpec(**{**good, **bad})
    spec = extension.FormatSpec(**good)
    call = dict(spec=spec, data=64, dtype=0, M=1, K=1, stride_m=1, stride_k=1, qdata=64, transposed=False, scale=64, amax=0,
                fixed_scale=False, rng=0, row_ids=0, noop=0, stream=0, threads=1)  # fmt: skip
    for bad, message in (
        (dict(M=-1), "M=-1"),
        (dict(K=-3), "K=-3"),
        (dict(dtype=7), "dtype=7"),
        (dict(data=0), "data"),
        (dict(qdata=0), "qdata"),
        (dict(scale=0), "scale"),
        (dict(fixed_scale=True), "fixed_scale"),
        (dict(threads=0), "threads"),
        (dict(stride_m=-1), "strides"),
    ):
        with pytest.raises(ValueError, match=message):
            extension.quantize(**{**call, **bad})


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_more_than_2_to_31_elements():
    """Offsets past 2^31: the last row of a huge payload is the first row's, as every row of the input is."""
    K = 1 << 16
    M = (1 << 15) + 9
    x = tensor((1, K)).expand(M, K)
    for name in ("mxfp8_e4m3", "nvfp4"):
        fmt = parse_format(name)
        _, scale, _, qdata = cast(x, fmt, ROWWISE, False)
        assert torch.equal(qdata[-1], qdata[0]) and torch.equal(scale[-1], scale[0])
        assert torch.equal(qdata[M // 2], qdata[0])
