// Casts of rows whose amaxes are to be found, of 16-bit tensors to FP8: a thread block holds whole rows in registers, so
// that the tensor is read once and nothing waits for a pass before.
#include "dense_strips.h"
#include "strip_casts.cuh"

namespace mh::cuda {
namespace {

constexpr int kPiece = 8;        // elements that a thread loads at once
constexpr int kPiecesHeld = 8;   // by a thread, of all rows; 32 registers
constexpr int kMostPieces = 16;  // of a row

// A row is at most kPieces pieces of all threads.
template <int kPieces>
constexpr int kRowsHeld = kPieces < kPiecesHeld ? kPiecesHeld / kPieces : 1;
template <int kPieces>
constexpr int kBlocks = kPieces > kPiecesHeld ? 2 : 4;  // that a multiprocessor runs at once

template <class T>
struct alignas(16) Piece {
  Pair<T> of[kPiece / 2];
};

struct alignas(16) Amaxes {
  int32_t of_warp[kWarps];
};

template <class E, class T>
__device__ __forceinline__ uint2 encode_piece(const Piece<T>& piece, float mult) {
  uint32_t codes[2];
  MH_UNROLL
  for (int w = 0; w < 2; ++w) {
    const Pair<T>&a = piece.of[2 * w], &b = piece.of[2 * w + 1];
    codes[w] = encode_pair<E>(a.lo() * mult, a.hi() * mult) | encode_pair<E>(b.lo() * mult, b.hi() * mult) << 16;
  }
  return {codes[0], codes[1]};
}

template <class T, int kPieces>
__device__ __forceinline__ int32_t amax_of(const Piece<T> (&row)[kPieces]) {
  PairAmax<T> most;
  MH_UNROLL
  for (int n = 0; n < kPieces * kPiece / 2; ++n) most.add(row[n / (kPiece / 2)].of[n % (kPiece / 2)]);
  return __reduce_max_sync(kAllLanes, most.both());
}

template <class T, int kPieces>
__global__ void __launch_bounds__(kThreads, kBlocks<kPieces>) cast_whole_rows(const __grid_constant__ StripArgs args) {
  constexpr int kRows = kRowsHeld<kPieces>;
  __shared__ Amaxes found[kRows];
  const CastArgs& a = args.cast;
  const Direction& d = a.row;
  if (a.noop && *a.noop) return;
  const int64_t first = static_cast<int64_t>(blockIdx.x) * kRows;
  const auto column = [](int n) { return (n * kThreads + static_cast<int>(threadIdx.x)) * kPiece; };
  const auto* x = static_cast<const typename T::Raw*>(a.x.data) + first * a.x.row_stride;
  const int rows = static_cast<int>(min(a.x.rows - first, static_cast<int64_t>(kRows)));
  const int cols = static_cast<int>(a.x.cols);
  Piece<T> v[kRows][kPieces];
  MH_UNROLL
  for (int r = 0; r < kRows; ++r) {
    MH_UNROLL
    for (int n = 0; n < kPieces; ++n) {
      uint4 some = {0, 0, 0, 0};
      if (r < rows && column(n) < cols) some = *reinterpret_cast<const uint4*>(x + r * a.x.row_stride + column(n));
      memcpy(&v[r][n], &some, sizeof some);
    }
  }
  MH_UNROLL
  for (int r = 0; r < kRows; ++r) {
    const int32_t amax = amax_of<T>(v[r]);
    if (threadIdx.x % kWarp == 0) found[r].of_warp[threadIdx.x / kWarp] = amax;
  }
  __syncthreads();
  uint8_t* to = d.codes + first * d.pitch;
  MH_UNROLL
  for (int r = 0; r < kRows; ++r) {
    if (r >= rows) break;
    int32_t most = found[r].of_warp[0];
    MH_UNROLL
    for (int w = 1; w < kWarps; ++w) most = max_bits(most, found[r].of_warp[w]);
    const int32_t amax = most > kInfBits ? kNanBits : most;
    const float mult = preset_encode_scale(d.spec, bits_float(static_cast<uint32_t>(amax)), false);
    if (threadIdx.x == 0) {
      args.of_rows[first + r] = amax;
      static_cast<float*>(d.scale)[first + r] = 1.0f / mult;
    }
    MH_UNROLL
    for (int n = 0; n < kPieces; ++n) {
      const bool wide = d.spec.element == Element::e5m2;
      const uint2 codes = wide ? encode_piece<E5M2>(v[r][n], mult) : encode_piece<E4M3>(v[r][n], mult);
      if (column(n) < cols) *reinterpret_cast<uint2*>(to + column(n)) = codes;
    }
    to += d.pitch;
  }
}

template <class T, int kPieces>
void launch_pieces(const StripArgs& a, const Where& where) {
  constexpr int64_t kRows = kRowsHeld<kPieces>;
  launch(cast_whole_rows<T, kPieces>, grid_for((a.cast.x.rows + kRows - 1) / kRows), 0, where, "quantize", a);
}

template <class T>
void launch_type(const StripArgs& a, const Where& where) {
  const int64_t pieces = (a.cast.x.cols + kThreads * kPiece - 1) / (kThreads * kPiece);
  if (pieces <= 1) return launch_pieces<T, 1>(a, where);
  if (pieces <= 2) return launch_pieces<T, 2>(a, where);
  if (pieces <= 4) return launch_pieces<T, 4>(a, where);
  if (pieces <= 8) return launch_pieces<T, 8>(a, where);
  launch_pieces<T, kMostPieces>(a, where);
}

}  // namespace

bool fits_whole_rows(const CastArgs& a) {
  const bool reads = fits_tensor(a) && a.x.cols % kPiece == 0 && a.x.cols <= kMostPieces * kThreads * kPiece;
  if (!reads || a.x.rows > kMaxGrid) return false;
  return has_strip_scales(a.row, &StripScales::whole_rows) && !a.row.transposed && a.row.width >= kPiece;
}

void launch_whole_rows(const StripArgs& a, const Where& where) {
  if (a.cast.x.dtype == Dtype::bf16) return launch_type<BFloat16>(a, where);
  launch_type<Float16>(a, where);
}

}  // namespace mh::cuda
