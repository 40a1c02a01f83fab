// Quantize: tile by tile, band by band. A band is the rows one row of scale blocks covers: one row for blocks along K,
// block_m rows otherwise. Block amaxes of several bands are collected and turned into multipliers, then their elements
// are encoded.
#pragma once

#include "../numerics/random.h"
#include "../numerics/scales.h"
#include "layout.h"

MH_NUMERICS_BEGIN

constexpr int kGroup = 16;  // every block's width is a multiple of it, or 1

struct Band {
  int64_t block_row;  // row of the scale array
  int first, rows;    // rows in the tile
};

// Largest |x| of every column of the band, as bits.
inline void column_amax(Scratch& s, const Band& b, int cols, int32_t* amax) {
  int j = 0;
  for (; j + kLanes <= cols; j += kLanes) {
    const float* at = s.row(b.first) + j;
    IntLanes all = abs_lanes(load_lanes<FloatLanes>(at));
    for (int i = 1; i < b.rows; ++i) all = max_lanes(all, abs_lanes(load_lanes<FloatLanes>(at + i * kTileCols)));
    store_lanes(amax + j, all);
  }
  for (; j < cols; ++j) {
    amax[j] = 0;
    for (int i = 0; i < b.rows; ++i) amax[j] = max_bits(amax[j], abs_bits(s.row(b.first + i)[j]));
  }
}

// Largest magnitudes of groups of 16 neighbours, given as the bits of numbers; the last group may be short.
inline void group_amax_16(const float* in, int32_t* out, int n) {
  constexpr int kParts = kGroup / kLanes, kAtATime = kGroup * kLanes;
  int j = 0;
  for (; j + kAtATime <= n; j += kAtATime) {
    IntLanes v[kLanes];
    MH_UNROLL
    for (int g = 0; g < kLanes; ++g) {
      const float* at = in + j + g * kGroup;
      v[g] = abs_lanes(load_lanes<FloatLanes>(at));
      MH_UNROLL
      for (int part = kLanes; part < kParts * kLanes; part += kLanes)
        v[g] = max_lanes(v[g], abs_lanes(load_lanes<FloatLanes>(at + part)));
    }
    store_lanes(out + j / kGroup, largest_lanes(v));
  }
  for (; j < n; j += kGroup) {
    int32_t most = 0;
    for (int e = j; e < n && e < j + kGroup; ++e) most = max_bits(most, abs_bits(in[e]));
    out[j / kGroup] = most;
  }
}

// The same for groups of `size` neighbours, a multiple of 16.
inline void group_amax(int size, const float* in, int32_t* out, int n) {
  group_amax_16(in, out, n);
  const int parts = size / kGroup, sixteens = (n + kGroup - 1) / kGroup;
  if (parts == 1) return;
  for (int g = 0; g * parts < sixteens; ++g) {
    int32_t most = out[g * parts];
    for (int e = g * parts + 1; e < sixteens && e < (g + 1) * parts; ++e) most = max_bits(most, out[e]);
    out[g] = most;
  }
}

// What elements are multiplied by: one number for `size` neighbours.
struct Multipliers {
  const float* of;
  int size;

  float at(int j) const { return of[j / size]; }
};

// kLanes of them, from element j on.
template <int size>
MH_HD FloatLanes multiplier_lanes(const Multipliers& m, int j) {
  if constexpr (size >= kLanes) {
    return FloatLanes{} + m.of[j / size];
  } else {
    static_assert(size == 1, "blocks are at least as wide as a vector");
    return load_lanes<FloatLanes>(m.of + j);
  }
}

// NVFP4's outer encode scales of blocks, and their inverses; other rules do not read them.
struct Outer {
  alignas(kCacheLine) float enc[kTileCols];
  alignas(kCacheLine) float inverse[kTileCols];

  void set(int first, int n, float scale) {
    const float inv = 1.0f / scale;
    for (int g = first; g < first + n; ++g) enc[g] = scale, inverse[g] = inv;
  }
};

// Scales of n blocks from their amaxes: multipliers, and what is stored.
template <ScaleRule rule>
inline void block_scales(const FormatSpec& spec, const int32_t* __restrict amax, const Outer& outer, int n,
                         float* __restrict mult, uint32_t* __restrict stored) {
  for (int g = 0; g < n; ++g) {
    const BlockScale s = block_scale<rule>(spec, amax_from_bits(amax[g]), outer.enc[g], outer.inverse[g]);
    mult[g] = s.multiplier;
    stored[g] = s.stored;
  }
}

