// Dequantize on CUDA. Where stored rows run along those of the output, a thread decodes runs of 8 codes from registers to
// registers, all of them loaded before the first is used. Where they run across, or the transform is undone, the codes of a
// tile come into shared memory as they are stored, and a thread decodes lines of 16.
#include "tile.cuh"

namespace mh::cuda {
namespace {

constexpr int kWarp = 32;
constexpr int kStripRows = 32;
constexpr int kRun = 8;  // 16 bytes of a 16-bit output
// A thread block's part in runs. Its scales fill sectors: those of NVFP4 along its rows, and bytes down its columns.
constexpr int kRunRows = 32, kRunCols = 512;
constexpr int kRunsAcross = kRunCols / kRun, kRunStep = kThreads / kRunsAcross, kRuns = kRunRows / kRunStep;
using RunTiling = TilingBy<kRunRows, kRunCols>;

struct DecodeArgs {
  FormatSpec spec;
  int block_m_log, block_k_log;  // of a tile's part of a block
  const uint8_t* codes;
  int64_t pitch;
  bool transposed;
  int width;
  const uint8_t* scale;
  int64_t scale_step_m, scale_step_k;  // bytes from a block to the next one, 0 where one is as tall or wide as the matrix
  const float* amax;
  bool outer, inverse_rht;
  Matrix out;
  int out_width;
  bool vector;  // runs are read and written whole
  Tiling tiling;
  RunTiling run_tiling;
};

template <class E>
constexpr Kind kKind = std::is_same_v<E, E2M1> ? Kind::fp4 : Kind::fp8;

template <class E>
__device__ __forceinline__ bool has_byte_scales(const FormatSpec& spec) {
  return kIsFp4<kKind<E>> || spec.scale_rule == ScaleRule::e8m0;
}

// The scale of the block at (i, j) of the tile, as stored: a byte, or FP32's bits. A tile is no taller than the blocks it is
// a part of, or starts where a block does.
template <class E>
__device__ __forceinline__ uint32_t stored_scale(const DecodeArgs& a, const Tile& t, int i, int j) {
  const uint8_t* first = a.scale + (t.m0 >> a.block_m_log) * a.scale_step_m + (t.k0 >> a.block_k_log) * a.scale_step_k;
  const auto row = static_cast<uint32_t>(i) >> a.block_m_log, col = static_cast<uint32_t>(j) >> a.block_k_log;
  const uint8_t* at = first + row * a.scale_step_m + col * a.scale_step_k;
  return has_byte_scales<E>(a.spec) ? *at : *reinterpret_cast<const uint32_t*>(at);
}

template <class E>
__device__ __forceinline__ float decode_scale(const DecodeArgs& a, uint32_t stored) {
  if constexpr (kIsFp4<kKind<E>>) {
    float scale, zero;
    decode_pair<E4M3>(stored, scale, zero);
    return scale;
  }
  return has_byte_scales<E>(a.spec) ? e8m0_decode(stored) : bits_float(stored);
}

// NVFP4's outer decode scales of a tile's rows or columns, or the first for all.
struct Outer {
  float scales[kRunCols];
  __device__ float at(const FormatSpec& spec, int i, int j) const {
    return scales[!spec.outer_rows ? 0 : (spec.axis == 0 ? i : j)];
  }
};

// A barrier ends it.
__device__ void load_outer(const DecodeArgs& a, const Tile& t, Outer& outer) {
  const bool down = a.spec.axis == 0;  // one a row
  const int lines = !a.spec.outer_rows ? 1 : (down ? t.rows : t.cols);
  const int64_t first = !a.spec.outer_rows ? 0 : (down ? t.m0 : t.k0);
  for (int l = threadIdx.x; l < lines; l += kThreads)
    outer.scales[l] = a.outer ? 1.0f / nvfp4_outer_encode(a.amax[first + l]) : 1.0f;
}

// n codes from (i, j) on, along K or (`down`) along M. `stored`: the scale of the first, which is that of all where blocks
// allow it.
template <class E, bool down, int n>
__device__ __forceinline__ void decode_scaled(const DecodeArgs& a, const Tile& t, const Outer& outer, int i, int j,
                                              const uint32_t* codes, uint32_t stored, float (&x)[n]) {
  const bool shared = (down ? a.block_m_log : a.block_k_log) > 0;
  const float scale = shared ? decode_scale<E>(a, stored) : 1.0f;
  decode_codes<E>(codes, scale, x);
  if (shared && !kIsFp4<kKind<E>>) {
    MH_UNROLL
    for (int e = 0; e < n; ++e) x[e] = x[e] * scale;
  } else if (!shared) {
    MH_UNROLL
    for (int e = 0; e < n; ++e) {
      const int m = min(i + (down ? e : 0), t.rows - 1), k = min(j + (down ? 0 : e), t.cols - 1);
      x[e] = x[e] * decode_scale<E>(a, stored_scale<E>(a, t, m, k));
    }
  }
  if constexpr (kIsFp4<kKind<E>>) {
    if (a.spec.outer_rows && (a.spec.axis == 0) == down) {  // one an element
      MH_UNROLL
      for (int e = 0; e < n; ++e) x[e] = x[e] * outer.scales[(down ? i : j) + e];
    } else {
      const float one = outer.at(a.spec, i, j);
      MH_UNROLL
      for (int e = 0; e < n; ++e) x[e] = x[e] * one;
    }
  }
}

template <class T>
__device__ __forceinline__ typename T::Raw* out_at(const DecodeArgs& a, const Tile& t, int i, int j) {
  return static_cast<typename T::Raw*>(a.out.data) + (t.m0 + i) * a.out.row_stride + (t.k0 + j) * a.out.col_stride;
}

// Writes numbers along K, 16 bytes at a time.
template <class T, int n>
__device__ __forceinline__ void store_vectors(const DecodeArgs& a, const Tile& t, int i, int j, const Pair<T> (&pairs)[n]) {
  uint4 v[sizeof pairs / sizeof(uint4)];
  memcpy(v, pairs, sizeof pairs);
  MH_UNROLL
  for (unsigned e = 0; e < sizeof pairs / sizeof(uint4); ++e) reinterpret_cast<uint4*>(out_at<T>(a, t, i, j))[e] = v[e];
}

// Elements one by one, wherever they lie.
template <class T, class E>
__device__ void decode_elements(const DecodeArgs& a, const Tile& t, const Outer& outer) {
  for (int at = threadIdx.x; at < kRunRows * kRunCols; at += kThreads) {
    const int i = at / kRunCols, j = at % kRunCols;
    if (i >= t.rows || j >= t.cols) continue;
    constexpr int kPerByte = kIsFp4<kKind<E>> ? 2 : 1;
    const int64_t k = t.k0 + j;
    const uint32_t code = a.codes[(t.m0 + i) * a.pitch + k / kPerByte];
    const float scale = decode_scale<E>(a, stored_scale<E>(a, t, i, j));
    float x;
    if constexpr (kIsFp4<kKind<E>>)
      x = decode<E>(code >> (k % 2 * 4) & 15u) * scale * outer.at(a.spec, i, j);
    else
      x = decode<E>(code) * scale;
    *out_at<T>(a, t, i, j) = T::store(x);
  }
}

// A thread block's part of one matrix.
template <class T, class E>
__device__ __forceinline__ void decode_part(const DecodeArgs& a, uint32_t part, Outer& outer) {
  constexpr int kWords = Codes<kKind<E>>::kWords / 2, kPerByte = kIsFp4<kKind<E>> ? 2 : 1;
  const Tile t = a.run_tiling.tile(part);
  const int j = threadIdx.x % kRunsAcross * kRun, first = threadIdx.x / kRunsAcross;
  const int runs = a.vector && j < t.cols ? (t.rows - first + kRunStep - 1) / kRunStep : 0;
  uint32_t codes[kRuns][kWords], scales[kRuns];
  MH_UNROLL
  for (int n = 0; n < kRuns; ++n) {
    if (n >= runs) break;
    const int i = first + n * kRunStep;
    const uint8_t* from = a.codes + (t.m0 + i) * a.pitch + (t.k0 + j) / kPerByte;
    memcpy(codes[n], __builtin_assume_aligned(from, sizeof codes[n]), sizeof codes[n]);
    scales[n] = stored_scale<E>(a, t, i, j);
  }
  if constexpr (kIsFp4<kKind<E>>) {
    load_outer(a, t, outer);
    __syncthreads();
  }
  if (!a.vector) return decode_elements<T, E>(a, t, outer);
  MH_UNROLL
  for (int n = 0; n < kRuns; ++n) {
    if (n >= runs) break;
    float x[kRun];
    decode_scaled<E, false>(a, t, outer, first + n * kRunStep, j, codes[n], scales[n], x);
    Pair<T> pairs[kRun / 2];
    store_pairs(x, pairs);
    store_vectors<T>(a, t, first + n * kRunStep, j, pairs);
  }
}

// What a product of decodes is multiplied by (`OperandsArgs`); nothing where `out` is null.
struct Factor {
  float* out;
  const float *a, *b;
};

__device__ __forceinline__ void write_factor(const Factor& f) {
  if (f.out && blockIdx.x == 0 && threadIdx.x == 0) *f.out = nvfp4_factor(f.a, f.b);
}

// Both operands of a product: the thread blocks of the second come after those of the first.
struct Runs {
  DecodeArgs a, b;
  uint32_t parts_of_a;
  Factor factor;
};

template <class T, class E>
__global__ void __launch_bounds__(kThreads, 4) decode_runs(const __grid_constant__ Runs r) {
  __shared__ Outer outer;
  write_factor(r.factor);
  if (blockIdx.x < r.parts_of_a)
    decode_part<T, E>(r.a, blockIdx.x, outer);
  else
    decode_part<T, E>(r.b, blockIdx.x - r.parts_of_a, outer);
}

__global__ void __launch_bounds__(kThreads) factor_alone(const Factor f) { write_factor(f); }

// Codes of the line at (i, j): from one unit where stored rows run along it, else gathered.
template <class E, bool down>
__device__ __forceinline__ Codes<kKind<E>> staged_line(const DecodeArgs& a, const uint8_t* staging, int i, int j) {
  Codes<kKind<E>> codes;
  if (a.transposed == down) {
    const uint8_t* from = staging + unit_offset<kKind<E>>(down ? j : i, (down ? i : j) / kLine);
    memcpy(codes.w, __builtin_assume_aligned(from, Codes<kKind<E>>::kBytes), Codes<kKind<E>>::kBytes);
    return codes;
  }
  if constexpr (kIsFp4<kKind<E>>) {  // only FP4 has a transform, which needs lines across the stored rows
    codes.w[0] = codes.w[1] = 0;
    MH_UNROLL
    for (int e = 0; e < kLine; ++e) {
      const int row = (down ? i : j) + e, at = down ? j : i;
      const uint8_t byte = staging[unit_offset<kKind<E>>(row, at / kLine) + at % kLine / 2];
      codes.w[e / 8] |= (byte >> (at % 2 * 4) & 15u) << (e % 8 * 4);
    }
  }
  return codes;
}

// The scale of the line at (i, j), inside the tensor.
template <class E>
__device__ __forceinline__ uint32_t line_scale(const DecodeArgs& a, const Tile& t, int i, int j) {
  return stored_scale<E>(a, t, min(i, t.rows - 1), min(j, t.cols - 1));
}

template <class E, bool down>
__device__ __forceinline__ void decode_line(const DecodeArgs& a, const Tile& t, const uint8_t* staging, const Outer& outer,
                                            int i, int j, uint32_t stored, float (&x)[kLine]) {
  decode_scaled<E, down>(a, t, outer, i, j, staged_line<E, down>(a, staging, i, j).w, stored, x);
  const int left = down ? t.rows - i : t.cols - j;
  if (kIsFp4<kKind<E>> && a.spec.rht && a.inverse_rht && left >= kLine) hadamard16(x, true);
}

template <class T, class E>
__device__ void decode_rows(const DecodeArgs& a, const Tile& t, const uint8_t* staging, const Outer& outer) {
  wait_copies();
  __syncthreads();
  const int j = threadIdx.x % kLinesAcross * kLine;
#pragma unroll 1
  for (int i = threadIdx.x / kLinesAcross; i < t.rows && j < t.cols; i += kRowsAtOnce) {
    float x[kLine];
    decode_line<E, false>(a, t, staging, outer, i, j, line_scale<E>(a, t, i, j), x);
    Pair<T> pairs[kLine / 2];
    store_pairs(x, pairs);
    if (a.out_width == kVector && j + kLine <= t.cols) {
      store_vectors<T>(a, t, i, j, pairs);
      continue;
    }
    MH_UNROLL
    for (int e = 0; e < kLine; ++e)
      if (j + e < t.cols) *out_at<T>(a, t, i, j + e) = pairs[e / 2].raw(e % 2);
  }
}

// Writes two columns' lines, pairs of neighbours along K. `vector`: a pair is one access.
template <class T>
__device__ __forceinline__ void store_columns(const DecodeArgs& a, const Tile& t, int i, int j, bool vector,
                                              const Pair<T> (&pairs)[kLine]) {
  auto* const out = out_at<T>(a, t, i, j);
  if (vector && i + kLine <= t.rows) {
    MH_UNROLL
    for (int e = 0; e < kLine; ++e) *reinterpret_cast<Pair<T>*>(out + e * a.out.row_stride) = pairs[e];
    return;
  }
  MH_UNROLL
  for (int e = 0; e < kLine; ++e) {
    if (i + e >= t.rows) break;
    MH_UNROLL
    for (int c = 0; c < 2; ++c)
      if (j + c < t.cols) out[e * a.out.row_stride + c * a.out.col_stride] = pairs[e].raw(c);
  }
}

// A thread takes the lines of two neighbouring columns, a strip of rows in steps.
template <class T, class E>
__device__ void decode_columns(const DecodeArgs& a, const Tile& t, const uint8_t* staging, const Outer& outer) {
  const int warp = threadIdx.x / kWarp, i0 = warp / 2 * kStripRows, j = warp % 2 * (kTile / 2) + threadIdx.x % kWarp * 2;
  const bool vector = a.out_width >= 2 * static_cast<int>(sizeof(typename T::Raw)) && j + 1 < t.cols;
  uint32_t scales[2] = {line_scale<E>(a, t, i0, j), line_scale<E>(a, t, i0, j + 1)};
  wait_copies();
  __syncthreads();
#pragma unroll 1
  for (int i = i0; i < i0 + kStripRows; i += kLine) {
    float x[2][kLine];
    MH_UNROLL
    for (int c = 0; c < 2; ++c) {
      decode_line<E, true>(a, t, staging, outer, i, j + c, scales[c], x[c]);
      scales[c] = line_scale<E>(a, t, i + kLine, j + c);  // of the next step
    }
    Pair<T> pairs[kLine];
    store_pairs([&](int e) { return x[0][e]; }, [&](int e) { return x[1][e]; }, pairs);
    if (j < t.cols) store_columns<T>(a, t, i, j, vector, pairs);
  }
}

template <class T, class E>
__global__ void __launch_bounds__(kThreads, 4) decode_tiles(const __grid_constant__ DecodeArgs a) {
  __shared__ uint4 memory[kTile * Codes<kKind<E>>::kBytes * kLinesAcross / kVector];
  __shared__ Outer outer;
  uint8_t* staging = reinterpret_cast<uint8_t*>(memory);
  constexpr int kPerByte = kIsFp4<kKind<E>> ? 2 : 1;
  const Tile t = a.tiling.tile(blockIdx.x);
  const int64_t row = a.transposed ? t.k0 : t.m0, first = a.transposed ? t.m0 : t.k0;
  const int rows = a.transposed ? t.cols : t.rows, cols = a.transposed ? t.rows : t.cols;
  start_codes<kKind<E>>(staging, a.codes + row * a.pitch + first / kPerByte, a.pitch, rows, (cols + kPerByte - 1) / kPerByte, a.width);
  if constexpr (kIsFp4<kKind<E>>) {
    load_outer(a, t, outer);
    if (a.spec.rht && a.inverse_rht && a.spec.axis == 0) return decode_rows<T, E>(a, t, staging, outer);
  }
  decode_columns<T, E>(a, t, staging, outer);
}

template <class F>
void by_element(Element element, F&& f) {
  switch (element) {
    case Element::e4m3: return f(E4M3{});
    case Element::e5m2: return f(E5M2{});
    case Element::e2m1: return f(E2M1{});
  }
}

int log2_of(int power) {
  int log = 0;
  while (1 << log < power) ++log;
  return log;
}

struct Prepared {
  DecodeArgs args;
  Dtype dtype;
  bool runs;
};

Prepared prepare(const DequantizeArgs& args) {
  const Matrix out = contiguous_strides(args.out);
  const bool swapped = out.col_stride != 1 && out.row_stride == 1;  // neighbours along K of what the kernel sees
  const FormatSpec& spec = args.spec;
  const int64_t last = args.in.transposed ? out.rows : out.cols;
  const int64_t scale_pitch = spec.block_k ? (out.cols + spec.block_k - 1) / spec.block_k : 1;
  Prepared made{};
  DecodeArgs& a = made.args;
  a.spec = spec;
  if (swapped) {
    a.spec.axis = 1 - spec.axis;
    a.spec.block_m = spec.block_k;
    a.spec.block_k = spec.block_m;
  }
  a.block_m_log = log2_of(a.spec.block_m ? a.spec.block_m : kTile);
  a.block_k_log = log2_of(a.spec.block_k ? a.spec.block_k : kTile);
  a.codes = args.in.codes;
  const bool fp4 = spec.element == Element::e2m1;
  a.pitch = fp4 ? (last + 1) / 2 : last;
  a.transposed = args.in.transposed != swapped;
  a.width = access_width(a.codes, a.pitch);
  const int64_t scale_size = spec.scale_rule == ScaleRule::fp32 ? 4 : 1;
  a.scale = static_cast<const uint8_t*>(args.in.scale);
  a.scale_step_m = a.spec.block_m == 0 ? 0 : (swapped ? 1 : scale_pitch) * scale_size;
  a.scale_step_k = a.spec.block_k == 0 ? 0 : (swapped ? scale_pitch : 1) * scale_size;
  a.amax = args.in.amax;
  a.outer = args.outer;
  a.inverse_rht = args.inverse_rht;
  a.out = swapped ? transposed(out) : out;
  a.out_width = a.out.col_stride == 1 ? access_width(out.data, a.out.row_stride * (out.dtype == Dtype::f32 ? 4 : 2)) : 0;
  a.tiling = make_tiling(a.out.rows, a.out.cols, false);
  a.run_tiling = make_tiling<kRunRows, kRunCols>(a.out.rows, a.out.cols, false);
  made.dtype = out.dtype;
  made.runs = !a.transposed && !(spec.rht && a.inverse_rht);
  a.vector = a.width >= (fp4 ? kRun / 2 : kRun) && a.out_width == kVector && a.out.cols % kRun == 0;
  return made;
}

// Calls f with a value of the output's type and one of the codes'.
template <class F>
void by_types(const Prepared& p, F&& f) {
  by_dtype(p.dtype, [&](auto t) { by_element(p.args.spec.element, [&](auto e) { f(t, e); }); });
}

// Of one matrix, or of two of the same types (`b` not null).
void launch_runs(const Prepared& p, const Prepared* b, const Factor& factor, const Where& where) {
  Runs r{p.args, b ? b->args : DecodeArgs{}, p.args.run_tiling.count, factor};
  const unsigned parts = r.parts_of_a + r.b.run_tiling.count;
  by_types(p, [&](auto t, auto e) { launch(decode_runs<decltype(t), decltype(e)>, parts, 0, where, "dequantize", r); });
}

void launch_tiles(const Prepared& p, const Where& where) {
  by_types(p, [&](auto t, auto e) {
    launch(decode_tiles<decltype(t), decltype(e)>, p.args.tiling.count, 0, where, "dequantize", p.args);
  });
}

}  // namespace

void dequantize(const DequantizeArgs& args, const Where& where) {
  const OnDevice on(where, "dequantize");
  const Prepared p = prepare(args);
  p.runs ? launch_runs(p, nullptr, {}, where) : launch_tiles(p, where);
}

void decode_operands(const OperandsArgs& args, const Where& where) {
  const OnDevice on(where, "decode_operands");
  Factor factor{args.factor, nullptr, nullptr};
  Prepared found[2];
  int n = 0;
  for (int i = 0; i < 2; ++i) {
    if (!args.has[i]) continue;
    const DequantizeArgs& operand = args.operands[i];
    (i ? factor.b : factor.a) = operand.in.amax;
    if (operand.out.rows * operand.out.cols > 0) found[n++] = prepare(operand);
  }
  const Prepared &a = found[0], &b = found[1];
  if (n == 2 && a.runs && b.runs && a.dtype == b.dtype && a.args.spec.element == b.args.spec.element)
    return launch_runs(a, &b, factor, where);
  for (int i = 0; i < n; ++i) {
    if (!found[i].runs) {
      launch_tiles(found[i], where);
      continue;
    }
    launch_runs(found[i], nullptr, factor, where);
    factor.out = nullptr;  // written
  }
  if (factor.out) launch(factor_alone, 1, 0, where, "decode_operands", factor);
}

}  // namespace mh::cuda
