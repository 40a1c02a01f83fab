// Random casts and decodes over buffers of exactly the size they need, for the sanitizers; results are not looked at.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <vector>

#include "backend.h"

namespace {

using namespace mh;

std::mt19937 rng(1);
const Where kHere{0, 0};

bool one_in(unsigned n) { return rng() % n == 0; }

class Buffers {
 public:
  ~Buffers() {
    for (void* p : all_) free(p);
  }
  template <class T>
  T* get(int64_t n) {
    void* p = nullptr;
    const size_t bytes = static_cast<size_t>(n) * sizeof(T);
    if (posix_memalign(&p, 256, bytes > 0 ? bytes : 1)) abort();
    memset(p, 0x5a, bytes);
    all_.push_back(p);
    return static_cast<T*>(p);
  }

 private:
  std::vector<void*> all_;
};

std::vector<FormatSpec> formats(int axis) {
  std::vector<FormatSpec> all;
  const auto add = [&](Element e, ScaleRule rule, int along, bool square, bool outer_rows = false, bool rht = false, bool sr = false) {
    const int across = square ? along : (outer_rows || along > 0 ? 1 : 0);
    all.push_back({e, rule, axis, axis == 0 ? across : along, axis == 0 ? along : across, true, 0.0f, outer_rows, rht, sr});
  };
  add(Element::e4m3, ScaleRule::fp32, 0, false);
  add(Element::e5m2, ScaleRule::fp32, 0, false, true);
  for (bool square : {false, true}) {
    add(Element::e4m3, ScaleRule::fp32, 128, square);
    add(Element::e5m2, ScaleRule::e8m0, 32, square);
  }
  for (int bits = 0; bits < 8; ++bits)
    add(Element::e2m1, ScaleRule::e4m3_amax, 16, false, bits & 1, bits & 2, bits & 4);
  add(Element::e2m1, ScaleRule::e4m3_amax, 16, true, false, false, true);
  return all;
}

int64_t blocks(int64_t extent, int block) { return block ? (extent + block - 1) / block : 1; }

Matrix random_matrix(Buffers& buffers) {
  constexpr int64_t kShapes[][2] = {{256, 128}, {145, 272}, {130, 136}, {67, 35}, {1, 300}, {300, 1}, {128, 1040}, {900, 64}};
  const auto& shape = kShapes[rng() % 8];
  Matrix x{nullptr, static_cast<Dtype>(rng() % 3), shape[0], shape[1], shape[1], 1};
  const int64_t size = x.dtype == Dtype::f32 ? 4 : 2;
  int64_t n = x.rows * x.cols, first = 0;
  switch (rng() % 4) {
    case 1: x.row_stride = 1, x.col_stride = x.rows; break;
    case 2:
      x.row_stride = 2 * x.cols, x.col_stride = 2;
      n = (x.rows - 1) * x.row_stride + (x.cols - 1) * x.col_stride + 1;
      break;
    case 3: first = 1;
  }
  uint8_t* data = buffers.get<uint8_t>((n + first) * size) + first * size;
  const bool any_bits = one_in(2);
  for (int64_t i = 0; i < n; ++i) {
    uint32_t bits = static_cast<uint32_t>(rng());
    if (!any_bits) bits = (bits & 0x83ffffffu) | 0x3c000000u;  // moderate, whatever the type
    memcpy(data + i * size, reinterpret_cast<const uint8_t*>(&bits) + 4 - size, static_cast<size_t>(size));
  }
  x.data = data;
  return x;
}

QuantizeArgs random_cast(Buffers& buffers, const FormatSpec& spec, const Matrix& x, bool transposed) {
  const bool fp4 = spec.element == Element::e2m1;
  const int64_t last = transposed ? x.rows : x.cols, rows = transposed ? x.cols : x.rows;
  const int64_t num_scales = blocks(x.rows, spec.block_m) * blocks(x.cols, spec.block_k);
  const int64_t num_amaxes = spec.outer_rows ? (spec.axis == 0 ? x.rows : x.cols) : (fp4 || spec.block_m == 0 ? 1 : 0);
  QuantizeArgs a{};
  a.spec = spec;
  a.x = x;
  a.out.codes = buffers.get<uint8_t>(rows * (fp4 ? (last + 1) / 2 : last));
  a.out.transposed = transposed;
  a.out.scale = buffers.get<uint8_t>(num_scales * (spec.scale_rule == ScaleRule::fp32 ? 4 : 1));
  float* amax = buffers.get<float>(num_amaxes);
  for (int64_t i = 0; i < num_amaxes; ++i) amax[i] = 3.5f;
  a.out.amax = amax;
  a.fixed_scale = spec.block_m == 0 && spec.block_k == 0 && one_in(2);
  if (num_amaxes > 0 && one_in(2)) {
    a.measured = a.fixed_scale ? buffers.get<float>(1) : amax;
    if (a.fixed_scale) *a.measured = 0.5f;
    if (spec.outer_rows && spec.axis == 0 && !one_in(4)) a.scratch = buffers.get<int32_t>(blocks(x.rows, kPanelRows));
  }
  int64_t* words = buffers.get<int64_t>(kRngFields);
  const bool aligned = one_in(2);
  const int64_t values[] = {1, 2, 3, 64, aligned ? 8 : 3, aligned ? (x.cols + 15) / 8 * 8 : x.cols + 5};
  memcpy(words, values, sizeof values);
  a.rng = words;
  if (one_in(3)) {
    int64_t* ids = buffers.get<int64_t>(x.rows);
    for (int64_t i = 0; i < x.rows; ++i) ids[i] = static_cast<int64_t>(rng());
    a.row_ids = ids;
  }
  return a;
}

DequantizeArgs random_decode(Buffers& buffers, const QuantizeArgs& q) {
  DequantizeArgs d{};
  d.spec = q.spec;
  d.in = q.out;
  d.outer = one_in(2);
  d.inverse_rht = one_in(2);
  const int64_t m = q.x.rows, k = q.x.cols, first = one_in(4);
  const bool down = one_in(2);
  d.out = Matrix{nullptr, static_cast<Dtype>(rng() % 3), m, k, down ? 1 : k, down ? m : 1};
  const int64_t size = d.out.dtype == Dtype::f32 ? 4 : 2;
  d.out.data = buffers.get<uint8_t>((m * k + first) * size) + first * size;
  return d;
}

// As the operands of a product are decoded.
void decode_both(Buffers& buffers, const QuantizeArgs& a, const QuantizeArgs& b) {
  OperandsArgs both{{random_decode(buffers, a), random_decode(buffers, b)}, {true, true}, nullptr};
  const bool amaxes = a.spec.element == Element::e2m1 && b.spec.element == Element::e2m1;
  if (amaxes && !one_in(4)) both.factor = buffers.get<float>(1);
  cuda::decode_operands(both, kHere);
}

// Groups of rows of 0 to 300, and the map of their blocks with one that is not used; rows are copies where `copied`.
Groups random_groups(Buffers& buffers, bool copied, int64_t rows_of_x) {
  constexpr int64_t kSizes[] = {0, 1, 7, 44, 128, 300}, kGroups = 4;
  int64_t sizes[kGroups], count = 1, rows = 0;
  for (int64_t& size : sizes) size = kSizes[rng() % 6], count += blocks(size, kPanelRows);
  int32_t* ends = buffers.get<int32_t>(kGroups);
  int32_t* map = buffers.get<int32_t>(3 * count);
  int64_t block = 0;
  for (int64_t g = 0; g < kGroups; rows += sizes[g], ends[g++] = static_cast<int32_t>(block)) {
    for (int64_t first = 0; first < sizes[g]; first += kPanelRows, ++block) {
      const int64_t of_block[] = {g, rows + first, std::min<int64_t>(kPanelRows, sizes[g] - first)};
      for (int n = 0; n < 3; ++n) map[n * count + block] = static_cast<int32_t>(of_block[n]);
    }
  }
  Groups g{ends, map, kGroups, count, rows, nullptr, 1};
  if (!copied) return g;
  int32_t* choice = buffers.get<int32_t>(rows);
  g.choice = choice, g.parts = 3;
  const auto places = static_cast<uint64_t>(3 * rows_of_x + 1);
  for (int64_t r = 0; r < rows; ++r) choice[r] = static_cast<int32_t>(rng() % places) - 1;
  return g;
}

// One direction of groups: scales of 128 elements, or of whole lines, whose amaxes group_amax takes.
QuantizeArgs random_cast_of_groups(Buffers& buffers, const Groups& g, int axis, int64_t width) {
  QuantizeArgs a{};
  const bool whole = one_in(2);
  const int along = whole ? 0 : kPanelRows;
  const Element element = one_in(2) ? Element::e4m3 : Element::e5m2;
  a.spec = {element, ScaleRule::fp32, axis, axis ? along : 1, axis ? 1 : along, true, 0.0f, whole, false, false};
  a.out.transposed = axis;
  a.out.codes = buffers.get<uint8_t>(axis ? width * g.count * kPanelRows : g.rows * width);
  const int64_t columns = width * (whole ? g.groups : g.count), rows = g.rows * blocks(width, along);
  a.out.scale = buffers.get<float>(axis ? columns : rows);
  return a;
}

// Rows of moderate 16-bit numbers.
uint16_t* random_rows(Buffers& buffers, int64_t rows, int64_t pitch) {
  uint16_t* data = buffers.get<uint16_t>(rows * pitch);
  for (int64_t i = 0; i < rows * pitch; ++i) data[i] = static_cast<uint16_t>((rng() & 0x83ffu) | 0x3c00u);
  return data;
}

// Rows of groups as grouped linears cast them: those that are there, copies, SwiGLU's results and its gradients.
void cast_groups(Buffers& buffers) {
  enum { kRows, kCopies, kProduct, kGradient } const of = static_cast<decltype(kRows)>(rng() % 4);
  Groups g = random_groups(buffers, of == kCopies, 70);
  const int64_t rows = of == kCopies ? 70 : g.rows, width = of == kGradient ? 256 : (one_in(2) ? 136 : 256);
  const int64_t pitch = of == kProduct ? 2 * width : width;
  uint16_t* data = random_rows(buffers, rows, pitch);
  const Matrix x{of == kProduct ? data + width : data, one_in(2) ? Dtype::bf16 : Dtype::f16, rows, width, pitch, 1};
  PairArgs p{};
  if (of == kProduct) p.gate = data;
  if (of == kGradient) p.grad_stride = width / 2 + 8, p.grad = random_rows(buffers, rows, p.grad_stride);
  if ((p.gate || p.grad) && !one_in(4)) {
    int32_t* places = buffers.get<int32_t>(g.rows);
    for (int64_t r = 0; r < g.rows; ++r) places[r] = static_cast<int32_t>(g.rows - 1 - r) - one_in(8);
    float* dots = p.grad ? buffers.get<float>(g.rows * (width / 256)) : nullptr;
    p.weights = {random_rows(buffers, g.rows, 1), Dtype::bf16, places, dots};
  }
  p.groups = g;
  p.has_col = true, p.has_row = !one_in(3);
  p.col = random_cast_of_groups(buffers, g, 1, width);
  if (p.has_row) p.row = random_cast_of_groups(buffers, g, 0, width);
  p.row.x = p.col.x = x;
  int32_t* of_columns = buffers.get<int32_t>(g.groups * width);
  int32_t* of_rows = p.has_row ? buffers.get<int32_t>(g.rows) : nullptr;
  cuda::group_amax({p, of_columns, of_rows}, kHere);
  p.col.out.amax = reinterpret_cast<float*>(of_columns), p.row.out.amax = reinterpret_cast<float*>(of_rows);
  cuda::quantize(p, kHere);
}

// FP8 as strips cast it, along one axis: scales of 128, of 128 x 128 and of 32 elements, of whole lines and of the tensor.
FormatSpec random_strip_format(int axis) {
  enum { kBlocks, kSquares, kFine, kLines, kTensor } const of = static_cast<decltype(kBlocks)>(rng() % 5);
  const int along = of == kBlocks || of == kSquares ? 128 : (of == kFine ? 32 : 0);
  const int across = of == kSquares ? 128 : (of == kTensor ? 0 : 1);
  const Element element = one_in(2) ? Element::e4m3 : Element::e5m2;
  const ScaleRule rule = of == kFine ? ScaleRule::e8m0 : ScaleRule::fp32;
  const int block_m = axis ? along : across, block_k = axis ? across : along;
  return {element, rule, axis, block_m, block_k, true, 0.0f, of == kLines, false, false};
}

// NVFP4 as strips can cast it.
FormatSpec random_fp4_format(int axis) {
  const bool square = one_in(4);
  const int across = square ? 16 : 1;
  const bool outer_rows = !square && one_in(3), rht = !square && one_in(2);
  const int block_m = axis ? 16 : across, block_k = axis ? across : 16;
  return {Element::e2m1, ScaleRule::e4m3_amax, axis, block_m, block_k, false, 0.0f, outer_rows, rht, one_in(2)};
}

// Makes a cast compute what it casts, SwiGLU or its gradient.
void compute(Buffers& buffers, PairArgs& p, const Matrix& x) {
  for (QuantizeArgs* a : {&p.row, &p.col})
    if (!a->fixed_scale) a->measured = nullptr;
  if (x.cols % 256 || one_in(2)) {
    p.gate = random_rows(buffers, x.rows, x.row_stride);
  } else {
    p.grad_stride = x.cols / 2 + (one_in(2) ? 8 : 0);
    p.grad = random_rows(buffers, x.rows, p.grad_stride);
  }
}

// Rows and columns of a tensor of 16 bits as strips cast them or can, or one of both.
void cast_dense(Buffers& buffers) {
  constexpr int64_t kShapes[][2] = {{256, 256}, {144, 272}, {400, 132}, {16, 8},   {130, 136},
                                    {48, 1040}, {3, 8200},  {96, 768},  {160, 80}, {31, 48}};
  const auto& shape = kShapes[rng() % 10];
  const int64_t pitch = (shape[1] + 7) / 8 * 8 + (one_in(2) ? 8 : 0);
  const Dtype dtype = one_in(2) ? Dtype::bf16 : Dtype::f16;
  const Matrix x{random_rows(buffers, shape[0], pitch), dtype, shape[0], shape[1], pitch, 1};
  const int32_t* noop = nullptr;
  if (one_in(4)) {
    int32_t* flag = buffers.get<int32_t>(1);
    *flag = one_in(4), noop = flag;
  }
  PairArgs p{};
  p.has_row = !one_in(4), p.has_col = !p.has_row || !one_in(4);
  p.any_strips = !one_in(4);
  for (int axis = 0; axis < 2; ++axis) {
    if (!(axis ? p.has_col : p.has_row)) continue;
    QuantizeArgs& a = axis ? p.col : p.row;
    a = random_cast(buffers, one_in(2) ? random_fp4_format(axis) : random_strip_format(axis), x, axis && !one_in(4));
    a.noop = noop;
  }
  p.row.x = x;
  if (one_in(3)) compute(buffers, p, x);
  cuda::quantize(p, kHere);
}

}  // namespace

