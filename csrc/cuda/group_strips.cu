// Columns of all groups, the rows beside them, and amaxes, of 16-bit tensors: by strips (strip.cuh), where the cast of
// other tensors (cast.cuh) holds the tile in shared memory. Only codes of columns go through that, to leave in whole
// rows of the stored matrix. A scale is made once, by a lane of its own.
#include "cast.cuh"
#include "strip_sources.cuh"

namespace mh::cuda {
namespace {

// The multipliers of the tile's columns; stores scales of blocks.
template <class T>
__device__ __forceinline__ void scale_columns(const Direction& d, const Tile& t, const Strip<T>& v,
                                              StripShared<T>& sh) {
  const int c = threadIdx.x;
  const bool blocks = !d.spec.outer_rows;
  const int32_t amax = blocks ? column_amax(v, sh) : 0;
  if (c >= t.cols) return;
  const OuterScale outer = outer_scale<Kind::fp8>(d, t.lines + t.k0 + c);
  sh.of_column[c] = line_scale<Kind::fp8>(d, amax, outer, nullptr, scale_index(d, t, 0, c), blocks).mult;
}

// The same of a warp's rows.
template <class T>
__device__ __forceinline__ void scale_rows(const Direction& d, const Tile& t, const Strip<T> (&v)[1],
                                           StripShared<T>& sh) {
  const int lane = threadIdx.x % kWarp, i = threadIdx.x / kWarp * kWarpRows + lane;
  const bool blocks = !d.spec.outer_rows;
  const int32_t amax = blocks ? row_amax(v) : 0;
  if (lane < kWarpRows) {
    const OuterScale outer = outer_scale<Kind::fp8>(d, t.m0 + min(i, t.rows - 1));
    sh.of_row[i] = line_scale<Kind::fp8>(d, amax, outer, nullptr, scale_index(d, t, i, 0), blocks && i < t.rows).mult;
  }
  __syncwarp();
}

template <class E, class T>
__device__ __forceinline__ void put_rows(const Direction& d, const Tile& t, const Strip<T>& v, StripShared<T>& sh) {
  const int i0 = threadIdx.x / kWarp * kWarpRows, j = threadIdx.x % kWarp * kLaneCols;
  const int64_t pitch = held(d.pitch);
  uint8_t* to = d.codes + (t.m0 + i0) * pitch + t.k0 + j;
  const int rows = j < t.cols ? t.rows - i0 : 0;
  MH_UNROLL
  for (int r = 0; r < kWarpRows; ++r) {
    const float mult = sh.of_row[i0 + r];
    const Pair<T>(&p)[kLaneCols / 2] = v[r].of;
    const uint32_t codes =
        encode_pair<E>(p[0].lo() * mult, p[0].hi() * mult) | encode_pair<E>(p[1].lo() * mult, p[1].hi() * mult) << 16;
    if (r < rows) *reinterpret_cast<uint32_t*>(to) = codes;
    to += pitch;
  }
}

template <class E, class T>
__device__ __forceinline__ void stage_columns(const Strip<T>& v, StripShared<T>& sh) {
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  const auto* multipliers = reinterpret_cast<const uint4*>(sh.of_column);
  float mult[kLaneCols];
  const uint4 some = multipliers[lane];
  memcpy(mult, &some, sizeof some);
  MH_UNROLL
  for (int c = 0; c < kLaneCols; ++c) {
    float x[kLine];
    MH_UNROLL
    for (int r = 0; r < kWarpRows; ++r) x[r] = c % 2 ? v[r].of[c / 2].hi() : v[r].of[c / 2].lo();
    Codes<Kind::fp8> codes;
    encode_bytes<E>(x, mult[c], codes);
    sh.codes[codes_at(lane * kLaneCols + c, warp)] = {codes.w[0], codes.w[1], codes.w[2], codes.w[3]};
  }
}

__device__ __forceinline__ void put_columns(const Direction& d, const Tile& t, const uint4* codes) {
  const int first = threadIdx.x / kLinesAcross, piece = threadIdx.x % kLinesAcross;
  constexpr int kAtOnce = kThreads / kLinesAcross;
  uint8_t* to = d.codes + (t.k0 + first) * d.pitch + t.m0 + piece * kVector;
  MH_UNROLL
  for (int n = 0; n < kTile / kAtOnce; ++n) {
    const int column = first + n * kAtOnce;
    if (column < t.cols) *reinterpret_cast<uint4*>(to) = codes[codes_at(column, piece)];
    to += kAtOnce * d.pitch;
  }
}

// A tile of groups of rows, and where its rows are; false where there is no such block.
__device__ __forceinline__ bool find_tile(const StripArgs& s, Tile& t, Tile& at_rows) {
  const CastArgs& a = s.cast;
  if (a.items == 0) return false;
  const uint32_t length = s.down ? static_cast<uint32_t>(a.groups.count) : a.tiling.across;
  const uint32_t line = blockIdx.x / length, within = blockIdx.x - line * length;
  const uint32_t row = s.down ? within : line, col = s.down ? line : within;
  t = Tile{static_cast<int64_t>(row) * kTile, static_cast<int64_t>(col) * kTile, kTile, kTile};
  t.cols = static_cast<int>(min(a.tiling.k - t.k0, static_cast<int64_t>(kTile)));
  return find_block(a.groups, a.x.cols, t, at_rows);
}

// Strip s of a tile's: of the gradient of gate, or of that of up.
__device__ __forceinline__ Tile beside(Tile t, const CastArgs& a, int s) {
  t.k0 += s * (a.x.cols / 2);
  return t;
}

// Thread blocks a multiprocessor runs at once; with rows beside columns, 64 registers are a few too few.
template <class Source, bool kRows>
constexpr int kStripBlocks = Source::kStrips > 1 ? 2 : (kRows ? 3 : 4);

template <class T, class Source, bool kRows>
__global__ void __launch_bounds__(kThreads, (kStripBlocks<Source, kRows>))
    cast_strips(const __grid_constant__ StripArgs args) {
  __shared__ StripShared<T> shared;
  StripShared<T>& sh = *held_shared(&shared);
  const CastArgs& a = args.cast;
  if constexpr (kRows) store_preset_scales(a.row, a.groups.rows);
  store_preset_scales(a.col, a.groups.groups * a.x.cols);
  Tile t, at_rows;
  if (!find_tile(args, t, at_rows)) return;
  Strip<T> v[Source::kStrips];
  find_rows<Source::kWeighted>(args, t, at_rows.m0, sh);
  Source::load(args, t, at_rows.m0, sh, v);
  MH_UNROLL
  for (int s = 0; s < Source::kStrips; ++s) {
    const Tile here = beside(t, a, s);
    cut<T>(t, v[s]);
    scale_columns<T>(a.col, here, v[s], sh);
    if constexpr (kRows) {
      const Tile rows = beside(at_rows, a, s);
      scale_rows<T>(a.row, rows, reinterpret_cast<const Strip<T>(&)[1]>(v[s]), sh);
      const bool e5m2 = a.row.spec.element == Element::e5m2;
      e5m2 ? put_rows<E5M2, T>(a.row, rows, v[s], sh) : put_rows<E4M3, T>(a.row, rows, v[s], sh);
    }
    __syncthreads();
    a.col.spec.element == Element::e5m2 ? stage_columns<E5M2, T>(v[s], sh) : stage_columns<E4M3, T>(v[s], sh);
    __syncthreads();
    put_columns(a.col, here, sh.codes);
  }
}

// Amaxes of groups' columns, and of rows, as group_amax has them.
template <class T, class Source>
__global__ void __launch_bounds__(kThreads, (kStripBlocks<Source, false>))
    amax_strips(const __grid_constant__ StripArgs args) {
  __shared__ StripShared<T> shared;
  StripShared<T>& sh = *held_shared(&shared);
  const CastArgs& a = args.cast;
  const int c = threadIdx.x, lane = c % kWarp, i = c / kWarp * kWarpRows + lane;
  Tile t, at_rows;
  if (!find_tile(args, t, at_rows)) return;
  Strip<T> v[Source::kStrips];
  find_rows<Source::kWeighted>(args, t, at_rows.m0, sh);
  Source::load(args, t, at_rows.m0, sh, v);
  MH_UNROLL
  for (int s = 0; s < Source::kStrips; ++s) {
    if (s) __syncthreads();  // the amaxes of the strip before are read
    cut<T>(t, v[s]);
    const int32_t amax = column_amax<T>(v[s], sh);
    if (c < t.cols) atomicMax(args.of_columns + t.lines + beside(t, a, s).k0 + c, amax);
  }
  if (!args.of_rows) return;
  const int32_t amax = row_amax<T>(v);
  if (lane < kWarpRows && i < t.rows) atomicMax(args.of_rows + at_rows.m0 + i, amax);
}

template <class T, class Source>
void launch_source(const StripArgs& a, bool rows, const Where& where) {
  const unsigned grid = grid_for(a.cast.items);
  if (a.of_columns) return launch(amax_strips<T, Source>, grid, 0, where, "group_amax", a);
  if (rows) return launch(cast_strips<T, Source, true>, grid, 0, where, "quantize", a);
  launch(cast_strips<T, Source, false>, grid, 0, where, "quantize", a);
}

template <class T>
void launch_type(const StripArgs& a, bool rows, const Where& where) {
  if (a.cast.grad) return launch_source<T, GradientOf<T>>(a, rows, where);
  if (a.cast.gate) return launch_source<T, ProductOf<T>>(a, rows, where);
  launch_source<T, RowsOf<T>>(a, rows, where);
}

bool fits(const Direction& d) { return d.spec.outer_rows || d.spec.block_m * d.spec.block_k == kTile; }

}  // namespace

bool fits_strips(const StripArgs& s, bool rows) {
  const CastArgs& a = s.cast;
  if (a.x.dtype == Dtype::f32 || !a.vector || a.x.cols % kLaneCols || (a.grad && a.x.cols / 2 % kTile)) return false;
  constexpr int64_t kLongest = INT32_MAX / 2;  // bytes of a row and numbers of rows are 32 bits
  if (a.x.row_stride > kLongest || a.grad_stride > kLongest || a.groups.rows > kLongest) return false;
  if (s.of_columns) return true;
  return fits(a.col) && a.col.width == kVector && (!rows || (fits(a.row) && a.row.width >= kLaneCols));
}

void launch_strips(const StripArgs& a, bool rows, const Where& where) {
  if (a.cast.x.dtype == Dtype::bf16) return launch_type<BFloat16>(a, rows, where);
  launch_type<Float16>(a, rows, where);
}

}  // namespace mh::cuda
