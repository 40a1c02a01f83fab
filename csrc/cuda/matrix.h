// Host-side reading of a strided matrix.
#pragma once

#include "../numerics/format.h"

namespace mh::cuda {

constexpr int kVector = 16;  // bytes of the widest access

// The widest access, in bytes, that an address and a row pitch allow everywhere.
inline int access_width(const void* base, int64_t pitch_bytes) {
  int width = kVector;
  while (reinterpret_cast<uintptr_t>(base) % width || pitch_bytes % width) width /= 2;
  return width;
}

inline Matrix transposed(const Matrix& x) { return Matrix{x.data, x.dtype, x.cols, x.rows, x.col_stride, x.row_stride}; }

// The strides of extents of 1 are arbitrary: as in a row-major matrix instead.
inline Matrix contiguous_strides(Matrix x) {
  if (x.cols == 1) x.col_stride = 1;
  if (x.rows == 1) x.row_stride = x.cols;
  return x;
}

}  // namespace mh::cuda
