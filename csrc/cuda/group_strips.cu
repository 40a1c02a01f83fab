// Columns of all groups, the rows beside them, and amaxes, of 16-bit tensors: by strips (strip.cuh), where the cast of
// other tensors (cast.cuh) holds the tile in shared memory. Only codes of columns go through that, to leave in whole
// rows of the stored matrix. A scale is made once, by a lane of its own.
#include "strip_casts.cuh"
#include "strip_sources.cuh"

namespace mh::cuda {
namespace {

// A tile of groups of rows, and where its rows are; false where there is no such block.
__device__ __forceinline__ bool find_tile(const StripArgs& s, Tile& t, Tile& at_rows) {
  const CastArgs& a = s.cast;
  if (a.items == 0) return false;
  const uint32_t length = s.down ? static_cast<uint32_t>(a.groups.count) : a.tiling.across;
  const uint32_t line = blockIdx.x / length, within = blockIdx.x - line * length;
  const uint32_t row = s.down ? within : line, col = s.down ? line : within;
  t = Tile{static_cast<int64_t>(row) * kTile, static_cast<int64_t>(col) * kTile, kTile, kTile};
  t.cols = static_cast<int>(min(a.tiling.k - t.k0, static_cast<int64_t>(kTile)));
  return find_block(a.groups, a.x.cols, t, at_rows);
}

// Finds the thread block's tile and brings its strips, not cut yet; false where there is no such block.
template <class T, class Source>
__device__ __forceinline__ bool load_strips(const StripArgs& args, Tile& t, Tile& at_rows, StripShared<T>& sh,
                                            Strip<T> (&v)[Source::kStrips]) {
  if (!find_tile(args, t, at_rows)) return false;
  find_rows<Source::kWeighted>(args, t, at_rows.m0, sh);
  Source::load(args, t, at_rows.m0, sh, v);
  return true;
}

// Strip s of a tile's: of the gradient of gate, or of that of up.
__device__ __forceinline__ Tile beside(Tile t, const CastArgs& a, int s) {
  t.k0 += s * (a.x.cols / 2);
  return t;
}

template <class T, class Source, bool kRows>
constexpr int kStripBlocks = Source::kStrips > 1 ? 2 : kCastBlocks<T, kRows>;

template <class T, class Source, bool kRows>
__global__ void __launch_bounds__(kThreads, (kStripBlocks<T, Source, kRows>))
    cast_strips(const __grid_constant__ StripArgs args) {
  __shared__ StripShared<T> shared;
  StripShared<T>& sh = *held_shared(&shared);
  const CastArgs& a = args.cast;
  if constexpr (kRows) store_preset_scales(a.row, a.groups.rows);
  store_preset_scales(a.col, a.groups.groups * a.x.cols);
  Tile t, at_rows;
  Strip<T> v[Source::kStrips];
  if (!load_strips<T, Source>(args, t, at_rows, sh, v)) return;
  MH_UNROLL
  for (int s = 0; s < Source::kStrips; ++s) {
    const Tile here = beside(t, a, s);
    cut<T>(t, v[s]);
    preset_columns<T>(a.col, here, sh);
    block_columns<T>(a.col, here, 0, v[s], sh);
    if constexpr (kRows) {
      const Tile rows = beside(at_rows, a, s);
      preset_rows<T>(a.row, rows, sh);
      block_rows<T>(a.row, rows, 0, reinterpret_cast<const Strip<T>(&)[1]>(v[s]), sh);
      cast_strip_rows<T>(a.row, rows, v[s], sh);
    }
    cast_strip_columns<T>(a.col, v[s], sh);
    put_columns(a.col, here, sh.codes, kWarps);  // zeros where the block has no rows
  }
}

// Amaxes of groups' columns, and of rows, as group_amax has them.
template <class T, class Source>
__global__ void __launch_bounds__(kThreads, (kStripBlocks<T, Source, false>))
    amax_strips(const __grid_constant__ StripArgs args) {
  __shared__ StripShared<T> shared;
  StripShared<T>& sh = *held_shared(&shared);
  const CastArgs& a = args.cast;
  const int c = threadIdx.x, lane = c % kWarp, i = c / kWarp * kWarpRows + own_row();
  Tile t, at_rows;
  Strip<T> v[Source::kStrips];
  if (!load_strips<T, Source>(args, t, at_rows, sh, v)) return;
  MH_UNROLL
  for (int s = 0; s < Source::kStrips; ++s) {
    if (s) __syncthreads();  // the amaxes of the strip before are read
    cut<T>(t, v[s]);
    share_amaxes<T>(v[s], sh);
    __syncthreads();
    if (c < t.cols) atomicMax(args.of_columns + t.lines + beside(t, a, s).k0 + c, column_amax<kWarps, T>(c, 0, sh));
  }
  if (!args.of_rows) return;
  const int32_t amax = row_amax<T>(v);
  if (lane < kWarpRows && i < t.rows) atomicMax(args.of_rows + at_rows.m0 + i, amax);
}

template <class T, class Source>
void launch_source(const StripArgs& a, bool rows, const Where& where) {
  const unsigned grid = grid_for(a.cast.items);
  if (a.of_columns) return launch(amax_strips<T, Source>, grid, 0, where, "group_amax", a);
  if (rows) return launch(cast_strips<T, Source, true>, grid, 0, where, "quantize", a);
  launch(cast_strips<T, Source, false>, grid, 0, where, "quantize", a);
}

template <class T>
void launch_type(const StripArgs& a, bool rows, const Where& where) {
  if (a.cast.grad) return launch_source<T, GradientOf<T>>(a, rows, where);
  if (a.cast.gate) return launch_source<T, ProductOf<T>>(a, rows, where);
  launch_source<T, RowsOf<T>>(a, rows, where);
}

}  // namespace

bool fits_strips(const StripArgs& s, bool rows) {
  const CastArgs& a = s.cast;
  if (!fits_tensor(a) || (a.grad && a.x.cols / 2 % kTile)) return false;
  if (a.grad_stride > kLongestRow || a.groups.rows > kLongestRow) return false;
  if (s.of_columns) return true;
  return fits_columns(a.col, !rows) && (!rows || fits_rows(a.row, false));
}

void launch_strips(const StripArgs& a, bool rows, const Where& where) {
  if (a.cast.x.dtype == Dtype::bf16) return launch_type<BFloat16>(a, rows, where);
  launch_type<Float16>(a, rows, where);
}

}  // namespace mh::cuda
