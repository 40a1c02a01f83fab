// Quantize on CUDA: prepares the kernels' arguments. One launch casts both directions, by strips where these fit; amaxes
// that must be known first take a pass of their own.
#include <algorithm>

#include "amax.h"
#include "dense_strips.h"

namespace mh::cuda {
namespace {

Kind kind_of(const FormatSpec& spec) {
  if (spec.element != Element::e2m1) return Kind::fp8;
  return spec.rht || spec.sr ? Kind::fp4_mixed : Kind::fp4;
}

int log2_of(int power) {
  int log = 0;
  while (1 << log < power) ++log;
  return log;
}

// `swapped`: the kernel sees the transposed matrix, where a cast along rows is one along columns and the other way round.
Direction make_direction(const QuantizeArgs& a, bool swapped) {
  Direction d{};
  d.spec = a.spec;
  if (swapped) {
    d.spec.axis = 1 - a.spec.axis;
    d.spec.block_m = a.spec.block_k;
    d.spec.block_k = a.spec.block_m;
  }
  d.block_m_log = log2_of(d.spec.block_m);
  d.block_k_log = log2_of(d.spec.block_k);
  const int64_t last = a.out.transposed ? a.x.rows : a.x.cols;
  d.codes = a.out.codes;
  d.pitch = a.spec.element == Element::e2m1 ? (last + 1) / 2 : last;
  d.transposed = a.out.transposed != swapped;
  d.width = access_width(d.codes, d.pitch);
  d.scale = a.out.scale;
  const int64_t scale_pitch = a.spec.block_k ? (a.x.cols + a.spec.block_k - 1) / a.spec.block_k : 1;
  d.scale_step_m = swapped ? 1 : scale_pitch;
  d.scale_step_k = swapped ? scale_pitch : 1;
  d.amax = a.out.amax;
  d.fixed_scale = a.fixed_scale;
  d.history = a.fixed_scale ? a.measured : nullptr;
  d.noise = Noise{a.rng, a.row_ids, a.x.rows, swapped, a.spec.axis};
  return d;
}

bool loads_vectors(const Matrix& x) {
  const int64_t size = x.dtype == Dtype::f32 ? 4 : 2;
  return x.col_stride == 1 && access_width(x.data, x.row_stride * size) == kVector;
}

bool is_computed(const PairArgs& p) { return p.gate || p.grad; }

// Whether tiles are read 16 bytes at a time: computed ones need whole chunks of everything that they come from.
bool loads_vectors(const PairArgs& p, const Matrix& x) {
  if (!loads_vectors(x)) return false;
  constexpr int kMost = kVector / 2;  // elements of a chunk
  if (p.gate) return access_width(p.gate, 0) == kVector && x.cols % kMost == 0;
  const int64_t size = x.dtype == Dtype::f32 ? 4 : 2;
  return !p.grad || (access_width(p.grad, p.grad_stride * size) == kVector && x.cols / 2 % kMost == 0);
}

// The kernel writes payloads of lines along K as they lie, so at most one way of looking at the matrix may fit: that
// with an untransposed row payload, or the swapped one with a transposed column payload.
bool fits(const PairArgs& p, bool swapped) {
  return swapped ? !p.derived && (!p.has_col || p.col.out.transposed) : !p.has_row || !p.row.out.transposed;
}

// Whether the kernel sees the transposed matrix: where its memory runs along M, or where only that fits. Sums are over M as
// the kernel sees it.
bool sees_swapped(const PairArgs& p, const Matrix& x) {
  const bool prefers = !p.sums && !is_computed(p) && x.col_stride != 1 && x.row_stride == 1;
  return fits(p, prefers) ? prefers : !prefers;
}

bool is_measured(const QuantizeArgs& a) { return a.measured && !a.fixed_scale; }

__global__ void __launch_bounds__(kThreads) clear_panels(Panels panels, int64_t rows, const int32_t* noop) {
  if (noop && *noop) return;
  for (int64_t i = blockIdx.x * static_cast<int64_t>(kThreads) + threadIdx.x; i < rows; i += gridDim.x * static_cast<int64_t>(kThreads)) {
    panels.amax[i] = 0.0f;
    if (i < panels.count) panels.done[i] = 0;
  }
}

bool any_measured(const PairArgs& p) { return (p.has_row && is_measured(p.row)) || (p.has_col && is_measured(p.col)); }

Matrix matrix_of(const PairArgs& p) { return contiguous_strides(p.has_col && !p.has_row ? p.col.x : p.row.x); }

// What a cast is told, looks for amaxes aside. `swapped`: the kernel sees the transpose of x.
CastArgs cast_args(const PairArgs& p, const Matrix& x, bool swapped, bool backwards) {
  CastArgs a{};
  a.x = swapped ? transposed(x) : x;
  a.gate = p.gate, a.grad = p.grad, a.grad_stride = p.grad_stride;
  a.vector = loads_vectors(p, a.x);
  a.tiling = make_tiling(a.x.rows, a.x.cols, backwards);
  a.tiling.halves = p.grad != nullptr;
  a.items = a.tiling.count;
  if (p.has_row) (swapped ? a.col : a.row) = make_direction(p.row, swapped);
  if (p.has_col) (swapped ? a.row : a.col) = make_direction(p.col, swapped);
  a.sums = p.sums;
  a.derived = p.derived;
  return a;
}

// Has the kernel take the row amaxes itself.
void start_looks(CastArgs& a, const QuantizeArgs& row, const Where& where) {
  const int64_t rows = a.x.rows;
  const auto looks_across = static_cast<uint32_t>((a.x.cols + kLookCols - 1) / kLookCols);
  a.panels = Panels{row.scratch, row.measured, static_cast<uint32_t>((rows + kTile - 1) / kTile), looks_across};
  a.items += (a.panels.count + std::min(a.panels.count, kAhead)) * looks_across;
  launch(clear_panels, grid_for((rows + kThreads - 1) / kThreads), 0, where, "quantize", a.panels, rows, a.noop);
}

// `looks`: the kernel takes the row amaxes itself.
void launch_pair(const PairArgs& p, bool looks, const Where& where) {
  const QuantizeArgs& any = p.has_col && !p.has_row ? p.col : p.row;
  const Matrix x = matrix_of(p);
  const bool swapped = sees_swapped(p, x);
  // after an amax pass, backwards: the end of what that pass read is still in the L2
  CastArgs a = cast_args(p, x, swapped, any_measured(p) && !looks);
  a.noop = any.noop;
  if (looks) start_looks(a, p.row, where);
  const bool has_row = swapped ? p.has_col : p.has_row, has_col = swapped ? p.has_row : p.has_col;
  const Kind row = has_row ? kind_of(a.row.spec) : Kind::none, col = has_col ? kind_of(a.col.spec) : Kind::none;
  by_dtype(x.dtype, [&](auto t) { launch_cast<decltype(t)>(a, row, col, where); });
}

// What casts of groups and their amaxes are told alike.
StripArgs of_groups(const PairArgs& p) {
  StripArgs s{};
  CastArgs& a = s.cast;
  a.x = contiguous_strides(p.col.x);
  a.gate = p.gate, a.grad = p.grad, a.grad_stride = p.grad_stride;
  a.vector = loads_vectors(p, a.x);
  a.tiling = make_tiling(p.groups.count * kTile, p.grad ? a.x.cols / 2 : a.x.cols, false);
  a.items = a.tiling.count;
  a.groups = p.groups;
  s.weights = p.weights;
  s.down = p.groups.choice && p.groups.rows > a.x.rows;
  return s;
}

// Whether strips fit. Raises where they do not and the rows are computed, which nothing else does.
bool take_strips(const StripArgs& s, bool rows) {
  if (fits_strips(s, rows)) return true;
  if (!s.cast.gate && !s.cast.grad) return false;
  throw std::runtime_error("megatron_hybrid._C_cuda: rows of groups are computed in 16 bits, whole 16 bytes of them");
}

// All groups' columns, and their rows beside them.
void cast_groups(const PairArgs& p, const Where& where) {
  StripArgs strips = of_groups(p);
  CastArgs& a = strips.cast;
  QuantizeArgs col = p.col;
  col.x = Matrix{a.x.data, a.x.dtype, a.groups.count * kTile, a.x.cols, a.x.row_stride, a.x.col_stride};
  a.col = make_direction(col, false);
  if (p.has_row) a.row = make_direction(p.row, false);
  if (take_strips(strips, p.has_row)) return launch_strips(strips, p.has_row, where);
  by_dtype(a.x.dtype, [&](auto t) { launch_groups<decltype(t)>(a, p.has_row ? Kind::fp8 : Kind::none, where); });
}

bool has_work(const QuantizeArgs& a) { return a.x.rows * a.x.cols > 0 || is_preset(a.spec); }

// Whether the row amaxes of a cast can be taken on the way: those of the values as they are, not transformed.
bool can_look(const PairArgs& p) {
  const bool wanted = p.has_row && p.row.spec.outer_rows && !p.row.spec.rht && is_measured(p.row) && p.row.scratch;
  return wanted && p.row.x.rows * p.row.x.cols > 0 && !p.row.out.transposed && !sees_swapped(p, contiguous_strides(p.row.x));
}

// Whether amaxes of lines are asked for, of FP8: NVFP4's leave NaNs out and may be of transformed values.
bool measures_lines(bool has, const QuantizeArgs& a) {
  return has && is_measured(a) && a.spec.outer_rows && a.spec.element != Element::e2m1;
}

// Takes the amaxes asked for and casts by strips; false, and nothing done, where these do not fit. Amaxes of columns, and
// of rows in the same read, are taken by strips too; those of rows alone where the cast holds whole rows. Those of rows
// beside columns that need none are taken on the way (panels.cuh): FP8's of another cast, which is left to it.
bool cast_by_strips(const PairArgs& p, const Where& where) {
  if (p.derived || p.sums || !(p.has_row || p.has_col)) return false;
  const Matrix x = matrix_of(p);
  if (x.rows * x.cols == 0 || !(fits(p, false) || fits(p, true))) return false;
  const bool swapped = sees_swapped(p, x);
  const bool rows = swapped ? p.has_col : p.has_row, cols = swapped ? p.has_row : p.has_col;
  const QuantizeArgs &of_rows = swapped ? p.col : p.row, &of_columns = swapped ? p.row : p.col;
  StripArgs s{};
  s.cast = cast_args(p, x, swapped, false);
  if (p.grad) {  // a thread block has both halves of its tile's rows
    s.cast.tiling = make_tiling(s.cast.x.rows, s.cast.x.cols / 2, false);
    s.cast.items = s.cast.tiling.count;
  }
  s.cast.noop = (p.has_row ? p.row : p.col).noop;
  const bool row_lines = measures_lines(rows, of_rows), column_lines = measures_lines(cols, of_columns);
  s.of_rows = row_lines ? reinterpret_cast<int32_t*>(of_rows.measured) : nullptr;
  s.of_columns = column_lines ? reinterpret_cast<int32_t*>(of_columns.measured) : nullptr;
  if (row_lines && !cols && fits_whole_rows(s.cast)) return launch_whole_rows(s, where), true;
  const bool looked_for = can_look(p) && !column_lines, looks = looked_for && is_fp4(s.cast.row);
  if (looked_for && !looks && !p.any_strips) return false;
  if (!fits_dense_strips(s.cast, rows, cols, p.any_strips)) return false;
  // of few rows the other pass needs no zeros before
  const bool columns_alone = column_lines && s.cast.x.rows > kTile && !(rows && is_measured(of_rows));
  PairArgs others = p;
  others.has_row = p.has_row && !looks;
  columns_alone || (row_lines && column_lines) ? launch_dense_amaxes(s, where) : measure(others, where);
  if (looks) start_looks(s.cast, p.row, where);
  s.cast.tiling.backwards = any_measured(p) && !looks;
  const Kind row = rows ? kind_of(s.cast.row.spec) : Kind::none, col = cols ? kind_of(s.cast.col.spec) : Kind::none;
  if ((rows && is_fp4(s.cast.row)) || (cols && is_fp4(s.cast.col)))
    launch_fp4_strips(s, row, col, where);
  else
    launch_dense_strips(s, rows, cols, where);
  return true;
}

}  // namespace

bool amax_by_strips(const GroupAmaxArgs& args, const Where& where) {
  StripArgs strips = of_groups(args.cast);
  strips.weights.dots = nullptr;  // the cast's
  strips.of_columns = args.of_columns, strips.of_rows = args.of_rows;
  if (!take_strips(strips, false)) return false;
  launch_strips(strips, false, where);
  return true;
}

void quantize(const PairArgs& args, const Where& where) {
  const OnDevice on(where, "quantize");
  if (args.groups.ends) return cast_groups(args, where);
  if (cast_by_strips(args, where)) return;
  const bool looks = can_look(args);
  PairArgs p = args;
  p.has_row = args.has_row && !looks;
  measure(p, where);
  p.has_row = args.has_row && has_work(args.row);
  p.has_col = args.has_col && has_work(args.col);
  if (!p.has_row && !p.has_col && !p.sums) return;
  if (fits(p, false) || fits(p, true)) return launch_pair(p, looks, where);
  p.has_col = false;
  launch_pair(p, false, where);
  p.has_col = true, p.has_row = false, p.sums = nullptr;
  launch_pair(p, false, where);
}

}  // namespace mh::cuda
