// Outer amaxes on CUDA, and NVFP4's outer decode scales. A thread reads up to 16 elements along one axis (a Hadamard
// group where the format transforms), the block or the output collects maxima as integers.
#include <cuda_runtime.h>

#include "tile.cuh"

namespace mh::cuda {
namespace {

// Runs of 16 along one axis of a matrix. `lanes_across`: neighbouring threads take neighbouring runs across it.
struct Runs {
  int64_t along, across;
  int64_t stride_along, stride_across;
  int64_t per_line;  // runs along one line
  bool lanes_across;
  int64_t count() const { return per_line * across; }
};

Runs make_runs(const AmaxArgs& a) {
  // a tensor's amax may be read along either axis: the one whose neighbours across it are neighbours in memory
  const bool free_choice = !a.spec.outer_rows && !a.spec.rht;
  const bool down = free_choice ? a.x.col_stride == 1 : a.spec.axis == 1;
  Runs r{};
  r.along = down ? a.x.rows : a.x.cols;
  r.across = down ? a.x.cols : a.x.rows;
  r.stride_along = down ? a.x.row_stride : a.x.col_stride;
  r.stride_across = down ? a.x.col_stride : a.x.row_stride;
  r.per_line = (r.along + kHadamardSize - 1) / kHadamardSize;
  r.lanes_across = r.stride_across == 1;
  return r;
}

template <class T>
__device__ int32_t run_amax(const typename T::Raw* first, int64_t stride, int n, bool rht, bool keep_nan) {
  float v[kHadamardSize];
  MH_UNROLL
  for (int e = 0; e < kHadamardSize; ++e) v[e] = e < n ? T::load(first[e * stride]) : 0.0f;
  if (rht && n == kHadamardSize) hadamard16(v, false);
  int32_t most = 0;
  MH_UNROLL
  for (int e = 0; e < kHadamardSize; ++e) {
    const int32_t bits = abs_bits(v[e]);
    most = max_bits(most, bits <= kInfBits ? bits : (keep_nan ? kNanBits : 0));
  }
  return most;
}

// Bits of a block's largest value, in thread 0.
__device__ int32_t block_max(int32_t most) {
  __shared__ int32_t collected;
  if (threadIdx.x == 0) collected = 0;
  __syncthreads();
  most = __reduce_max_sync(0xffffffffu, most);
  if (threadIdx.x % 32 == 0) atomicMax(&collected, most);
  __syncthreads();
  return collected;
}

template <class T>
__global__ void __launch_bounds__(kThreads) amax_runs(AmaxArgs a, Runs r, int64_t count) {
  const bool keep_nan = a.spec.scale_rule != ScaleRule::e4m3_amax;
  const auto* x = static_cast<const typename T::Raw*>(a.x.data);
  int32_t* out = reinterpret_cast<int32_t*>(a.out);
  int32_t most = 0;
  const int64_t threads = gridDim.x * static_cast<int64_t>(kThreads);
  for (int64_t at = blockIdx.x * static_cast<int64_t>(kThreads) + threadIdx.x; at < count; at += threads) {
    const int64_t line = r.lanes_across ? at % r.across : at / r.per_line;
    const int64_t run = r.lanes_across ? at / r.across : at % r.per_line;
    const int64_t first = run * kHadamardSize, left = r.along - first;
    const int n = static_cast<int>(left < kHadamardSize ? left : kHadamardSize);
    const auto* elements = x + line * r.stride_across + first * r.stride_along;
    const int32_t bits = run_amax<T>(elements, r.stride_along, n, a.spec.rht, keep_nan);
    if (a.spec.outer_rows)
      atomicMax(&out[line], bits);
    else
      most = max_bits(most, bits);
  }
  if (a.spec.outer_rows) return;
  most = block_max(most);
  if (threadIdx.x == 0) atomicMax(out, most);
}

template <class T>
struct Amax {
  static void run(const AmaxArgs& args, const Where& where) {
    const Runs runs = make_runs(args);
    constexpr int64_t kGrid = 132 * 16;  // a few waves of a large GPU; each block ends in an atomic
    const int64_t blocks = (runs.count() + kThreads - 1) / kThreads;
    const unsigned grid = grid_for(blocks < kGrid ? blocks : kGrid);
    amax_runs<T><<<grid, kThreads, 0, stream_of(where)>>>(args, runs, runs.count());
    check(cudaGetLastError(), "amax");
  }
};

__global__ void __launch_bounds__(kThreads) outer_scales(const float* amax, float* out, int64_t n) {
  const int64_t threads = gridDim.x * static_cast<int64_t>(kThreads);
  for (int64_t i = blockIdx.x * static_cast<int64_t>(kThreads) + threadIdx.x; i < n; i += threads)
    out[i] = 1.0f / nvfp4_outer_encode(amax[i]);
}

}  // namespace

void amax(const AmaxArgs& args, const Where& where) {
  const OnDevice on(where, "amax");
  const int64_t n = !args.spec.outer_rows ? 1 : (args.spec.axis == 0 ? args.x.rows : args.x.cols);
  if (n == 0) return;
  check(cudaMemsetAsync(args.out, 0, static_cast<size_t>(n) * sizeof(float), stream_of(where)), "amax");
  if (args.x.rows * args.x.cols == 0) return;
  by_dtype<Amax>(args.x.dtype, args, where);
}

void outer_scale(const float* amax, float* out, int64_t n, const Where& where) {
  const OnDevice on(where, "outer_scale");
  outer_scales<<<grid_for((n + kThreads - 1) / kThreads), kThreads, 0, stream_of(where)>>>(amax, out, n);
  check(cudaGetLastError(), "outer_scale");
}

}  // namespace mh::cuda