// Multipliers of a band's columns where the scale is known before the cast.
inline void preset_multipliers(const QuantizeArgs& a, const Tile& t, const Band& b, float* mult) {
  if (a.spec.outer_rows && a.spec.axis == 1) {
    for (int j = 0; j < t.cols; ++j) mult[j] = preset_encode_scale(a.spec, a.out.amax[t.k0 + j], a.fixed_scale);
    return;
  }
  const float amax = a.out.amax[a.spec.outer_rows ? t.m0 + b.first : 0];
  const float scale = preset_encode_scale(a.spec, amax, a.fixed_scale);
  for (int j = 0; j < t.cols; ++j) mult[j] = scale;
}

// The bands of a tile, several at a time: their scales are computed together, because one band's are few and each waits
// long for its divisions.
struct Bands {
  int size, across, together;  // rows of a band, blocks across a tile, bands at a time

  Bands(const FormatSpec& spec, const Tile& t)
      : size(spec.block_m > 0 ? spec.block_m : t.rows),
        across(spec.block_k > 0 ? (t.cols + spec.block_k - 1) / spec.block_k : 1),
        together(kTileCols / across) {}
};

struct BandScales {
  alignas(kCacheLine) int32_t amax[kTileCols];
  alignas(kCacheLine) float mult[kTileCols];
  alignas(kCacheLine) uint32_t stored[kTileCols];
  alignas(kCacheLine) uint8_t bytes[kTileCols];  // the same, where a byte is stored
  Outer outer;
};

// Block amaxes of one band, and the outer scales they are under, as blocks from `first` on.
inline void add_band(const QuantizeArgs& a, const Tile& t, const Band& b, Scratch& s, int first, int n,
                     BandScales& out) {
  const int size = a.spec.block_k;
  int32_t* amax = out.amax + first;
  if (size == 1) {
    column_amax(s, b, t.cols, amax);
  } else if (b.rows == 1) {
    group_amax(size, s.row(b.first), amax, t.cols);
  } else {
    alignas(kCacheLine) int32_t bits[kTileCols];
    alignas(kCacheLine) float columns[kTileCols];
    column_amax(s, b, t.cols, bits);
    memcpy(columns, bits, static_cast<size_t>(t.cols) * sizeof(float));
    group_amax(size, columns, amax, t.cols);
  }
  if (a.spec.scale_rule == ScaleRule::e4m3_amax && a.spec.outer_rows && a.spec.axis == 0)
    out.outer.set(first, n, nvfp4_outer_encode(a.out.amax[t.m0 + b.first]));
}

// Outer scales that the bands of a tile share.
inline void shared_outer(const QuantizeArgs& a, const Tile& t, const Bands& bands, Outer& outer) {
  if (a.spec.scale_rule != ScaleRule::e4m3_amax) return outer.set(0, kTileCols, 1.0f);
  if (!a.spec.outer_rows) return outer.set(0, kTileCols, nvfp4_outer_encode(*a.out.amax));
  if (a.spec.axis == 0) return;  // each band has its own
  for (int j = 0; j < t.cols; ++j) {
    outer.enc[j] = nvfp4_outer_encode(a.out.amax[t.k0 + j]);
    outer.inverse[j] = 1.0f / outer.enc[j];
  }
  for (int i = t.cols; i < bands.together * t.cols; ++i) {
    outer.enc[i] = outer.enc[i - t.cols];
    outer.inverse[i] = outer.inverse[i - t.cols];
  }
}

// Scales of the first n blocks; says whether all are numbers. Where they are not, some elements are NaN; elsewhere none
// can be: a block with a NaN has a NaN for its scale, and multipliers are neither 0 nor Inf.
inline bool block_scales(const FormatSpec& spec, int n, BandScales& s) {
  switch (spec.scale_rule) {
    case ScaleRule::e8m0: block_scales<ScaleRule::e8m0>(spec, s.amax, s.outer, n, s.mult, s.stored); break;
    case ScaleRule::e4m3_amax: block_scales<ScaleRule::e4m3_amax>(spec, s.amax, s.outer, n, s.mult, s.stored); break;
    default: block_scales<ScaleRule::fp32>(spec, s.amax, s.outer, n, s.mult, s.stored);
  }
  int nans = 0;
  for (int g = 0; g < n; ++g) {
    s.bytes[g] = static_cast<uint8_t>(s.stored[g]);
    nans |= s.mult[g] != s.mult[g];
  }
  return nans == 0;
}

