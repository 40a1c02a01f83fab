// Dequantize on CUDA: the codes of a tile come into shared memory as they are stored, its scales as FP32 beside them, and
// each thread decodes lines of 16 along the stored rows.
#include "tile.cuh"

namespace mh::cuda {
namespace {

constexpr int kWarp = 32;
constexpr int kStripRows = 32;
constexpr int kMaxScales = kTile * kLinesAcross;

struct DecodeArgs {
  FormatSpec spec;
  int block_m_log, block_k_log;  // of a tile's part of a block
  const uint8_t* codes;
  int64_t pitch;
  bool transposed;
  int width;
  const void* scale;
  int64_t scale_step_m, scale_step_k;
  const float* amax;
  bool outer, inverse_rht;
  Matrix out;
  int out_width;
  Tiling tiling;
};

struct Scales {
  float block[kMaxScales];
  float outer[kTile];  // one a row or column, or the first for all
};

__device__ float stored_scale(const DecodeArgs& a, int64_t at) {
  switch (a.spec.scale_rule) {
    case ScaleRule::e8m0: return e8m0_decode(static_cast<const uint8_t*>(a.scale)[at]);
    case ScaleRule::e4m3_amax: return decode<E4M3>(static_cast<const uint8_t*>(a.scale)[at]);
    default: return static_cast<const float*>(a.scale)[at];
  }
}

__device__ int scale_of(const DecodeArgs& a, int i, int j) {
  return (i >> a.block_m_log) * (kTile >> a.block_k_log) + (j >> a.block_k_log);
}

template <bool fp4>
__device__ void load_scales(const DecodeArgs& a, const Tile& t, Scales& s) {
  const int across = kTile >> a.block_k_log, n = across * (kTile >> a.block_m_log);
  for (int b = threadIdx.x; b < n; b += kThreads) {
    const int i = b / across << a.block_m_log, j = b % across << a.block_k_log;
    if (i >= t.rows || j >= t.cols) continue;
    const int64_t row = a.spec.block_m ? (t.m0 + i) >> a.block_m_log : 0, col = a.spec.block_k ? (t.k0 + j) >> a.block_k_log : 0;
    s.block[b] = stored_scale(a, row * a.scale_step_m + col * a.scale_step_k);
  }
  if (!fp4) return;
  const bool down = a.spec.axis == 0;  // one outer scale a row
  const int lines = !a.spec.outer_rows ? 1 : (down ? t.rows : t.cols);
  const int64_t first = !a.spec.outer_rows ? 0 : (down ? t.m0 : t.k0);
  for (int l = threadIdx.x; l < lines; l += kThreads)
    s.outer[l] = a.outer ? 1.0f / nvfp4_outer_encode(a.amax[first + l]) : 1.0f;
}

// Codes of the line at (i, j): from one unit where stored rows run along it, else gathered.
template <Kind kind, bool down>
__device__ __forceinline__ Codes<kind> staged_line(const DecodeArgs& a, const uint8_t* staging, int i, int j) {
  Codes<kind> codes;
  if (a.transposed == down) {
    const uint8_t* from = staging + unit_offset<kind>(down ? j : i, (down ? i : j) / kLine);
    memcpy(codes.w, __builtin_assume_aligned(from, Codes<kind>::kBytes), Codes<kind>::kBytes);
    return codes;
  }
  if constexpr (kIsFp4<kind>) {  // only FP4 has a transform, which needs lines across the stored rows
    codes.w[0] = codes.w[1] = 0;
    MH_UNROLL
    for (int e = 0; e < kLine; ++e) {
      const int row = (down ? i : j) + e, at = down ? j : i;
      const uint8_t byte = staging[unit_offset<kind>(row, at / kLine) + at % kLine / 2];
      codes.w[e / 8] |= (byte >> (at % 2 * 4) & 15u) << (e % 8 * 4);
    }
  }
  return codes;
}

template <Kind kind, bool down>
__device__ __forceinline__ void decode_scaled(const DecodeArgs& a, const Tile& t, const uint8_t* staging, const Scales& s,
                                              int i, int j, float (&x)[kLine]) {
  const bool shared = (down ? a.block_m_log : a.block_k_log) > 0;  // the line's elements have one scale
  const float scale = shared ? s.block[scale_of(a, i, j)] : 1.0f;
  decode_line<kind>(a.spec.element, staged_line<kind, down>(a, staging, i, j), scale, x);
  if (shared && !kIsFp4<kind>) {
    MH_UNROLL
    for (int e = 0; e < kLine; ++e) x[e] = x[e] * scale;
  } else if (!shared) {
    MH_UNROLL
    for (int e = 0; e < kLine; ++e) x[e] = x[e] * s.block[scale_of(a, i + (down ? e : 0), j + (down ? 0 : e))];
  }
  if constexpr (kIsFp4<kind>) {
    const bool by_row = a.spec.outer_rows && a.spec.axis == 0, by_col = a.spec.outer_rows && a.spec.axis == 1;
    MH_UNROLL
    for (int e = 0; e < kLine; ++e)
      x[e] = x[e] * s.outer[by_row ? i + (down ? e : 0) : (by_col ? j + (down ? 0 : e) : 0)];
    const int left = down ? t.rows - i : t.cols - j;
    if (a.spec.rht && a.inverse_rht && left >= kLine) hadamard16(x, true);
  }
}

template <class T>
__device__ __forceinline__ typename T::Raw* out_at(const DecodeArgs& a, const Tile& t, int i, int j) {
  return static_cast<typename T::Raw*>(a.out.data) + (t.m0 + i) * a.out.row_stride + (t.k0 + j) * a.out.col_stride;
}

// Writes a line along K. Two neighbouring threads swap halves, so that each store of a warp fills whole sectors.
template <class T>
__device__ void store_row_line(const DecodeArgs& a, const Tile& t, int i, int j, const float (&x)[kLine]) {
  constexpr int kWords = kLine / 2 * Pair<T>::kWords;
  const bool inside = i < t.rows && j < t.cols;
  if (sizeof(typename T::Raw) == 2 && a.out_width == kVector && t.cols == kTile) {
    uint32_t w[kWords];
    Pair<T> pairs[kLine / 2];
    store_pairs<T>(x, pairs);
    MH_UNROLL
    for (int e = 0; e < kLine / 2; ++e) w[e] = pairs[e].w[0];
    const bool odd = j / kLine % 2;
    uint32_t first[4], second[4];
    MH_UNROLL
    for (int e = 0; e < 4; ++e) {
      const uint32_t other = __shfl_xor_sync(0xffffffffu, odd ? w[e] : w[4 + e], 1);
      first[e] = odd ? other : w[e];
      second[e] = odd ? w[4 + e] : other;
    }
    if (!inside) return;
    auto* to = reinterpret_cast<uint4*>(out_at<T>(a, t, i, odd ? j - kLine : j)) + odd;
    to[0] = {first[0], first[1], first[2], first[3]};
    to[2] = {second[0], second[1], second[2], second[3]};
    return;
  }
  if (!inside) return;
  MH_UNROLL
  for (int e = 0; e < kLine; ++e)
    if (j + e < t.cols) *out_at<T>(a, t, i, j + e) = T::store(x[e]);
}

template <class T, Kind kind>
__device__ void decode_rows(const DecodeArgs& a, const Tile& t, const uint8_t* staging, const Scales& s) {
  const int j = threadIdx.x % kLinesAcross * kLine;
#pragma unroll 1
  for (int i = threadIdx.x / kLinesAcross; i < kTile; i += kRowsAtOnce) {
    float x[kLine];
    decode_scaled<kind, false>(a, t, staging, s, i, j, x);
    store_row_line<T>(a, t, i, j, x);
  }
}

template <class T, Kind kind>
__device__ void decode_columns(const DecodeArgs& a, const Tile& t, const uint8_t* staging, const Scales& s) {
  const int warp = threadIdx.x / kWarp, j = warp % 2 * (kTile / 2) + threadIdx.x % kWarp * 2;
  const bool pairs = a.out_width >= 2 * static_cast<int>(sizeof(typename T::Raw)) && j + 1 < t.cols;
#pragma unroll 1
  for (int i = warp / 2 * kStripRows; i < (warp / 2 + 1) * kStripRows; i += kLine) {
    float x[2][kLine];
    decode_scaled<kind, true>(a, t, staging, s, i, j, x[0]);
    decode_scaled<kind, true>(a, t, staging, s, i, j + 1, x[1]);
    MH_UNROLL
    for (int e = 0; e < kLine; ++e) {
      if (i + e >= t.rows || j >= t.cols) break;
      if (pairs) {
        *reinterpret_cast<Pair<T>*>(out_at<T>(a, t, i + e, j)) = Pair<T>::of(x[0][e], x[1][e]);
      } else {
        *out_at<T>(a, t, i + e, j) = T::store(x[0][e]);
        if (j + 1 < t.cols) *out_at<T>(a, t, i + e, j + 1) = T::store(x[1][e]);
      }
    }
  }
}

template <class T, Kind kind>
__global__ void __launch_bounds__(kThreads, 4) decode_tiles(const __grid_constant__ DecodeArgs a) {
  __shared__ uint4 memory[kTile * Codes<kind>::kBytes * kLinesAcross / kVector];
  __shared__ Scales scales;
  uint8_t* staging = reinterpret_cast<uint8_t*>(memory);
  constexpr int kPerByte = kIsFp4<kind> ? 2 : 1;
  const Tile t = a.tiling.tile(blockIdx.x);
  const int64_t row = a.transposed ? t.k0 : t.m0, first = a.transposed ? t.m0 : t.k0;
  const int rows = a.transposed ? t.cols : t.rows, cols = a.transposed ? t.rows : t.cols;
  copy_in<kind>(staging, a.codes + row * a.pitch + first / kPerByte, a.pitch, rows, (cols + kPerByte - 1) / kPerByte, a.width);
  load_scales<kIsFp4<kind>>(a, t, scales);
  __syncthreads();
  const bool along_m = a.spec.rht && a.inverse_rht ? a.spec.axis == 1 : a.transposed;
  if (along_m)
    decode_columns<T, kind>(a, t, staging, scales);
  else
    decode_rows<T, kind>(a, t, staging, scales);
}

int log2_of(int power) {
  int log = 0;
  while (1 << log < power) ++log;
  return log;
}

}  // namespace

void dequantize(const DequantizeArgs& args, const Where& where) {
  const OnDevice on(where, "dequantize");
  const Matrix out = contiguous_strides(args.out);
  const bool swapped = out.col_stride != 1 && out.row_stride == 1;  // neighbours along K of what the kernel sees
  const FormatSpec& spec = args.spec;
  const int64_t last = args.in.transposed ? out.rows : out.cols;
  const int64_t scale_pitch = spec.block_k ? (out.cols + spec.block_k - 1) / spec.block_k : 1;
  DecodeArgs a{};
  a.spec = spec;
  if (swapped) {
    a.spec.axis = 1 - spec.axis;
    a.spec.block_m = spec.block_k;
    a.spec.block_k = spec.block_m;
  }
  a.block_m_log = log2_of(a.spec.block_m ? a.spec.block_m : kTile);
  a.block_k_log = log2_of(a.spec.block_k ? a.spec.block_k : kTile);
  a.codes = args.in.codes;
  a.pitch = spec.element == Element::e2m1 ? (last + 1) / 2 : last;
  a.transposed = args.in.transposed != swapped;
  a.width = access_width(a.codes, a.pitch);
  a.scale = args.in.scale;
  a.scale_step_m = swapped ? 1 : scale_pitch;
  a.scale_step_k = swapped ? scale_pitch : 1;
  a.amax = args.in.amax;
  a.outer = args.outer;
  a.inverse_rht = args.inverse_rht;
  a.out = swapped ? transposed(out) : out;
  a.out_width = a.out.col_stride == 1 ? access_width(out.data, a.out.row_stride * (out.dtype == Dtype::f32 ? 4 : 2)) : 0;
  a.tiling = make_tiling(a.out.rows, a.out.cols, false);
  by_dtype(out.dtype, [&](auto t) {
    using T = decltype(t);
    const auto kernel = spec.element == Element::e2m1 ? decode_tiles<T, Kind::fp4> : decode_tiles<T, Kind::fp8>;
    launch(kernel, a.tiling.count, 0, where, "dequantize", a);
  });
}

}  // namespace mh::cuda
