// Casts of whole tensors, and amaxes of their rows and columns in one read, by strips (strip_kernels.cuh): 16-bit
// tensors to FP8 with the scales of `kStripScales` (strip_casts.cuh). Others take the cast of tiles (cast.cuh).
#include "dense_strips.h"
#include "strip_kernels.cuh"

namespace mh::cuda {
namespace {

__global__ void __launch_bounds__(kThreads)
    clear_amaxes(int32_t* of_rows, int64_t rows, int32_t* of_columns, int64_t columns, const int32_t* noop) {
  if (noop && *noop) return;
  const int64_t i = blockIdx.x * static_cast<int64_t>(kThreads) + threadIdx.x;
  if (i < rows) of_rows[i] = 0;
  if (i < columns) of_columns[i] = 0;
}

}  // namespace

bool fits_dense_strips(const CastArgs& a, bool rows, bool cols, bool any) {
  if (!fits_tensor(a) || a.x.rows > kLongestRow) return false;
  if ((a.gate && !kStripProducts) || (a.grad && !kStripGradients)) return false;
  const bool fp4 = (rows && is_fp4(a.row)) || (cols && is_fp4(a.col));
  if (fp4 && (a.gate || a.grad)) return false;
  return (!rows || fits_rows(a.row, !cols, any)) && (!cols || fits_columns(a.col, !rows, any));
}

void launch_dense_strips(const StripArgs& a, bool rows, bool cols, const Where& where) {
  by_narrow(a.cast.x.dtype, [&](auto type) {
    using T = decltype(type);
    by_source<T>(a.cast, [&](auto source) {
      using Source = decltype(source);
      const auto both = cast_strips<T, Source, false, true, true>;
      const auto alone = rows ? cast_strips<T, Source, false, true, false> : cast_strips<T, Source, false, false, true>;
      const auto kernel = rows && cols ? both : alone;
      launch(kernel, grid_for(a.cast.items), 0, where, "quantize", a);
    });
  });
}

void launch_dense_amaxes(const StripArgs& a, const Where& where) {
  const int64_t rows = a.of_rows ? a.cast.x.rows : 0, columns = a.cast.x.cols;
  const unsigned clears = grid_for((max(rows, columns) + kThreads - 1) / kThreads);
  launch(clear_amaxes, clears, 0, where, "quantize", a.of_rows, rows, a.of_columns, columns, a.cast.noop);
  by_narrow(a.cast.x.dtype, [&](auto type) {
    using T = decltype(type);
    launch(amax_strips<T, RowsOf<T>, false>, grid_for(a.cast.items), 0, where, "quantize", a);
  });
}

}  // namespace mh::cuda
