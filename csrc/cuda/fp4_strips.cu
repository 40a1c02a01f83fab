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
