// Hopper's instructions for GEMMs: barriers in shared memory, copies through tensor maps, asynchronous FP8 products.
#pragma once

#include <cuda.h>

#include <cstdint>

namespace mh::gemm {

__device__ inline uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// Barriers: 8 bytes each. A phase ends when `arrivals` have come and the bytes that were announced are there.
__device__ inline void barrier_init(uint32_t barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

__device__ inline void barrier_arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

__device__ inline void barrier_arrive_expecting(uint32_t barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

// An arrival once this thread's copies so far (`copy_floats`) are there.
__device__ inline void barrier_arrive_after_copies(uint32_t barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}

// Wait for the end of the phase of this parity.
__device__ inline void barrier_wait(uint32_t barrier, uint32_t parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@done bra ready;\n"
      "bra again;\n"
      "ready:\n"
      "}\n" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

// A box of a map's matrix at (x, y), x the contiguous extent; what lies outside is 0.
__device__ inline void copy_box(uint32_t to, const CUtensorMap* map, uint32_t barrier, int x, int y) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];" ::"r"(to),
      "l"(map), "r"(barrier), "r"(x), "r"(y)
      : "memory");
}

// Floats, or zeros where there are none.
template <int n>
__device__ inline void copy_floats(uint32_t to, const float* from, bool there) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(to), "l"(from), "n"(n * 4), "r"(there ? n * 4 : 0) : "memory");
}

template <int kRegisters>
__device__ inline void give_up_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

template <int kRegisters>
__device__ inline void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// Rows of 128 bytes, contraction contiguous, in the 128-byte swizzle; begins at a multiple of 1024 bytes. Units of 16
// bytes: 2 further along the row are the next 32 codes, 64 are 8 rows.
__device__ inline uint64_t matrix_descriptor(uint32_t address) {
  constexpr uint64_t kSwizzle128 = uint64_t{1} << 62, kEightRows = uint64_t{1024 >> 4} << 32;
  return kSwizzle128 | kEightRows | (uint64_t{1} << 16) | ((address & 0x3ffff) >> 4);
}

// Before the first product that reads or writes registers that were touched otherwise; a group ends with `commit`.
__device__ inline void products_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ inline void products_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

template <int kPending>
__device__ inline void products_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// Nothing that touches these registers moves across.
template <int n>
__device__ inline void hold(float (&x)[n]) {
#pragma unroll
  for (int i = 0; i < n; ++i) asm volatile("" : "+f"(x[i])::"memory");
}

// d (64, 128) = A (64, 32) . B (128, 32)^T [+ d] by a warpgroup. Thread t has rows 16 (t / 32) + t % 32 / 4 and 8 below,
// of every 8 columns two from 2 (t % 4): d[4 j], d[4 j + 1] of the first row, d[4 j + 2], d[4 j + 3] of the second.
#define MH_8(d, i) \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), "+f"(d[i + 7])
#define MH_PRODUCT(types)                                                                                             \
  asm volatile(                                                                                                       \
      "{\n"                                                                                                           \
      ".reg .pred add;\n"                                                                                             \
      "setp.ne.b32 add, %66, 0;\n"                                                                                    \
      "wgmma.mma_async.sync.aligned.m64n128k32.f32." types                                                            \
      " {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, "   \
      "%23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, " \
      "%45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, %64, %65, add, " \
      "1, 1;\n"                                                                                                       \
      "}\n"                                                                                                           \
      : MH_8(d, 0), MH_8(d, 8), MH_8(d, 16), MH_8(d, 24), MH_8(d, 32), MH_8(d, 40), MH_8(d, 48), MH_8(d, 56)          \
      : "l"(a), "l"(b), "r"(static_cast<int>(add)))

template <bool kA5, bool kB5>  // E5M2 instead of E4M3
__device__ inline void product(float (&d)[64], uint64_t a, uint64_t b, bool add) {
  if constexpr (!kA5 && !kB5) MH_PRODUCT("e4m3.e4m3");
  if constexpr (!kA5 && kB5) MH_PRODUCT("e4m3.e5m2");
  if constexpr (kA5 && !kB5) MH_PRODUCT("e5m2.e4m3");
  if constexpr (kA5 && kB5) MH_PRODUCT("e5m2.e5m2");
}

#undef MH_PRODUCT
#undef MH_8

}  // namespace mh::gemm
