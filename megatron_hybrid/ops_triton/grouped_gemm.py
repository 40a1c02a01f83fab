"""FP8 GEMMs of all groups: fprop and dgrad over groups of rows, wgrad over groups along the contraction.

Groups are cut into blocks of 128 rows that begin where their group begins; a map of the blocks, made on the device,
says which rows each has. Operands are read through tensor maps, 128 of the contraction at a time. The FP8 tensor cores
sum up 128 products at most; these sums are scaled (1 x 128 and 128 x 128 blocks) and added up in FP32. Scales of rows
multiply the whole sum. Rows that belong to no group are neither read nor written.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from ..gemm.grouped_cuda import BLOCKS, ROW, TILES
from ..kernels import map_groups
from .launch import cdiv, on_device

BLOCK = 128
_SHARED = 227 << 10  # bytes a program may have on sm_90


class Tile(NamedTuple):
    """rows x columns of the result a program computes at a time, `parts` equal runs of columns one after another."""

    rows: int
    columns: int
    parts: int
    warps: int
    stages: int
    registers: int | None = None
    persistent: int = 0  # rows: programs a multiprocessor; 0: a program a tile
    deep: int = 1  # rows: steps of the contraction from one wait for operands to the next
    run: int = 4  # columns: tiles a program


class BlockMap(NamedTuple):
    """ends: int32 (E,), the block after each group's last. group, row, rows: int32 (blocks,): the group of each block,
    its first row among all groups' and how many it has. Blocks after the last group's are not filled in."""

    ends: torch.Tensor
    blocks: torch.Tensor

    @property
    def count(self) -> int:
        return self.blocks.shape[1]


def block_map(sizes: torch.Tensor, count: int) -> BlockMap:
    """sizes: int (E,), of the groups. count: of blocks there is room for."""
    num, device = sizes.shape[0], sizes.device
    if not sizes.is_cuda:  # interpreted
        return _block_map(sizes.long(), count)
    ends = torch.empty(num, dtype=torch.int32, device=device)
    blocks = torch.empty((3, count), dtype=torch.int32, device=device)
    sizes = sizes if sizes.dtype in (torch.int32, torch.int64) else sizes.long()
    map_groups(sizes.contiguous(), ends, blocks)
    return BlockMap(ends, blocks)


def _block_map(sizes: torch.Tensor, count: int) -> BlockMap:
    mine = (sizes + (BLOCK - 1)) // BLOCK
    ends, block = mine.cumsum(0), torch.arange(count)
    group = torch.searchsorted(ends, block, right=True).clamp_(max=sizes.shape[0] - 1)
    within = (block - (ends - mine)[group]) * BLOCK
    rows = (sizes[group] - within).clamp_(max=BLOCK)
    found = torch.stack((group, (sizes.cumsum(0) - sizes)[group] + within, rows))
    return BlockMap(ends.int(), torch.where(block < ends[-1], found, 0).int())


@triton.jit
def _scaled(p, a, b, SCALED: tl.constexpr):
    """A sum of 128 products times the scales of its blocks: a (rows,), b (columns,) or one number."""
    if SCALED == 2:
        return p * (a[:, None] * b)
    else:
        return p * a[:, None] * b[None, :]


@triton.jit
def _step(acc, a, b, sa, sb, SCALED: tl.constexpr, FAST: tl.constexpr):
    if FAST:
        return tl.dot(a, b.T, acc)
    elif SCALED == 0:
        return tl.dot(a, b.T, acc, max_num_imprecise_acc=128)
    else:
        return acc + _scaled(tl.dot(a, b.T), sa, sb, SCALED)


@triton.jit
def _scales(scale, at, inside, SCALED: tl.constexpr):
    """A vector of block scales, or nothing of use."""
    if SCALED > 0:
        return tl.load(scale + at, mask=inside, other=0.0)
    else:
        return 0.0


@triton.jit
def _scales_of_columns(scale, first, n, col, k, steps, N, SCALED: tl.constexpr):
    """Of a group's rows n + col of B at step k of the contraction, as `_scaled` takes them. first: of the group."""
    if SCALED == 2:
        return tl.load(scale + (first + tl.minimum(n, N - 1)) // 128 * steps + k)
    else:
        return _scales(scale, (first + n + col).to(tl.int64) * steps + k, n + col < N, SCALED)


@triton.jit
def _finish(acc, to, a_scale, b_scale, in_rows, in_cols, SCALED: tl.constexpr, ADD: tl.constexpr):
    """Scale a part of the result and write it, or add it to what is there."""
    inside = in_rows[:, None] & in_cols[None, :]
    if SCALED == 0:
        by_row = tl.load(a_scale, mask=in_rows, other=0.0)[:, None]
        acc *= by_row * tl.load(b_scale, mask=in_cols, other=0.0)[None, :]
    if ADD:
        acc += tl.load(to, mask=inside, other=0.0).to(tl.float32)
    tl.store(to, acc.to(to.dtype.element_ty), mask=inside)


@triton.jit
def _zeros(ROWS: tl.constexpr, PART: tl.constexpr, PARTS: tl.constexpr):
    """Sums of every part of a tile."""
    accs = ()
    for _ in tl.static_range(PARTS):
        accs = accs + (tl.zeros((ROWS, PART), tl.float32),)
    return accs


@triton.jit(do_not_specialize=["count"])  # it follows the number of tokens
def _rows(
    a, b, a_scale, b_scale, out, ends, blocks, E, count, N, K,
    SCALED: tl.constexpr, FAST: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, PARTS: tl.constexpr,
    FLATTEN: tl.constexpr, DEEP: tl.constexpr,
):  # fmt: skip
    """a (T, K), b (E * N, K), out (T, N). SCALED: 0: scales a row; 1: 1 x 128 blocks of both; 2: B in tiles."""
    PART: tl.constexpr = COLS // PARTS
    SUB: tl.constexpr = 128 // ROWS
    across = (N + COLS - 1) // COLS
    steps = (K + 127) // 128
    tiles = tl.load(ends + E - 1) * (SUB * across)
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), flatten=FLATTEN):
        piece = tile // across
        block = piece // SUB
        skip = (piece % SUB) * ROWS
        n = (tile % across) * COLS
        g = tl.load(blocks + block)
        row = tl.load(blocks + count + block) + skip
        rows = tl.load(blocks + 2 * count + block) - skip
        m, c = tl.arange(0, ROWS), tl.arange(0, PART)
        accs = _zeros(ROWS, PART, PARTS)
        for k in range(0, steps, DEEP):
            for deeper in tl.static_range(DEEP):
                d = tl.minimum(k + deeper, steps - 1)  # what is read past the end is 0, whatever its scale
                sa = _scales(a_scale, (row + m).to(tl.int64) * steps + d, m < rows, SCALED)
                x = a.load([row, (k + deeper) * 128])
                new = ()
                for part in tl.static_range(PARTS):
                    col = n + part * PART
                    y = b.load([g * N + col, (k + deeper) * 128])
                    sb = _scales_of_columns(b_scale, g * N, col, c, d, steps, N, SCALED)
                    new = new + (_step(accs[part], x, y, sa, sb, SCALED, FAST),)
                accs = new
        for part in tl.static_range(PARTS):
            col = n + part * PART + c
            to = out + (row + m).to(tl.int64)[:, None] * N + col[None, :]
            _finish(accs[part], to, a_scale + row + m, b_scale + g * N + col, m < rows, col < N, SCALED, False)


