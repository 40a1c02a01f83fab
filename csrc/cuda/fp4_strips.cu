// Casts of whole 16-bit tensors by strips with NVFP4 in one direction or both (fp4_strips.cuh).
#include "dense_strips.h"
#include "fp4_strips.cuh"

namespace mh::cuda {
namespace {

template <class T, Kind row, Kind col>
void launch_kinds(const StripArgs& a, const Where& where) {
  const int parts = (col == Kind::fp4_mixed && a.cast.col.spec.sr) + kIsFp4<row>;  // draws and rows
  const int bytes = parts * kWarps * static_cast<int>(sizeof(WarpRows));
  const auto kernel = cast_fp4_strips<T, row, col>;
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes), "quantize");
  launch(kernel, grid_for(a.cast.items), bytes, where, "quantize", a);
}

template <class T>
void launch_type(const StripArgs& a, Kind row, Kind col, const Where& where) {
  by_kind<T>(row, [&](auto r) {
    by_kind<T>(col, [&](auto c) {
      constexpr Kind kRow = decltype(r)::value, kCol = decltype(c)::value;
      if constexpr (kIsFp4<kRow> || kIsFp4<kCol>) launch_kinds<T, kRow, kCol>(a, where);
    });
  });
}

}  // namespace

void launch_fp4_strips(const StripArgs& a, Kind row, Kind col, const Where& where) {
  if (a.cast.x.dtype == Dtype::bf16) return launch_type<BFloat16>(a, row, col, where);
  launch_type<Float16>(a, row, col, where);
}

}  // namespace mh::cuda