int main(int argc, char** argv) {
  const int calls = argc > 1 ? atoi(argv[1]) : 200;
  const std::vector<FormatSpec> rows = formats(0), cols = formats(1);
  for (int i = 0; i < calls; ++i) {
    Buffers buffers;
    if (one_in(4)) {
      cast_groups(buffers);
      continue;
    }
    if (one_in(4)) {
      cast_dense(buffers);
      continue;
    }
    const Matrix x = random_matrix(buffers);
    PairArgs p{};
    const FormatSpec row = rows[rng() % rows.size()], col = cols[rng() % cols.size()];
    p.has_row = !one_in(8);
    p.has_col = !p.has_row || !one_in(8);
    p.derived = p.has_row && p.has_col && one_in(4) && col.element != Element::e2m1 && col.block_m > 1;
    if (p.has_row) p.row = random_cast(buffers, row, x, !p.derived && one_in(4));
    if (p.has_col) p.col = random_cast(buffers, col, x, !one_in(3));
    p.row.x = x;
    if (one_in(4) && !(p.has_row && p.row.out.transposed)) p.sums = buffers.get<float>(blocks(x.rows, kPanelRows) * x.cols);
    const auto measures = [](const QuantizeArgs& a) { return a.measured && !a.fixed_scale; };
    if (one_in(4) && !measures(p.row) && !measures(p.col)) p.gate = x.data;
    if (one_in(3) && !measures(p.row) && !measures(p.col) && !p.gate && x.cols % 2 == 0 && !(p.has_row && p.row.out.transposed)) {
      p.grad_stride = x.cols / 2 + (one_in(2) ? 8 : 0);
      p.grad = buffers.get<uint8_t>(((x.rows - 1) * p.grad_stride + x.cols / 2) * (x.dtype == Dtype::f32 ? 4 : 2));
    }
    cuda::quantize(p, kHere);
    if (p.has_row && p.has_col && one_in(2)) {
      decode_both(buffers, p.row, p.col);
      continue;
    }
    if (p.has_row) cuda::dequantize(random_decode(buffers, p.row), kHere);
    if (p.has_col) cuda::dequantize(random_decode(buffers, p.col), kHere);
  }
  printf("%d casts, nothing found\n", calls);
}