@triton.jit
def _contract(
    a, b, a_scale, b_scale, out, ends, E, N, K,
    SCALED: tl.constexpr, FAST: tl.constexpr, ADD: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
    PARTS: tl.constexpr, RUN: tl.constexpr,
):  # fmt: skip
    """a (N, R), b (K, R), out (E, N, K); R: rows of all groups' blocks. SCALED: 0: scales (E, N) and (E, K); 1: a block
    and column. A program computes a run of RUN tiles side by side, the next one's operands under way while it writes
    the last one's results: contractions are short."""
    PART: tl.constexpr = COLS // PARTS
    down, across = (N + ROWS - 1) // ROWS, (K + COLS * RUN - 1) // (COLS * RUN)
    run = tl.program_id(0)
    g = run // (down * across)
    n, first = (run // across) % down * ROWS, (run % across) * (COLS * RUN)
    begin = tl.load(ends + g - 1, mask=g > 0, other=0)
    depth = tl.load(ends + g) - begin
    divisor = tl.maximum(depth, 1)  # by 0 nothing may be divided, not even ahead of a loop that does not run
    tiles = tl.minimum(RUN, (K - first + COLS - 1) // COLS)
    rows = n + tl.arange(0, ROWS)
    to_rows = out + (g * N + rows.to(tl.int64))[:, None] * K
    accs = _zeros(ROWS, PART, PARTS)
    for step in range(0, tiles * depth):
        c, block = first + step // divisor * COLS, begin + step % divisor
        sa = _scales(a_scale, block * N + rows, rows < N, SCALED)
        x = a.load([n, block * 128])
        new = ()
        for part in tl.static_range(PARTS):
            cols = c + part * PART + tl.arange(0, PART)
            sb = _scales(b_scale, block * K + cols, cols < K, SCALED)
            new = new + (_step(accs[part], x, b.load([c + part * PART, block * 128]), sa, sb, SCALED, FAST),)
        accs = new
        if step % divisor == depth - 1:
            for part in tl.static_range(PARTS):
                cols = c + part * PART + tl.arange(0, PART)
                of_a, of_b = a_scale + g * N + rows, b_scale + g * K + cols
                _finish(accs[part], to_rows + cols[None, :], of_a, of_b, rows < N, cols < K, SCALED, ADD)
            accs = _zeros(ROWS, PART, PARTS)
    if depth == 0 and not ADD:
        for tile in range(tiles):
            cols = first + tile * COLS + tl.arange(0, COLS)
            nothing = tl.zeros((ROWS, COLS), out.dtype.element_ty)
            tl.store(to_rows + cols[None, :], nothing, mask=(rows < N)[:, None] & (cols < K)[None, :])


# the fastest of those measured on an H100 with 128 experts of 256 tokens and 32 of 4096 (docs/performance.md)
_TILES = {
    ("rows", ROW, True): Tile(128, 256, 2, 8, 4),
    ("rows", ROW, False): Tile(128, 128, 2, 8, 3, 128, persistent=2),
    ("rows", BLOCKS, False): Tile(64, 128, 1, 4, 3, 168),
    ("rows", TILES, False): Tile(128, 128, 1, 8, 3, persistent=1, deep=2),
    ("columns", ROW, True): Tile(128, 128, 2, 8, 3, 128),
    ("columns", ROW, False): Tile(128, 128, 2, 8, 3, 128),
    ("columns", BLOCKS, False): Tile(64, 128, 1, 4, 3, 168),
}


def _grid(tile: Tile, tiles: int, device) -> tuple[int]:
    if not tile.persistent or device.type != "cuda":
        return (max(1, tiles),)
    return (min(tiles, tile.persistent * torch.cuda.get_device_properties(device).multi_processor_count),)


def _stages(tile: Tile, out: torch.Tensor) -> int:
    """The tile's. A persistent program needs room for a part of the result too: it leaves by way of shared memory."""
    if not tile.persistent:
        return tile.stages
    left = _SHARED - tile.rows * (tile.columns // tile.parts) * out.element_size()
    return min(tile.stages, left // ((tile.rows + tile.columns) * BLOCK * tile.deep))


def _options(tile: Tile, out: torch.Tensor) -> dict:
    found = dict(ROWS=tile.rows, COLS=tile.columns, PARTS=tile.parts)
    return found | dict(num_warps=tile.warps, num_stages=_stages(tile, out), maxnreg=tile.registers)


def _map(codes: torch.Tensor, rows: int) -> TensorDescriptor:
    """Codes (rows, contraction), read `rows` x 128 at a time; what lies outside reads as 0."""
    return TensorDescriptor(codes, list(codes.shape), list(codes.stride()), [rows, BLOCK])


def multiply_rows(a, w, a_scale, w_scale, out, where: BlockMap, kind: int, *, fast: bool) -> torch.Tensor:
    """out (T, N): each row of a (T, K) with its group's w (E * N, K). FP8 codes in torch's FP8 dtypes.

    Scales, packed. kind ROW: (T,) and (E * N,); BLOCKS: (T, K / 128) and (E * N, K / 128); TILES: w's (E * N / 128,
    K / 128), N a multiple of 128. K / 128 rounded up.
    """
    num, (N, K) = where.ends.shape[0], (out.shape[1], a.shape[1])
    tile = _TILES["rows", kind, fast]
    tiles = where.count * (BLOCK // tile.rows) * cdiv(N, tile.columns)
    with on_device(a):
        _rows[_grid(tile, tiles, a.device)](
            _map(a, tile.rows), _map(w, tile.columns // tile.parts), a_scale, w_scale, out, where.ends, where.blocks,
            num, where.count, N, K, SCALED=kind, FAST=fast, FLATTEN=bool(tile.persistent), DEEP=tile.deep,
            **_options(tile, out),
        )  # fmt: skip
    return out


def multiply_columns(a, b, a_scale, b_scale, out, where: BlockMap, kind: int, *, fast: bool, add: bool) -> torch.Tensor:
    """out (E, N, K), or added to it: of every group a (N, R) times b (K, R) over the group's blocks.

    Scales, packed. kind ROW: (E, N) and (E, K); BLOCKS: (R / 128, N) and (R / 128, K).
    """
    num, N, K = out.shape
    tile = _TILES["columns", kind, fast]
    runs = num * cdiv(N, tile.rows) * cdiv(K, tile.columns * tile.run)
    with on_device(a):
        _contract[runs,](
            _map(a, tile.rows), _map(b, tile.columns // tile.parts), a_scale, b_scale, out, where.ends, num, N, K,
            SCALED=kind, FAST=fast, ADD=add, RUN=tile.run, **_options(tile, out),
        )  # fmt: skip
    return out
