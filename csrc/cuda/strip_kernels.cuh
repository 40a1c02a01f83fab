// The kernels that hold strips (strip.cuh): a cast, and amaxes of columns and rows, of whole tensors (`kGrouped` false)
// and of groups of rows. Only codes of columns go through shared memory, to leave in whole rows of the stored matrix.
#pragma once

#include "strip_casts.cuh"
#include "strip_sources.cuh"

namespace mh::cuda {

// The thread block's tile, and where its rows are; false where there is no such block.
template <bool kGrouped>
__device__ __forceinline__ bool find_tile(const StripArgs& s, Tile& t, Tile& at_rows) {
  const CastArgs& a = s.cast;
  if constexpr (!kGrouped) {
    t = at_rows = a.tiling.tile(blockIdx.x);
    return true;
  }
  if (a.items == 0) return false;
  const uint32_t length = s.down ? static_cast<uint32_t>(a.groups.count) : a.tiling.across;
  const uint32_t line = blockIdx.x / length, within = blockIdx.x - line * length;
  const uint32_t row = s.down ? within : line, col = s.down ? line : within;
  t = Tile{static_cast<int64_t>(row) * kTile, static_cast<int64_t>(col) * kTile, kTile, kTile};
  t.cols = static_cast<int>(min(a.tiling.k - t.k0, static_cast<int64_t>(kTile)));
  return find_block(a.groups, a.x.cols, t, at_rows);
}

// Strip s of a tile's: of the gradient of gate, or of that of up.
__device__ __forceinline__ Tile beside(Tile t, const CastArgs& a, int s) {
  t.k0 += s * (a.x.cols / 2);
  return t;
}

// Thread blocks of a cast that a multiprocessor runs at once. Four leave a thread 64 registers, too few for two strips
// and for both directions of FP16.
template <class T, class Source, bool kBoth>
constexpr int kStripBlocks = Source::kStrips > 1 ? 2 : (kBoth && !std::is_same_v<T, BFloat16> ? 3 : 4);

// Whether rows are also written before the barrier of columns' amaxes: a whole tensor's gradient gains, as measured.
template <class Source, bool kGrouped>
constexpr bool kRowsFirst = !kGrouped && Source::kStrips > 1;

template <class T, class Source, bool kGrouped, bool kRows, bool kCols>
__global__ void __launch_bounds__(kThreads, (kStripBlocks<T, Source, kRows && kCols>))
    cast_strips(const __grid_constant__ StripArgs args) {
  __shared__ StripShared<T> shared;
  StripShared<T>& sh = *held_shared(&shared);
  const CastArgs& a = args.cast;
  if (!kGrouped && a.noop && *a.noop) return;
  if constexpr (kRows) store_preset_scales(a.row, kGrouped ? a.groups.rows : a.x.rows);
  if constexpr (kCols) store_preset_scales(a.col, (kGrouped ? a.groups.groups : 1) * a.x.cols);
  Tile t, at_rows;
  if (!find_tile<kGrouped>(args, t, at_rows)) return;
  const Direction *row = kRows && !kGrouped ? &a.row : nullptr, *col = kCols && !kGrouped ? &a.col : nullptr;
  const Known known(row, col);
  Strip<T> v[Source::kStrips];
  find_rows<Source::kWeighted>(args, t, at_rows.m0, sh);
  Source::load(args, t, at_rows.m0, sh, v);
  MH_UNROLL
  for (int s = 0; s < Source::kStrips; ++s) {
    if (s && !kCols) __syncthreads();  // what the strip before shared is read
    const Tile here = beside(t, a, s), rows = beside(at_rows, a, s);
    cut<T>(t, v[s]);
    if constexpr (kCols) preset_columns<T>(a.col, here, sh);  // a tile that is only read is still on its way
    if constexpr (kRows) preset_rows<T>(a.row, rows, sh);
    const int32_t of_tile = look_at_tile<T>(row, col, known, v[s], sh);
    // rows need no other warp: they find their scales while these come to the barrier that columns need
    if (kCols && has_line_blocks(a.col.spec)) share_amaxes<T>(v[s], sh);
    if constexpr (kRows) block_rows<T>(a.row, rows, of_tile, reinterpret_cast<const Strip<T>(&)[1]>(v[s]), sh);
    if constexpr (kRows && kRowsFirst<Source, kGrouped>) cast_strip_rows<T>(a.row, rows, v[s], sh);
    if constexpr (kCols) block_columns<T>(a.col, here, of_tile, sh);
    if constexpr (kRows && !kRowsFirst<Source, kGrouped>) cast_strip_rows<T>(a.row, rows, v[s], sh);
    if constexpr (kCols) {
      cast_strip_columns<T>(a.col, v[s], sh);
      put_columns(a.col, here, sh.codes, kGrouped ? kWarps : t.rows / kWarpRows);  // zeros where a group has no rows
    }
  }
}

// Amaxes of columns, of each group's where there are groups, and of rows.
template <class T, class Source, bool kGrouped>
__global__ void __launch_bounds__(kThreads, (kStripBlocks<T, Source, false>))
    amax_strips(const __grid_constant__ StripArgs args) {
  __shared__ StripShared<T> shared;
  StripShared<T>& sh = *held_shared(&shared);
  const CastArgs& a = args.cast;
  if (!kGrouped && a.noop && *a.noop) return;
  const auto raise = [](int32_t* to, int32_t amax) { atomicMax(to, !kGrouped && amax > kInfBits ? kNanBits : amax); };
  const int c = threadIdx.x, lane = c % kWarp, i = c / kWarp * kWarpRows + own_row();
  Tile t, at_rows;
  if (!find_tile<kGrouped>(args, t, at_rows)) return;
  Strip<T> v[Source::kStrips];
  find_rows<Source::kWeighted>(args, t, at_rows.m0, sh);
  Source::load(args, t, at_rows.m0, sh, v);
  MH_UNROLL
  for (int s = 0; s < Source::kStrips; ++s) {
    if (s) __syncthreads();  // the amaxes of the strip before are read
    cut<T>(t, v[s]);
    share_amaxes<T>(v[s], sh);
    __syncthreads();
    if (c < t.cols) raise(args.of_columns + t.lines + beside(t, a, s).k0 + c, column_amax<kWarps, T>(c, 0, sh));
  }
  if (!args.of_rows) return;
  const int32_t amax = row_amax<T>(v);
  if (lane < kWarpRows && i < t.rows) raise(args.of_rows + at_rows.m0 + i, amax);
}

// Calls f with the source that the rows of a cast come from.
template <class T, class F>
void by_source(const CastArgs& a, F&& f) {
  if (a.grad) return f(GradientOf<T>{});
  if (a.gate) return f(ProductOf<T>{});
  f(RowsOf<T>{});
}

// And with a value of a 16-bit type.
template <class F>
void by_narrow(Dtype dtype, F&& f) {
  dtype == Dtype::bf16 ? f(BFloat16{}) : f(Float16{});
}

}  // namespace mh::cuda