// Stored scales of a band whose blocks start at `first`, from element `at` of the scale array on.
inline void store_scales(const QuantizeArgs& a, int64_t at, const BandScales& s, int first, int n) {
  if (a.spec.scale_rule == ScaleRule::fp32)
    memcpy(static_cast<float*>(a.out.scale) + at, s.stored + first, static_cast<size_t>(n) * sizeof(float));
  else
    memcpy(static_cast<uint8_t*>(a.out.scale) + at, s.bytes + first, static_cast<size_t>(n));
}

// E2M1 has no NaN to write: `numbers` says that there is none to be told from a number.
template <class E, int size>
inline void encode_row(const float* __restrict x, const Multipliers& mult, uint8_t* __restrict codes, int n,
                       bool numbers) {
  int j = 0;
  if (E::kNan != 0 || numbers)
    for (; j + kByteGroup <= n; j += kByteGroup) {
      IntLanes v[4];
      MH_UNROLL
      for (int i = 0; i < 4; ++i) {
        const int at = j + i * kLanes;
        const FloatLanes scaled = load_lanes<FloatLanes>(x + at) * multiplier_lanes<size>(mult, at);
        v[i] = E::kNan != 0 ? encode_words<E>(scaled) : encode_number<E>(scaled);
      }
      store_bytes(codes + j, v);
    }
  for (; j < n; ++j) codes[j] = static_cast<uint8_t>(encode<E>(x[j] * mult.at(j)));
}

// Random draws for n elements from global index `first` on; returns where they start in `draws`.
constexpr int kDrawsAtATime = kDrawsPerCall * kCallsAtATime;
constexpr int kRowDraws = kTileCols + kDrawsPerCall + kDrawsAtATime;

inline int row_draws(const RandomKey& key, uint64_t first, int n, uint16_t* draws) {
  const int skip = static_cast<int>(first % kDrawsPerCall);
  for (int at = 0; at < skip + n; at += kDrawsAtATime)
    draw_lanes(key, first / kDrawsPerCall + static_cast<uint64_t>(at / kDrawsPerCall), draws + at);
  return skip;
}

template <int size>
inline void encode_row_stochastic(const QuantizeArgs& a, int64_t m, int64_t k0, const float* __restrict x,
                                  const Multipliers& mult, uint8_t* __restrict codes, int n, bool numbers) {
  alignas(kCacheLine) uint16_t draws[kRowDraws];
  const int64_t row = a.row_ids ? a.row_ids[m] : m + a.rng[kRowOffset];
  const uint64_t first = static_cast<uint64_t>(row * a.rng[kGlobalCols] + k0 + a.rng[kColOffset]);
  const uint16_t* __restrict u = draws + row_draws(random_key(a.rng, a.spec.axis), first, n, draws);
  int j = 0;
  if (numbers)
    for (; j + kByteGroup <= n; j += kByteGroup) {
      IntLanes v[4];
      MH_UNROLL
      for (int i = 0; i < 4; ++i) {
        const int at = j + i * kLanes;
        const IntLanes bits = __builtin_convertvector(load_lanes<DrawLanes>(u + at), IntLanes);
        v[i] = encode_number_stochastic(load_lanes<FloatLanes>(x + at) * multiplier_lanes<size>(mult, at), bits);
      }
      store_bytes(codes + j, v);
    }
  for (; j < n; ++j) codes[j] = static_cast<uint8_t>(encode_e2m1_stochastic(x[j] * mult.at(j), u[j]));
}

template <int size>
inline void encode_band(const QuantizeArgs& a, const Tile& t, const Tile& next, const Band& b, Scratch& s,
                        const Multipliers& mult, bool numbers) {
  for (int i = b.first; i < b.first + b.rows; ++i) {
    prefetch_row(a.x, next, i);
    switch (a.spec.element) {
      case Element::e4m3: encode_row<E4M3, size>(s.row(i), mult, s.code_row(i), t.cols, numbers); break;
      case Element::e5m2: encode_row<E5M2, size>(s.row(i), mult, s.code_row(i), t.cols, numbers); break;
      case Element::e2m1:
        if (a.spec.sr)
          encode_row_stochastic<size>(a, t.m0 + i, t.k0, s.row(i), mult, s.code_row(i), t.cols, numbers);
        else
          encode_row<E2M1, size>(s.row(i), mult, s.code_row(i), t.cols, numbers);
    }
  }
}

