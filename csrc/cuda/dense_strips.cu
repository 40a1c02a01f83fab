// Casts of whole tensors, and amaxes of their rows and columns in one read, by strips (strip.cuh): 16-bit tensors to FP8
// with the scales of `kStripScales` (strip_casts.cuh). Others take the cast of tiles in shared memory (cast.cuh).
#include "dense_strips.h"
#include "strip_casts.cuh"
#include "strip_sources.cuh"

namespace mh::cuda {
namespace {

template <class T>
__device__ __forceinline__ void load_tile(const StripArgs& args, const Tile& t, StripShared<T>& sh, Strip<T> (&v)[1]) {
  find_rows<false>(args, t, t.m0, sh);
  RowsOf<T>::load(args, t, t.m0, sh, v);
  cut<T>(t, v[0]);
}

template <class T, bool kRows, bool kCols>
__global__ void __launch_bounds__(kThreads, (kCastBlocks<T, kRows && kCols>))
    cast_dense(const __grid_constant__ StripArgs args) {
  __shared__ StripShared<T> shared;
  StripShared<T>& sh = *held_shared(&shared);
  const CastArgs& a = args.cast;
  if (a.noop && *a.noop) return;
  if constexpr (kRows) store_preset_scales(a.row, a.tiling.m);
  if constexpr (kCols) store_preset_scales(a.col, a.tiling.k);
  const Direction *row = kRows ? &a.row : nullptr, *col = kCols ? &a.col : nullptr;
  const Tile t = a.tiling.tile(blockIdx.x);
  const Known known(row, col);
  Strip<T> v[1];
  load_tile<T>(args, t, sh, v);
  if constexpr (kCols) preset_columns<T>(a.col, t, sh);  // while the tile is on its way
  if constexpr (kRows) preset_rows<T>(a.row, t, sh);
  const int32_t of_tile = look_at_tile<T>(row, col, known, v[0], sh);
  if constexpr (kCols) block_columns<T>(a.col, t, of_tile, v[0], sh);
  if constexpr (kRows) {
    block_rows<T>(a.row, t, of_tile, v, sh);
    cast_strip_rows<T>(a.row, t, v[0], sh);
  }
  if constexpr (kCols) {
    cast_strip_columns<T>(a.col, v[0], sh);
    put_columns(a.col, t, sh.codes, t.rows / kWarpRows);
  }
}

__device__ __forceinline__ void raise(int32_t* to, int32_t amax) { atomicMax(to, amax > kInfBits ? kNanBits : amax); }

template <class T>
__global__ void __launch_bounds__(kThreads, 4) amax_dense(const __grid_constant__ StripArgs args) {
  __shared__ StripShared<T> shared;
  StripShared<T>& sh = *held_shared(&shared);
  const CastArgs& a = args.cast;
  if (a.noop && *a.noop) return;
  const int c = threadIdx.x, lane = c % kWarp, i = c / kWarp * kWarpRows + own_row();
  const Tile t = a.tiling.tile(blockIdx.x);
  Strip<T> v[1];
  load_tile<T>(args, t, sh, v);
  share_amaxes<T>(v[0], sh);
  __syncthreads();
  if (c < t.cols) raise(args.of_columns + t.k0 + c, column_amax<kWarps, T>(c, 0, sh));
  const int32_t of_row = row_amax<T>(v);
  if (lane < kWarpRows && i < t.rows) raise(args.of_rows + t.m0 + i, of_row);
}

__global__ void __launch_bounds__(kThreads)
    clear_amaxes(int32_t* of_rows, int64_t rows, int32_t* of_columns, int64_t columns, const int32_t* noop) {
  if (noop && *noop) return;
  const int64_t i = blockIdx.x * static_cast<int64_t>(kThreads) + threadIdx.x;
  if (i < rows) of_rows[i] = 0;
  if (i < columns) of_columns[i] = 0;
}

template <class T>
void launch_type(const StripArgs& a, bool rows, bool cols, const Where& where) {
  const auto along_rows = cols ? cast_dense<T, true, true> : cast_dense<T, true, false>;
  const auto kernel = rows ? along_rows : cast_dense<T, false, true>;
  launch(kernel, grid_for(a.cast.items), 0, where, "quantize", a);
}

}  // namespace

bool fits_dense_strips(const CastArgs& a, bool rows, bool cols) {
  if (!fits_tensor(a) || a.x.rows > kLongestRow) return false;
  return (!rows || fits_rows(a.row, !cols)) && (!cols || fits_columns(a.col, !rows));
}

void launch_dense_strips(const StripArgs& a, bool rows, bool cols, const Where& where) {
  if (a.cast.x.dtype == Dtype::bf16) return launch_type<BFloat16>(a, rows, cols, where);
  launch_type<Float16>(a, rows, cols, where);
}

void launch_dense_amaxes(const StripArgs& a, const Where& where) {
  const int64_t rows = a.cast.x.rows, columns = a.cast.x.cols;
  const unsigned clears = grid_for((max(rows, columns) + kThreads - 1) / kThreads);
  launch(clear_amaxes, clears, 0, where, "quantize", a.of_rows, rows, a.of_columns, columns, a.cast.noop);
  const auto kernel = a.cast.x.dtype == Dtype::bf16 ? amax_dense<BFloat16> : amax_dense<Float16>;
  launch(kernel, grid_for(a.cast.items), 0, where, "quantize", a);
}

}  // namespace mh::cuda
