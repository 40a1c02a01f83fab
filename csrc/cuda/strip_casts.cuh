// What strips of a tile (strip.cuh) are cast with: scales, and codes on their way out. A scale is made once, by a lane
// of its own; codes of columns go through shared memory, to leave in whole rows of the stored matrix.
#pragma once

#include "cast.cuh"
#include "strip.cuh"

namespace mh::cuda {

// Blocks of 32 elements; the others are as long as the tile.
__device__ __forceinline__ bool is_fine(const FormatSpec& s) { return s.scale_rule == ScaleRule::e8m0; }

// What the histories of delayed scaling are at, a direction each; a barrier to any amax where there is none.
struct Known {
  int32_t of_rows = INT32_MAX, of_columns = INT32_MAX;

  __device__ __forceinline__ Known(const Direction* row, const Direction* col) {
    if (row && row->history) of_rows = load_relaxed(bits_of(row->history));
    if (col && col->history) of_columns = load_relaxed(bits_of(col->history));
  }
  static __device__ __forceinline__ int32_t* bits_of(float* history) { return reinterpret_cast<int32_t*>(history); }
};

// Raises the histories to what is cast where they are not known to be there, and returns the tile's amax where square
// blocks ask for it.
template <class T>
__device__ __forceinline__ int32_t look_at_tile(const Direction* row, const Direction* col, const Known& known,
                                                const Strip<T>& v, StripShared<T>& sh) {
  const bool squares = (row && is_square(row->spec)) || (col && is_square(col->spec));
  const bool histories = (row && row->history) || (col && col->history);
  if (!squares && !histories) return 0;
  const int32_t mine = warp_amax<T>(v), raised = mine > kInfBits ? kNanBits : mine;
  const bool first = threadIdx.x % kWarp == 0;
  if (first && row && known.of_rows < raised) atomicMax(Known::bits_of(row->history), raised);
  if (first && col && known.of_columns < raised) atomicMax(Known::bits_of(col->history), raised);
  if (!squares) return 0;
  if (first) sh.most[threadIdx.x / kWarp] = mine;
  __syncthreads();
  int32_t all = sh.most[0];
  MH_UNROLL
  for (int w = 1; w < kWarps; ++w) all = max_bits(all, sh.most[w]);
  return all;
}

// Multipliers of columns that are known before the cast.
template <class T>
__device__ __forceinline__ void preset_columns(const Direction& d, const Tile& t, StripShared<T>& sh) {
  const int c = threadIdx.x;
  if (is_preset(d.spec) && c < t.cols) sh.of_column[0][c] = outer_scale<Kind::fp8>(d, t.lines + t.k0 + c).encode;
}

// Whether scales are of blocks of a column each.
__device__ __forceinline__ bool has_line_blocks(const FormatSpec& s) { return !is_preset(s) && !is_square(s); }

// The others, of scales of blocks, which this stores: of amaxes that the warps have shared, and of `of_tile` where blocks
// are square.
template <class T>
__device__ __forceinline__ void block_columns(const Direction& d, const Tile& t, int32_t of_tile,
                                              StripShared<T>& sh) {
  const int c = threadIdx.x;
  if (is_preset(d.spec)) return;
  const bool square = is_square(d.spec);
  if (!square) __syncthreads();
  if (is_fine(d.spec)) {
    constexpr int kAtOnce = kThreads / kTile;
    const int column = c % kTile, first = c / kTile;
    int64_t at = scale_index(d, t, first * kFine, column);
    MH_UNROLL
    for (int n = 0; n < kFinesAcross / kAtOnce; ++n, at += kAtOnce * d.scale_step_m) {
      const int block = first + n * kAtOnce;
      const int32_t amax = column_amax<kFineWarps, T>(column, block * kFineWarps, sh);
      const bool store = column < t.cols && block * kFine < t.rows;
      sh.of_column[block][column] = e8m0_line_scale(d, amax, at, store).mult;
    }
  } else if (c < t.cols) {
    const int32_t amax = square ? of_tile : column_amax<kWarps, T>(c, 0, sh);
    const bool store = (c & (d.spec.block_k - 1)) == 0;
    sh.of_column[0][c] = fp32_line_scale(d, amax, scale_index(d, t, 0, c), store).mult;
  }
}

template <class T>
__device__ __forceinline__ void set_row(int i, float mult, StripShared<T>& sh) {
  MH_UNROLL
  for (int block = 0; block < kFinesAcross; ++block) sh.of_row[i][block] = mult;
}

// The same of a warp's rows.
template <class T>
__device__ __forceinline__ void preset_rows(const Direction& d, const Tile& t, StripShared<T>& sh) {
  const int lane = threadIdx.x % kWarp, i = threadIdx.x / kWarp * kWarpRows + lane;
  if (!is_preset(d.spec)) return;
  if (lane < kWarpRows) set_row(i, outer_scale<Kind::fp8>(d, t.m0 + min(i, t.rows - 1)).encode, sh);
  __syncwarp();
}

template <class T>
__device__ __forceinline__ void block_rows(const Direction& d, const Tile& t, int32_t of_tile, const Strip<T> (&v)[1],
                                           StripShared<T>& sh) {
  const int lane = threadIdx.x % kWarp, i0 = threadIdx.x / kWarp * kWarpRows;
  if (is_preset(d.spec)) return;
  if (is_fine(d.spec)) {
    PairAmax<T> amax;
    amax.most[0] = fine_amaxes<T>(v);
    const int block = lane / kFineLanes, j = block * kFine, first = i0 + fine_row();
    int64_t at = scale_index(d, t, first, j);
    MH_UNROLL
    for (int e = 0; e < 2; ++e, at += d.scale_step_m) {
      const bool store = first + e < t.rows && j < t.cols;
      sh.of_row[first + e][block] = e8m0_line_scale(d, e ? amax.hi() : amax.lo(), at, store).mult;
    }
  } else {
    const int i = i0 + own_row();
    const int32_t amax = is_square(d.spec) ? of_tile : row_amax<T>(v);
    const bool mine = lane < kWarpRows, store = mine && i < t.rows && (i & (d.spec.block_m - 1)) == 0;
    const float mult = fp32_line_scale(d, amax, scale_index(d, t, i, 0), store).mult;
    if (mine) set_row(i, mult, sh);
  }
  __syncwarp();
}

template <class E, class T>
__device__ __forceinline__ void put_rows(const Direction& d, const Tile& t, const Strip<T>& v, StripShared<T>& sh) {
  const int i0 = threadIdx.x / kWarp * kWarpRows, j = threadIdx.x % kWarp * kLaneCols;
  const int64_t pitch = held(d.pitch);
  uint8_t* to = d.codes + (t.m0 + i0) * pitch + t.k0 + j;
  const int rows = j < t.cols ? t.rows - i0 : 0;
  const float* multipliers = &sh.of_row[i0][j / kFine];
  MH_UNROLL
  for (int r = 0; r < kWarpRows; ++r) {
    const float mult = multipliers[r * kFinesAcross];
    const Pair<T>(&p)[kLaneCols / 2] = v[r].of;
    const uint32_t codes =
        encode_pair<E>(p[0].lo() * mult, p[0].hi() * mult) | encode_pair<E>(p[1].lo() * mult, p[1].hi() * mult) << 16;
    if (r < rows) *reinterpret_cast<uint32_t*>(to) = codes;
    to += pitch;
  }
}

// A number of a pair as lo() or hi() has it, by another instruction for BF16: else the compiler keeps what the cast of
// rows converted for the cast of columns, in registers that a thread does not have.
template <class T>
__device__ __forceinline__ float converted_again(const Pair<T>& p, bool upper) {
  if constexpr (std::is_same_v<T, BFloat16>) return bits_float(permute(p.w[0], 0, upper ? 0x3244 : 0x1044));
  return upper ? p.hi() : p.lo();
}

template <class E, class T>
__device__ __forceinline__ void stage_columns(const Direction& d, const Strip<T>& v, StripShared<T>& sh) {
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  const auto* multipliers = reinterpret_cast<const uint4*>(sh.of_column[is_fine(d.spec) ? warp / kFineWarps : 0]);
  float mult[kLaneCols];
  const uint4 some = multipliers[lane];
  memcpy(mult, &some, sizeof some);
  MH_UNROLL
  for (int c = 0; c < kLaneCols; ++c) {
    float x[kLine];
    MH_UNROLL
    for (int r = 0; r < kWarpRows; ++r) x[r] = converted_again(v[r].of[c / 2], c % 2);
    Codes<Kind::fp8> codes;
    encode_bytes<E>(x, mult[c], codes);
    sh.codes[codes_at(lane * kLaneCols + c, warp)] = {codes.w[0], codes.w[1], codes.w[2], codes.w[3]};
  }
}

// Staged codes of columns, the first `strips` of the tile's eight.
__device__ __forceinline__ void put_columns(const Direction& d, const Tile& t, const uint4* codes, int strips) {
  const int first = threadIdx.x / kLinesAcross, piece = threadIdx.x % kLinesAcross;
  constexpr int kAtOnce = kThreads / kLinesAcross;
  uint8_t* to = d.codes + (t.k0 + first) * d.pitch + t.m0 + piece * kVector;
  MH_UNROLL
  for (int n = 0; n < kTile / kAtOnce; ++n) {
    const int column = first + n * kAtOnce;
    if (column < t.cols && piece < strips) *reinterpret_cast<uint4*>(to) = codes[codes_at(column, piece)];
    to += kAtOnce * d.pitch;
  }
}

// Codes of a warp's rows, whose scales are made.
template <class T>
__device__ __forceinline__ void cast_strip_rows(const Direction& d, const Tile& t, const Strip<T>& v,
                                                StripShared<T>& sh) {
  d.spec.element == Element::e5m2 ? put_rows<E5M2, T>(d, t, v, sh) : put_rows<E4M3, T>(d, t, v, sh);
}

// Columns, whose scales are made, to the staging area; barriers before and after.
template <class T>
__device__ __forceinline__ void cast_strip_columns(const Direction& d, const Strip<T>& v, StripShared<T>& sh) {
  __syncthreads();
  d.spec.element == Element::e5m2 ? stage_columns<E5M2, T>(d, v, sh) : stage_columns<E4M3, T>(d, v, sh);
  __syncthreads();
}

constexpr int64_t kLongestRow = INT32_MAX / 2;  // bytes of a row and numbers of rows are 32 bits

// Whether strips can be read of a tensor, and of what they are computed from: halves of a gradient are whole tiles.
inline bool fits_tensor(const CastArgs& a) {
  if (a.grad && (a.x.cols / 2 % kTile || a.grad_stride > kLongestRow)) return false;
  return a.x.dtype != Dtype::f32 && a.vector && a.x.cols % kLaneCols == 0 && a.x.row_stride <= kLongestRow;
}

// Scales that strips are cast with. `along`, `across`: the extents of a block along the contraction and across it, 0
// for the tensor's own. `rows`, `columns`, `pairs`: whether rows alone, columns alone and one beside the other are cast
// so. `whole_rows`: whether rows alone are held whole (whole_rows.cu) where their amaxes are to be found.
struct StripScales {
  ScaleRule rule;
  int along, across;
  bool rows, columns, pairs, whole_rows;

