// Outer amaxes on CUDA, and NVFP4's outer decode scales. A warp reads lines of 16 along K (one a thread) or along M (two
// neighbouring columns a thread), after the Hadamard transform where the format has one.
#include "amax.h"

#include "largest.cuh"
#include "matrix.h"

namespace mh::cuda {
namespace {

constexpr int kWarps = kThreads / kWarp;
constexpr int kStrip = 2 * kWarp;            // columns a warp reads side by side
constexpr int64_t kBlocks = 132 * 8;         // fills a large GPU once
constexpr int64_t kFlatCols = 2 * kLine * kWarp;  // a contiguous tensor is read as rows of what a warp takes at once
constexpr int64_t kMostAlone = 4 * kWarps * kFlatCols;  // elements for one thread block: no launch for zeros first

struct AmaxPass {
  Matrix x;
  bool vector;  // aligned for the widest loads of the pass
  Target targets[2];
  int num_targets;
  bool alone;  // no two thread blocks have a target in common; else they raise it, from 0
  const int32_t* noop;

  __host__ __device__ bool wants(bool turned) const {
    for (int i = 0; i < num_targets; ++i)
      if (targets[i].turned == turned) return true;
    return false;
  }
};

__device__ void put(const AmaxPass& a, float* out, int32_t most) {
  if (a.alone)
    *out = bits_float(static_cast<uint32_t>(most));
  else
    atomicMax(reinterpret_cast<int32_t*>(out), most);
}

// A thread block's largest into the output; every thread calls it.
__device__ void put_largest(const AmaxPass& a, float* out, int32_t most) {
  __shared__ int32_t collected;
  __syncthreads();
  if (threadIdx.x == 0) collected = 0;
  __syncthreads();
  most = __reduce_max_sync(kAllLanes, most);
  if (threadIdx.x % kWarp == 0) atomicMax(&collected, most);
  __syncthreads();
  if (threadIdx.x == 0) put(a, out, collected);
}

// Lines along K, a row a warp at a time, two lines a thread at once.
template <class T>
__global__ void __launch_bounds__(kThreads) amax_along_k(const __grid_constant__ AmaxPass a) {
  if (a.noop && *a.noop) return;
  const int lane = threadIdx.x % kWarp;
  Largest<T> all;
  const int64_t lines = (a.x.cols + kLine - 1) / kLine;
  for (int64_t i = blockIdx.x * kWarps + threadIdx.x / kWarp; i < a.x.rows; i += gridDim.x * kWarps) {
    Largest<T> row;
    const auto* base = static_cast<const typename T::Raw*>(a.x.data) + i * a.x.row_stride;
    for (int64_t l = lane; l < lines; l += 2 * kWarp) {
      Pair<T> line[2][kLine / 2];
      int n[2];
      MH_UNROLL
      for (int h = 0; h < 2; ++h) {
        const int64_t first = (l + h * kWarp) * kLine, left = a.x.cols - first;
        n[h] = static_cast<int>(min(max(left, int64_t{0}), int64_t{kLine}));
        read_pairs<T>(base + (n[h] ? first * a.x.col_stride : 0), a.x.col_stride, n[h], a.vector, line[h]);
      }
      MH_UNROLL
      for (int h = 0; h < 2; ++h) row.add_line(line[h], n[h], a.wants(false), a.wants(true));
    }
    for (int t = 0; t < a.num_targets; ++t) {
      if (!a.targets[t].per_line) continue;
      const int32_t most = __reduce_max_sync(kAllLanes, row.get(a.targets[t]));
      if (lane == 0) a.targets[t].out[i] = bits_float(static_cast<uint32_t>(most));
    }
    all.merge(row);
  }
  for (int t = 0; t < a.num_targets; ++t)
    if (!a.targets[t].per_line) put_largest(a, a.targets[t].out, all.get(a.targets[t]));
}

// Lines along M, 16 rows of 64 columns a warp at a time.
template <class T>
__global__ void __launch_bounds__(kThreads) amax_along_m(const __grid_constant__ AmaxPass a) {
  __shared__ int32_t columns[kStrip];
  if (a.noop && *a.noop) return;
  const int c = threadIdx.x % kWarp * 2;
  const int64_t strips = (a.x.cols + kStrip - 1) / kStrip, j = blockIdx.x % strips * kStrip + c;
  const int64_t step = gridDim.x / strips * kWarps * kLine;
  Largest<T> most;
  for (int64_t i = (blockIdx.x / strips * kWarps + threadIdx.x / kWarp) * kLine; i < a.x.rows; i += step) {
    const auto* first = static_cast<const typename T::Raw*>(a.x.data) + i * a.x.row_stride + j * a.x.col_stride;
    const int n = static_cast<int>(min(a.x.rows - i, int64_t{kLine}));
    Pair<T> pairs[kLine];
    MH_UNROLL
    for (int e = 0; e < kLine; ++e) {
      const auto* at = first + e * a.x.row_stride;
      if (a.vector && e < n && j + 1 < a.x.cols)
        pairs[e] = *reinterpret_cast<const Pair<T>*>(at);
      else
        pairs[e] = Pair<T>::of(e < n && j < a.x.cols ? load_raw<T>(at[0]) : 0.0f,
                               e < n && j + 1 < a.x.cols ? load_raw<T>(at[a.x.col_stride]) : 0.0f);
    }
    if (a.wants(false)) most.add_raw(pairs);
    if (!a.wants(true)) continue;
    MH_UNROLL
    for (int column = 0; column < 2; ++column) {
      float x[kLine];
      MH_UNROLL
      for (int e = 0; e < kLine; ++e) x[e] = column ? pairs[e].hi() : pairs[e].lo();
      most.add_turned(x, n == kLine, column);
    }
  }
  for (int t = 0; t < a.num_targets; ++t) {
    const Target& target = a.targets[t];
    if (!target.per_line) {
      put_largest(a, target.out, most.get(target));
      continue;
    }
    __syncthreads();
    if (threadIdx.x < kStrip) columns[threadIdx.x] = 0;
    __syncthreads();
    for (int column = 0; column < 2; ++column) atomicMax(&columns[c + column], most.get(target, column));
    __syncthreads();
    const int64_t out = blockIdx.x % strips * kStrip + threadIdx.x;
    if (threadIdx.x < kStrip && out < a.x.cols) put(a, target.out + out, columns[threadIdx.x]);
  }
}

// Zeros for the targets that thread blocks raise, and for those of an empty matrix.
__global__ void __launch_bounds__(kThreads) clear(const __grid_constant__ AmaxPass a, int64_t lines) {
  if (a.noop && *a.noop) return;
  for (int t = 0; t < a.num_targets; ++t) {
    const int64_t n = a.targets[t].per_line ? lines : 1;
    for (int64_t i = blockIdx.x * static_cast<int64_t>(kThreads) + threadIdx.x; i < n; i += gridDim.x * static_cast<int64_t>(kThreads))
      a.targets[t].out[i] = 0.0f;
  }
}

// How a direction's amax is read: along M, along K, or either way.
enum class Way { any, along_k, along_m };

Way way_of(const FormatSpec& spec, bool swapped) {
  if (!spec.outer_rows && !spec.rht) return Way::any;
  return (spec.axis == 1) != swapped ? Way::along_m : Way::along_k;
}

void run_pass(AmaxPass a, Way way, const Where& where) {
  const bool down = way == Way::along_m;
  bool all_of_tensor = true, any_of_tensor = false;
  for (int t = 0; t < a.num_targets; ++t)
    (a.targets[t].per_line ? all_of_tensor : any_of_tensor) = !a.targets[t].per_line;
  const int64_t n = a.x.rows * a.x.cols, lines = down ? a.x.cols : a.x.rows;
  if (!down && all_of_tensor && a.x.col_stride == 1 && a.x.row_stride == a.x.cols && a.x.cols % kLine == 0 && n % kFlatCols == 0) {
    a.x.rows = n / kFlatCols;
    a.x.cols = a.x.row_stride = kFlatCols;
  }
  const unsigned clears = grid_for((lines + kThreads - 1) / kThreads);
  const auto from_zeros = [&] { launch(clear, clears, 0, where, "amax", a, lines); };
  if (n == 0) return from_zeros();
  const int64_t size = a.x.dtype == Dtype::f32 ? 4 : 2;
  const int width = access_width(a.x.data, a.x.row_stride * size);
  a.vector = a.x.col_stride == 1 && width >= (down ? 2 * size : kVector);
  const int64_t strips = (a.x.cols + kStrip - 1) / kStrip;
  int64_t blocks = (a.x.rows + kWarps - 1) / kWarps;
  if (down) {
    const int64_t tall = (a.x.rows + kWarps * kLine - 1) / (kWarps * kLine), deep = (kBlocks + strips - 1) / strips;
    blocks = strips * (deep < tall ? deep : tall);
  } else if (any_of_tensor && n <= kMostAlone) {
    blocks = 1;
  } else if (blocks > kBlocks) {
    blocks = kBlocks;
  }
  // a row's amax is one warp's, a column's that of the thread blocks of its strip
  a.alone = !(any_of_tensor && blocks > 1) && !(down && !all_of_tensor && blocks > strips);
  if (!a.alone) from_zeros();
  by_dtype(a.x.dtype, [&](auto t) {
    using T = decltype(t);
    launch(down ? amax_along_m<T> : amax_along_k<T>, static_cast<unsigned>(blocks), 0, where, "amax", a);
  });
}

__global__ void __launch_bounds__(kThreads) outer_scales(const float* amax, float* out, int64_t n) {
  const int64_t threads = gridDim.x * static_cast<int64_t>(kThreads);
  for (int64_t i = blockIdx.x * static_cast<int64_t>(kThreads) + threadIdx.x; i < n; i += threads)
    out[i] = 1.0f / nvfp4_outer_encode(amax[i]);
}

}  // namespace

void measure(const PairArgs& args, const Where& where) {
  const QuantizeArgs* wanted[2];
  int num_wanted = 0;
  if (args.has_row && args.row.measured && !args.row.fixed_scale) wanted[num_wanted++] = &args.row;
  if (args.has_col && args.col.measured && !args.col.fixed_scale) wanted[num_wanted++] = &args.col;
  if (num_wanted == 0) return;
  const Matrix x = contiguous_strides(wanted[0]->x);
  const bool swapped = x.col_stride != 1 && x.row_stride == 1;
  AmaxPass pass{};
  pass.x = swapped ? transposed(x) : x;
  pass.noop = wanted[0]->noop;
  Way way = Way::any;
  for (int i = 0; i < num_wanted; ++i) {
    const FormatSpec& spec = wanted[i]->spec;
    const Way own = way_of(spec, swapped);
    if (own != Way::any && way != Way::any && own != way) {
      run_pass(pass, way, where);
      pass.num_targets = 0, way = Way::any;
    }
    if (own != Way::any) way = own;
    pass.targets[pass.num_targets++] = Target{wanted[i]->measured, spec.outer_rows, spec.rht, spec.scale_rule != ScaleRule::e4m3_amax};
  }
  run_pass(pass, way, where);
}

void amax(const AmaxArgs& args, const Where& where) {
  const OnDevice on(where, "amax");
  PairArgs p{};
  p.has_row = true;
  p.row.spec = args.spec;
  p.row.x = args.x;
  p.row.measured = args.out;
  measure(p, where);
}

void outer_scale(const float* amax, float* out, int64_t n, const Where& where) {
  const OnDevice on(where, "outer_scale");
  launch(outer_scales, grid_for((n + kThreads - 1) / kThreads), 0, where, "outer_scale", amax, out, n);
}

}  // namespace mh::cuda
