// Columns of all groups, the rows beside them, and amaxes, of 16-bit tensors: by strips (strip_kernels.cuh), where the
// cast of other tensors (cast.cuh) holds the tile in shared memory.
#include "strip_kernels.cuh"

namespace mh::cuda {

bool fits_strips(const StripArgs& s, bool rows) {
  const CastArgs& a = s.cast;
  if (!fits_tensor(a) || a.groups.rows > kLongestRow) return false;
  if (s.of_columns) return true;
  return fits_columns(a.col, !rows) && (!rows || fits_rows(a.row, false));
}

void launch_strips(const StripArgs& a, bool rows, const Where& where) {
  by_narrow(a.cast.x.dtype, [&](auto type) {
    using T = decltype(type);
    by_source<T>(a.cast, [&](auto source) {
      using Source = decltype(source);
      const auto cast = rows ? cast_strips<T, Source, true, true, true> : cast_strips<T, Source, true, false, true>;
      const auto kernel = a.of_columns ? amax_strips<T, Source, true> : cast;
      launch(kernel, grid_for(a.cast.items), 0, where, a.of_columns ? "group_amax" : "quantize", a);
    });
  });
}

}  // namespace mh::cuda
