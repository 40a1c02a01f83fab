// What the cast kernel is told: both directions of one tensor, as host code prepared them.
#pragma once

#include "tile.cuh"

namespace mh::cuda {

// One direction. In the kernel "row" lines run along K and "column" lines along M of the matrix as the kernel sees it.
struct Direction {
  FormatSpec spec;
  int block_m_log, block_k_log;
  uint8_t* codes;
  int64_t pitch;    // bytes of a stored row
  bool transposed;  // stored rows run along M
  int width;        // widest access to the codes
  void* scale;
  int64_t scale_step_m, scale_step_k;  // from a block to the next one
  const float* amax;
  bool fixed_scale;
  float* history;  // delayed scaling: raised to the amax of what is cast
  Noise noise;
};

inline bool is_fp4(const Direction& d) { return d.spec.element == Element::e2m1; }

constexpr uint32_t kAhead = 6;              // panels between a look and the cast; 128 rows of 8192 16-bit elements are 2 MiB
constexpr int kLookLines = 2;                       // of a lane, in a row
constexpr int kLookCols = kLookLines * 32 * kLine;  // columns of a look

// Row amaxes that the cast takes itself (panels.cuh). `done` null: it does not.
struct Panels {
  int32_t* done;  // looks finished, one counter a panel of 128 rows
  float* amax;
  uint32_t count;
  uint32_t looks;  // in a panel
};

struct CastArgs {
  Matrix x;
  const void* gate;  // null, or of x's strides: silu(gate) * x is cast
  const void* grad;  // null, or of half as many columns: the gradient of SwiGLU at x is cast
  int64_t grad_stride;
  bool vector;
  Tiling tiling;
  uint32_t items;  // of work, one a thread block: tiles, and looks for row amaxes
  Direction row, col;
  Panels panels;
  float* sums;  // null, or a row a row of tiles
  bool derived;
  const int32_t* noop;
  Groups groups;
};

// A cast of groups, or their amaxes, by strips (strip.cuh).
struct StripArgs {
  CastArgs cast;
  RowWeights weights;
  bool down;                      // tiles one below the other first: copies of a row are read while it is in the L2
  int32_t *of_columns, *of_rows;  // null: a cast
};

// Launches the kernel for a storage type and the kinds of both directions.
template <class T>
void launch_cast(const CastArgs& args, Kind row, Kind col, const Where& where);

// The same for groups; FP8 columns, and rows or none.
template <class T>
void launch_groups(const CastArgs& args, Kind row, const Where& where);

// The same, or amaxes, by strips (group_strips.cu), for the tensors that these fit.
bool fits_strips(const StripArgs& args, bool rows);
void launch_strips(const StripArgs& args, bool rows, const Where& where);

extern template void launch_groups<Float32>(const CastArgs&, Kind, const Where&);
extern template void launch_groups<BFloat16>(const CastArgs&, Kind, const Where&);
extern template void launch_groups<Float16>(const CastArgs&, Kind, const Where&);

extern template void launch_cast<Float32>(const CastArgs&, Kind, Kind, const Where&);
extern template void launch_cast<BFloat16>(const CastArgs&, Kind, Kind, const Where&);
extern template void launch_cast<Float16>(const CastArgs&, Kind, Kind, const Where&);

}  // namespace mh::cuda
