// Hopper's instructions for GEMMs: barriers in shared memory, copies through tensor maps, asynchronous products.
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

// 16 rows of 32 bytes of A as a warp's registers of a product: `row` is the address of this lane's 16 bytes.
__device__ inline void load_rows(uint32_t (&a)[4], uint32_t row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3])
               : "r"(row)
               : "memory");
}

// The other way, of 16 rows and 16 columns of 2 bytes, as results lie in registers.
__device__ inline void store_rows(uint32_t row, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(row), "r"(a), "r"(b), "r"(c), "r"(d)
               : "memory");
}

// The same, each 8 x 8 numbers turned over: of results whose rows are another matrix's columns.
__device__ inline void store_columns(uint32_t row, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(row), "r"(a), "r"(b), "r"(c), "r"(d)
               : "memory");
}

__device__ inline void store_floats(uint32_t to, float x, float y) {
  asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(to), "f"(x), "f"(y) : "memory");
}

// Copies from shared memory to a box of a map's matrix; what lies outside is not written. They see this thread's stores
// before; those of a thread form groups; memory that a group reads may be written again once it has been read.
__device__ inline void copies_see_stores() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

__device__ inline void store_box(const CUtensorMap* map, uint32_t from, int x, int y) {
  asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%0, {%1, %2}], [%3];" ::"l"(map), "r"(x), "r"(y),
               "r"(from)
               : "memory");
}

__device__ inline void bulk_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
__device__ inline void bulk_wait_read() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }

// d (64, n) = A (64, 32) . B (n, 32)^T [+ d] by a warpgroup. Thread t has rows 16 (t / 32) + t % 32 / 4 and 8 below, of
// every 8 columns two from 2 (t % 4): d[4 j], d[4 j + 1] of the first row, d[4 j + 2], d[4 j + 3] of the second. A comes
// from shared memory by a descriptor, or from registers (`load_rows` of each warp's 16 rows).
#define MH_8(d, i) \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), "+f"(d[i + 7])
#define MH_32(d, i) MH_8(d, i), MH_8(d, i + 8), MH_8(d, i + 16), MH_8(d, i + 24)
#define MH_SUMS_32 \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, " \
  "%25, %26, %27, %28, %29, %30, %31"
#define MH_SUMS_64 MH_SUMS_32 ", " \
  "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, " \
  "%53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define MH_SUMS_96 MH_SUMS_64 ", " \
  "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, %80, %81, %82, %83, " \
  "%84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define MH_SUMS_128 MH_SUMS_96 ", " \
  "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, %112, " \
  "%113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"

// The instruction for each pair of types; `operands` and `add_at` say where A, B and `add` are, `turns` whether an operand
// in shared memory is turned over, which only types of 16 bits can be.
#define MH_PRODUCT(shape, types, sums, add_at, operands, turns) \
  "{\n.reg .pred add;\nsetp.ne.b32 add, " add_at ", 0;\n"       \
  "wgmma.mma_async.sync.aligned." shape ".f32." types           \
  " {" sums "}, " operands ", add, 1, 1" turns ";\n}\n"
#define MH_PRODUCTS(types)                                                                                                 \
  __device__ static inline void run(float (&d)[128], uint64_t a, uint64_t b, bool add) {                                    \
    asm volatile(MH_PRODUCT("m64n256k32", types, MH_SUMS_128, "%130", "%128, %129", "")                                    \
                 : MH_32(d, 0), MH_32(d, 32), MH_32(d, 64), MH_32(d, 96)                                                   \
                 : "l"(a), "l"(b), "r"(static_cast<int>(add)));                                                            \
  }                                                                                                                        \
  __device__ static inline void run(float (&d)[32], const uint32_t (&a)[4], uint64_t b, bool add) {                         \
    asm volatile(MH_PRODUCT("m64n64k32", types, MH_SUMS_32, "%37", "{%32, %33, %34, %35}, %36", "")                        \
                 : MH_32(d, 0)                                                                                             \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(add)));                        \
  }

template <bool kA5, bool kB5>  // E5M2 instead of E4M3
struct Product;
template <>
struct Product<false, false> {
  MH_PRODUCTS("e4m3.e4m3")
};
template <>
struct Product<false, true> {
  MH_PRODUCTS("e4m3.e5m2")
};
template <>
struct Product<true, false> {
  MH_PRODUCTS("e5m2.e4m3")
};
template <>
struct Product<true, true> {
  MH_PRODUCTS("e5m2.e5m2")
};

// d (64, n) += A (64, 16) . B (n, 16)^T in bf16, A from registers: of its 8 rows and 8 columns from the first, a[0]; of the 8
// rows below, a[1]; of the next 8 columns, a[2] and a[3].
struct WideProduct {
  __device__ static inline void run(float (&d)[32], const uint32_t (&a)[4], uint64_t b) {
    asm volatile(MH_PRODUCT("m64n64k16", "bf16.bf16", MH_SUMS_32, "%37",
                            "{%32, %33, %34, %35}, %36", ", 0")
                 : MH_32(d, 0)
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(1));
  }
  __device__ static inline void run(float (&d)[64], const uint32_t (&a)[4], uint64_t b) {
    asm volatile(MH_PRODUCT("m64n128k16", "bf16.bf16", MH_SUMS_64, "%69",
                            "{%64, %65, %66, %67}, %68", ", 0")
                 : MH_32(d, 0), MH_32(d, 32)
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(1));
  }
  __device__ static inline void run(float (&d)[128], const uint32_t (&a)[4], uint64_t b) {
    asm volatile(MH_PRODUCT("m64n256k16", "bf16.bf16", MH_SUMS_128, "%133",
                            "{%128, %129, %130, %131}, %132", ", 0")
                 : MH_32(d, 0), MH_32(d, 32), MH_32(d, 64), MH_32(d, 96)
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(1));
  }
};

#undef MH_PRODUCTS
#undef MH_PRODUCT
#undef MH_SUMS_128
#undef MH_SUMS_96
#undef MH_SUMS_64
#undef MH_SUMS_32
#undef MH_32
#undef MH_8

}  // namespace mh::gemm