  bool are_of(const Direction& d) const {
    const FormatSpec& s = d.spec;
    const int own_along = s.axis ? s.block_m : s.block_k, own_across = s.axis ? s.block_k : s.block_m;
    return s.scale_rule == rule && own_along == along && own_across == across;
  }
};

constexpr StripScales kStripScales[] = {
    {ScaleRule::fp32, 128, 1, true, true, true, false},    // fp8_block
    {ScaleRule::fp32, 0, 1, true, true, true, true},       // fp8_rowwise
    {ScaleRule::e8m0, 32, 1, true, true, true, false},     // mxfp8
    {ScaleRule::fp32, 0, 0, true, true, true, false},      // fp8_current, fp8_delayed
    {ScaleRule::fp32, 128, 128, true, true, true, false},  // fp8_block:2d
    {ScaleRule::e4m3_amax, 16, 1, true, true, true, false},   // nvfp4
    {ScaleRule::e4m3_amax, 16, 16, true, true, true, false},  // nvfp4:2d
};

// Whether SwiGLU and its gradient are computed in strips of whole tensors.
constexpr bool kStripProducts = true, kStripGradients = true;

// Whether a direction can be written from strips, and is; `any`: or is not, but can be.
inline bool has_strip_scales(const Direction& d, bool StripScales::*as, bool any = false) {
  for (const StripScales& s : kStripScales)
    if (s.are_of(d)) return s.*as || any;
  return false;
}

inline bool fits_rows(const Direction& d, bool alone, bool any = false) {
  if (alone && !any && is_fp4(d) && d.spec.outer_rows) return false;  // looking for the rows' amaxes is all of the time
  const int width = is_fp4(d) ? kLine / 2 : kLaneCols;  // of a lane's codes
  const bool has_scales = has_strip_scales(d, alone ? &StripScales::rows : &StripScales::pairs, any);
  return has_scales && !d.transposed && d.width >= width;
}
inline bool fits_columns(const Direction& d, bool alone, bool any = false) {
  const bool has_scales = has_strip_scales(d, alone ? &StripScales::columns : &StripScales::pairs, any);
  return has_scales && d.transposed && d.width == kVector;
}

}  // namespace mh::cuda