inline void encode_band(const QuantizeArgs& a, const Tile& t, const Tile& next, const Band& b, Scratch& s,
                        const Multipliers& mult, bool numbers) {
  switch (mult.size) {
    case 1: return encode_band<1>(a, t, next, b, s, mult, numbers);
    case 16: return encode_band<16>(a, t, next, b, s, mult, numbers);
    case 32: return encode_band<32>(a, t, next, b, s, mult, numbers);
    default: return encode_band<128>(a, t, next, b, s, mult, numbers);
  }
}

inline void quantize_preset(const QuantizeArgs& a, const Tile& t, const Tile& next, Scratch& s) {
  const Bands bands(a.spec, t);
  alignas(kCacheLine) float mult[kTileCols];
  for (int first = 0; first < t.rows; first += bands.size) {
    const Band b{(t.m0 + first) / bands.size, first, t.rows - first < bands.size ? t.rows - first : bands.size};
    preset_multipliers(a, t, b, mult);
    encode_band(a, t, next, b, s, Multipliers{mult, 1}, false);
  }
}

inline void quantize_blocks(const QuantizeArgs& a, const Tile& t, const Tile& next, Scratch& s) {
  const Bands bands(a.spec, t);
  const int64_t blocks = (a.x.cols + a.spec.block_k - 1) / a.spec.block_k;
  BandScales scales;
  shared_outer(a, t, bands, scales.outer);
  const auto band = [&](int i) {
    const int first = i * bands.size;
    return Band{(t.m0 + first) / bands.size, first, t.rows - first < bands.size ? t.rows - first : bands.size};
  };
  const int count = (t.rows + bands.size - 1) / bands.size;
  for (int from = 0; from < count; from += bands.together) {
    const int n = count - from < bands.together ? count - from : bands.together;
    for (int i = 0; i < n; ++i) add_band(a, t, band(from + i), s, i * bands.across, bands.across, scales);
    const bool numbers = block_scales(a.spec, n * bands.across, scales);
    for (int i = 0; i < n; ++i) {
      const Band b = band(from + i);
      store_scales(a, b.block_row * blocks + t.k0 / a.spec.block_k, scales, i * bands.across, bands.across);
      encode_band(a, t, next, b, s, Multipliers{scales.mult + i * bands.across, a.spec.block_k}, numbers);
    }
  }
}

// `next`: the tile after this one, which is asked for meanwhile.
inline void quantize_tile(const QuantizeArgs& a, const Tile& t, const Tile& next, Scratch& s) {
  load_tile(a.x, t, s);
  if (a.spec.rht) hadamard_tile(a.spec, t, s, false);
  if (is_preset(a.spec))
    quantize_preset(a, t, next, s);
  else
    quantize_blocks(a, t, next, s);
  store_codes(a.out, a.spec.element == Element::e2m1, a.x.rows, a.x.cols, t, s);
}

inline void write_preset_scales(const QuantizeArgs& a) {
  const int64_t n = !a.spec.outer_rows ? 1 : (a.spec.axis == 0 ? a.x.rows : a.x.cols);
  float* out = static_cast<float*>(a.out.scale);
  for (int64_t i = 0; i < n; ++i) out[i] = 1.0f / preset_encode_scale(a.spec, a.out.amax[i], a.fixed_scale);
}

inline void quantize(const QuantizeArgs& a, int threads) {
  if (a.noop && *a.noop) return;
  if (is_preset(a.spec)) write_preset_scales(a);  // also where the payload is empty
  const bool tall = a.out.transposed || a.x.col_stride != 1;
  const Tiling tiling = make_tiling(a.spec, a.x.rows, a.x.cols, tall);
  const int64_t n = tiling.count();
#pragma omp parallel num_threads(useful_threads(threads, a.x.rows * a.x.cols))
  {
    Scratch s;
#pragma omp for schedule(static)
    for (int64_t i = 0; i < n; ++i) quantize_tile(a, tiling.tile(i), i + 1 < n ? tiling.tile(i + 1) : Tile{}, s);
    finish_stream();
  }
}

MH_NUMERICS_END
