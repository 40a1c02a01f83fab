// Writing results. Large ones go past the caches: an ordinary store of a line that is not cached first reads it, and tiles
// write too few lines in a row for hardware to run ahead. Small ones stay cached for whoever reads them next.
#pragma once

#include "lanes.h"

MH_NUMERICS_BEGIN

constexpr int kCacheLine = 64;

// Whether rows of `row_bytes` from `base` on, `total` bytes in all, are to be streamed: only whole, aligned lines can be.
inline bool wants_stream(const void* base, int64_t row_bytes, int64_t total) {
#if defined(__SSE2__)
  constexpr int64_t kCached = 4 << 20;  // about what one core's own caches hold
  return total >= kCached && reinterpret_cast<uintptr_t>(base) % kCacheLine == 0 && row_bytes % kCacheLine == 0;
#else
  (void)base, (void)row_bytes, (void)total;
  return false;
#endif
}

inline void put(void* to, const void* from, int64_t bytes, bool stream) {
#if defined(__SSE2__)
  if (stream) {
    for (int64_t at = 0; at < bytes; at += 16)
      _mm_stream_si128(reinterpret_cast<__m128i*>(static_cast<char*>(to) + at),
                       _mm_loadu_si128(reinterpret_cast<const __m128i*>(static_cast<const char*>(from) + at)));
    return;
  }
#endif
  (void)stream;
  memcpy(to, from, static_cast<size_t>(bytes));
}

// After a thread's last streamed write: makes them visible before whatever it does next.
inline void finish_stream() {
#if defined(__SSE2__)
  _mm_sfence();
#endif
}

MH_NUMERICS_END
