// Casts of whole 16-bit tensors by strips with NVFP4 in one direction or both (fp4_strips.cuh).
#include "dense_strips.h"
#include "fp4_strips.cuh"
#include "strip_sources.cuh"

namespace mh::cuda {
namespace {

// Thread blocks that a multiprocessor runs at once.
template <class T, Kind row, Kind col>
constexpr int kFp4StripBlocks = row == Kind::fp4_mixed || col == Kind::fp4_mixed || !std::is_same_v<T, BFloat16> ? 3 : 4;

template <class T, Kind row, Kind col>
__global__ void __launch_bounds__(kThreads, (kFp4StripBlocks<T, row, col>))
    cast_fp4_strips(const __grid_constant__ StripArgs args) {
  MH_DYNAMIC_SHARED(WarpDraws, all_draws);
  __shared__ Fp4Shared<T> shared;
  Fp4Shared<T>& sh = *held_shared(&shared);
  const CastArgs& a = args.cast;
  if (a.noop && *a.noop) return;
  constexpr bool kRow8 = row == Kind::fp8, kCol8 = col == Kind::fp8, kRow4 = kIsFp4<row>, kCol4 = kIsFp4<col>;
  if constexpr (kRow8) store_preset_scales(a.row, a.x.rows);
  if constexpr (kCol8) store_preset_scales(a.col, a.x.cols);
  const Tile t = a.tiling.tile(blockIdx.x);
  const int warp = threadIdx.x / kWarp;
  const Direction *row8 = kRow8 ? &a.row : nullptr, *col8 = kCol8 ? &a.col : nullptr;
  const Known known(row8, col8);
  Strip<T> v[1];
  find_rows<false>(args, t, t.m0, sh.strip);
  RowsOf<T>::load(args, t, t.m0, sh.strip, v);
  if constexpr (kRow4) load_fp4_outer(a.row, t.m0, t.rows, threadIdx.x, sh.row);
  if constexpr (kCol4) load_fp4_outer(a.col, t.k0, t.cols, static_cast<int>(threadIdx.x) - kTile, sh.col);
  if constexpr (kCol8) preset_columns<T>(a.col, t, sh.strip);
  if constexpr (kRow8) preset_rows<T>(a.row, t, sh.strip);
  if constexpr (col == Kind::fp4_mixed)
    if (a.col.spec.sr) fill_draws(a.col.noise, t.m0 + warp * kWarpRows, t.k0, all_draws[warp]);
  cut<T>(t, v[0]);
  const int32_t of_tile = look_at_tile<T>(row8, col8, known, v[0], sh.strip);
  if (kCol8 && has_line_blocks(a.col.spec)) share_amaxes<T>(v[0], sh.strip);
  if ((kRow4 && is_square(a.row.spec)) || (kCol4 && is_square(a.col.spec))) find_squares<T>(v[0], sh.squares[warp]);
  if constexpr (kRow8) block_rows<T>(a.row, t, of_tile, v, sh.strip);
  __syncthreads();
  if constexpr (kRow8) cast_strip_rows<T>(a.row, t, v[0], sh.strip);
  if constexpr (kRow4) cast_fp4_rows<T, row>(a.row, t, v[0], sh);
  if constexpr (kCol8) {
    block_columns<T>(a.col, t, of_tile, sh.strip);
    cast_strip_columns<T>(a.col, v[0], sh.strip);
    put_columns(a.col, t, sh.strip.codes, t.rows / kWarpRows);
  }
  if constexpr (kCol4) {
    cast_fp4_columns<T, col>(a.col, t, v[0], all_draws + warp, sh);
    __syncthreads();
    put_fp4_columns(a.col, t, sh.staged());
  }
}

template <class T, Kind row, Kind col>
void launch_kinds(const StripArgs& a, const Where& where) {
  const bool draws = col == Kind::fp4_mixed && a.cast.col.spec.sr;
  const int bytes = draws ? kWarps * static_cast<int>(sizeof(WarpDraws)) : 0;
  const auto kernel = cast_fp4_strips<T, row, col>;
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes), "quantize");
  launch(kernel, grid_for(a.cast.items), bytes, where, "quantize", a);
}

// Kernels without options are BF16's only, as those of tiles (cast.cuh).
template <class T>
Kind compiled(Kind kind) {
  return kind == Kind::fp4 && !std::is_same_v<T, BFloat16> ? Kind::fp4_mixed : kind;
}

template <class T, Kind row>
void launch_row(const StripArgs& a, Kind col, const Where& where) {
  switch (compiled<T>(col)) {
    case Kind::none:
      if constexpr (kIsFp4<row>) launch_kinds<T, row, Kind::none>(a, where);
      return;
    case Kind::fp8:
      if constexpr (kIsFp4<row>) launch_kinds<T, row, Kind::fp8>(a, where);
      return;
    case Kind::fp4:
      if constexpr (std::is_same_v<T, BFloat16>) launch_kinds<T, row, Kind::fp4>(a, where);
      return;
    case Kind::fp4_mixed: return launch_kinds<T, row, Kind::fp4_mixed>(a, where);
  }
}

template <class T>
void launch_type(const StripArgs& a, Kind row, Kind col, const Where& where) {
  switch (compiled<T>(row)) {
    case Kind::none: return launch_row<T, Kind::none>(a, col, where);
    case Kind::fp8: return launch_row<T, Kind::fp8>(a, col, where);
    case Kind::fp4:
      if constexpr (std::is_same_v<T, BFloat16>) launch_row<T, Kind::fp4>(a, col, where);
      return;
    case Kind::fp4_mixed: return launch_row<T, Kind::fp4_mixed>(a, col, where);
  }
}

}  // namespace

void launch_fp4_strips(const StripArgs& a, Kind row, Kind col, const Where& where) {
  if (a.cast.x.dtype == Dtype::bf16) return launch_type<BFloat16>(a, row, col, where);
  launch_type<Float16>(a, row, col, where);
}

}  // namespace mh::cuda
