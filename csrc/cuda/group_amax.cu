// Amaxes of every group's columns, and of rows, in one read, of tensors that strips do not fit. A warp takes 16 rows of a
// block, 16 bytes a lane side by side, and keeps what it finds of its columns; rows are asked of a warp's lanes, columns
// of the thread block's warps.
#include "amax.h"
#include "launch.h"
#include "largest.cuh"
#include "matrix.h"
#include "tile.cuh"

namespace mh::cuda {
namespace {

constexpr int kLanes = 32;
constexpr int kWarpsHere = kThreads / kLanes;
constexpr int kWarpRows = kPanelRows / kWarpsHere;
constexpr int kRowsLoaded = 8;  // on their way at once

struct GroupAmaxPass {
  Matrix x;
  Groups groups;
  int32_t *of_columns, *of_rows;
  bool vector;
  uint32_t strips;  // across the columns
};

template <class T>
constexpr int kLaneCols = kVector / static_cast<int>(sizeof(typename T::Raw));

template <class T>
__global__ void __launch_bounds__(kThreads) amax_of_groups(const __grid_constant__ GroupAmaxPass a) {
  constexpr int kCols = kLaneCols<T>, kStripCols = kLanes * kCols;
  __shared__ int32_t found[kWarpsHere][kStripCols];
  const Groups& g = a.groups;
  const uint32_t block = blockIdx.x / a.strips, strip = blockIdx.x % a.strips;
  if (static_cast<int>(block) >= g.ends[g.groups - 1]) return;
  const int lane = threadIdx.x % kLanes, warp = threadIdx.x / kLanes;
  const int first = g.blocks[g.count + block] + warp * kWarpRows, rows = g.blocks[2 * g.count + block] - warp * kWarpRows;
  const int64_t col = static_cast<int64_t>(strip) * kStripCols + lane * kCols;
  const int n = static_cast<int>(min(max(a.x.cols - col, int64_t{0}), int64_t{kCols}));
  const auto* base = static_cast<const typename T::Raw*>(a.x.data) + (n ? col * a.x.col_stride : 0);
  const auto parts = static_cast<uint32_t>(g.parts);
  PairAmax<T> of_columns[kCols / 2];
  int32_t mine = 0;  // lane r keeps row r
#pragma unroll 1
  for (int r = 0; r < kWarpRows; r += kRowsLoaded) {
    Pair<T> some[kRowsLoaded][kCols / 2];
    MH_UNROLL
    for (int u = 0; u < kRowsLoaded; ++u) {
      const bool inside = r + u < rows;
      int64_t row = inside ? first + r + u : 0;
      if (g.choice && inside) row = static_cast<uint32_t>(max(g.choice[row], 0)) / parts;
      read_pairs<T>(base + row * a.x.row_stride, a.x.col_stride, inside ? n : 0, a.vector, some[u]);
    }
    MH_UNROLL
    for (int u = 0; u < kRowsLoaded; ++u) {
      PairAmax<T> of_row;
      MH_UNROLL
      for (int e = 0; e < kCols / 2; ++e) of_row.add(some[u][e]), of_columns[e].add(some[u][e]);
      if (!a.of_rows) continue;
      const int32_t most = __reduce_max_sync(0xffffffffu, of_row.both());
      if (lane == r + u) mine = most;
    }
  }
  if (a.of_rows && lane < min(rows, kWarpRows)) atomicMax(a.of_rows + first + lane, mine);
  MH_UNROLL
  for (int e = 0; e < kCols / 2; ++e) {
    found[warp][lane * kCols + 2 * e] = of_columns[e].lo();
    found[warp][lane * kCols + 2 * e + 1] = of_columns[e].hi();
  }
  __syncthreads();
  const int64_t group = g.blocks[block];
  for (int c = threadIdx.x; c < kStripCols; c += kThreads) {
    const int64_t at = static_cast<int64_t>(strip) * kStripCols + c;
    if (at >= a.x.cols) break;
    int32_t most = found[0][c];
    MH_UNROLL
    for (int w = 1; w < kWarpsHere; ++w) most = max_bits(most, found[w][c]);
    atomicMax(a.of_columns + group * a.x.cols + at, most);
  }
}

}  // namespace

void group_amax(const GroupAmaxArgs& args, const Where& where) {
  const OnDevice on(where, "group_amax");
  if (amax_by_strips(args, where)) return;
  const Groups& groups = args.cast.groups;
  GroupAmaxPass pass{contiguous_strides(args.cast.col.x), groups, args.of_columns, args.of_rows, false, 0};
  const int64_t size = pass.x.dtype == Dtype::f32 ? 4 : 2;
  pass.vector = pass.x.col_stride == 1 && access_width(pass.x.data, pass.x.row_stride * size) == kVector;
  const int64_t strip = kLanes * kVector / size, strips = (pass.x.cols + strip - 1) / strip;
  const int64_t items = strips * groups.count;
  if (items == 0) return;
  if (items > kMaxGrid) throw std::runtime_error("megatron_hybrid._C_cuda: a matrix of more than 2^44 elements");
  pass.strips = static_cast<uint32_t>(strips);
  by_dtype(pass.x.dtype, [&](auto t) {
    launch(amax_of_groups<decltype(t)>, static_cast<unsigned>(items), 0, where, "group_amax", pass);
  });
}

}  // namespace mh::cuda
