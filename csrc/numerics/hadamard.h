// Hadamard transform of size 16 with a fixed sign vector: y = H (s . x) / 4, and its inverse x = s . (H y / 4).
#pragma once

#include "base.h"

MH_NUMERICS_BEGIN

constexpr int kHadamardSize = 16;
// s = + + + - + - - - - - - + - + - -, bit i set where s_i is negative
constexpr uint32_t kHadamardSigns = 0xd7e8u;

template <class T>
MH_HD void hadamard_signs(T (&v)[kHadamardSize]) {
  MH_UNROLL
  for (int i = 0; i < kHadamardSize; ++i)
    if (kHadamardSigns >> i & 1) v[i] = -v[i];
}

// Butterflies of strides `first`, 2 * first, ... below `end`.
template <int first, int end, class T>
MH_HD void hadamard_sums(T (&v)[kHadamardSize]) {
  MH_UNROLL
  for (int step = first; step < end; step *= 2) {
    MH_UNROLL
    for (int i = 0; i < kHadamardSize; ++i) {
      if (i & step) continue;
      const T a = v[i], b = v[i + step];
      v[i] = a + b;
      v[i + step] = a - b;
    }
  }
}

// In place over values v[0], v[stride], ...; FP32 without rounding steps in between. The order of the butterflies
// (strides 1, 2, 4, 8) is part of the contract: FP32 sums depend on it. T is float, or a vector of floats.
template <class T>
MH_HD void hadamard16(T (&v)[kHadamardSize], bool inverse) {
  if (!inverse) hadamard_signs(v);
  hadamard_sums<1, kHadamardSize>(v);
  MH_UNROLL
  for (int i = 0; i < kHadamardSize; ++i) {
    v[i] = v[i] * 0.25f;
    if (inverse && (kHadamardSigns >> i & 1)) v[i] = -v[i];
  }
}

MH_NUMERICS_END
