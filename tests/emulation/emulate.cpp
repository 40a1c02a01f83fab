// Runs a thread block's 256 threads as coroutines. A thread runs until it waits at a barrier of its block or exchanges a
// value with its warp; when all have, all go on. Every other block runs its threads last to first, so that a missing
// barrier shows in the results; under ThreadSanitizer barriers are the only order there is, so that it is reported.
#include <cuda_runtime.h>
#include <ucontext.h>

#include <cstdio>
#include <cstdlib>
#include <vector>

#include "backend.h"

#if defined(__SANITIZE_THREAD__)
#include <sanitizer/tsan_interface.h>
#define UNSEEN __attribute__((no_sanitize("thread")))
#else
#define UNSEEN
#endif

namespace emulation {

Index thread, block, grid;
void* dynamic_shared;

namespace {

constexpr int kWarp = 32;
constexpr size_t kStackBytes = 128 * 1024, kSharedBytes = 256 * 1024;

enum class State { ready, at_warp, at_block, done };

struct Thread {
  ucontext_t context;
  State state;
  bool started;
  uint32_t exchanged;
#if defined(__SANITIZE_THREAD__)
  void* fiber = __tsan_create_fiber(0);
#endif
};

ucontext_t scheduler;
Thread* threads;
char* stacks;
const std::function<void()>* kernel;
char block_barrier, warp_barriers[kThreads / kWarp], block_end;

#if defined(__SANITIZE_THREAD__)
void* scheduler_fiber;
UNSEEN void enter(Thread& t) { __tsan_switch_to_fiber(t.fiber, t.started ? __tsan_switch_to_fiber_no_sync : 0); }
UNSEEN void leave() { __tsan_switch_to_fiber(scheduler_fiber, __tsan_switch_to_fiber_no_sync); }
UNSEEN void release(char* sync) { __tsan_release(sync); }
UNSEEN void acquire(char* sync) { __tsan_acquire(sync); }
#else
void enter(Thread&) {}
void leave() {}
void release(char*) {}
void acquire(char*) {}
#endif

[[noreturn]] void fail(const char* what) {
  fprintf(stderr, "emulated thread block %u: %s\n", block.x, what);
  abort();
}

UNSEEN void to_scheduler(Thread& t) {
  leave();
  swapcontext(&t.context, &scheduler);
}

UNSEEN void wait_as(State state, char* sync) {
  const unsigned me = thread.x;
  release(sync);
  threads[me].state = state;
  to_scheduler(threads[me]);
  acquire(sync);
}

UNSEEN void run_thread() {
  (*kernel)();
  release(&block_end);
  threads[thread.x].state = State::done;
  to_scheduler(threads[thread.x]);
}

UNSEEN void resume(int i) {
  thread.x = static_cast<unsigned>(i);
  Thread& t = threads[i];
  enter(t);
  t.started = true;
  swapcontext(&scheduler, &t.context);
}

UNSEEN int count(State state, int first, int n) {
  int found = 0;
  for (int i = first; i < first + n; ++i) found += threads[i].state == state;
  return found;
}

UNSEEN void set_ready(int first, int n) {
  for (int i = first; i < first + n; ++i) threads[i].state = State::ready;
}

UNSEEN void run_block() {
  for (int i = 0; i < kThreads; ++i) {
    Thread& t = threads[i];
    getcontext(&t.context);
    t.context.uc_stack.ss_sp = stacks + static_cast<size_t>(i) * kStackBytes;
    t.context.uc_stack.ss_size = kStackBytes;
    t.context.uc_link = nullptr;
    makecontext(&t.context, run_thread, 0);
    t.state = State::ready;
    t.started = false;
  }
  while (count(State::done, 0, kThreads) < kThreads) {
    for (int n = 0; n < kThreads; ++n) {
      const int i = block.x % 2 ? kThreads - 1 - n : n;
      if (threads[i].state == State::ready) resume(i);
    }
    bool released = false;
    for (int w = 0; w < kThreads; w += kWarp) {
      const int waiting = count(State::at_warp, w, kWarp);
      if (waiting == kWarp) set_ready(w, kWarp), released = true;
      if (waiting > 0 && waiting < kWarp) fail("a warp's threads part before an exchange");
    }
    const int waiting = count(State::at_block, 0, kThreads);
    if (released || waiting == 0) continue;
    if (waiting < kThreads) fail("some threads miss a barrier");
    set_ready(0, kThreads);
  }
  acquire(&block_end);
}

}  // namespace

UNSEEN void wait_for_block() { wait_as(State::at_block, &block_barrier); }

UNSEEN uint32_t exchange(uint32_t value, int lanes_away) {
  const unsigned me = thread.x;
  char* barrier = &warp_barriers[me / kWarp];
  threads[me].exchanged = value;
  wait_as(State::at_warp, barrier);
  const uint32_t other = threads[me ^ static_cast<unsigned>(lanes_away)].exchanged;
  wait_as(State::at_warp, barrier);
  return other;
}

}  // namespace emulation

// Kernels started so far; a test reads it.
extern "C" __attribute__((visibility("default"))) int emulated_launches = 0;
// Dynamic shared memory of the last one.
extern "C" __attribute__((visibility("default"))) int emulated_shared_bytes = 0;

UNSEEN void emulate(unsigned grid, int shared_bytes, uintptr_t, const std::function<void()>& kernel) {
  ++emulated_launches;
  emulated_shared_bytes = shared_bytes;
  using namespace emulation;
  if (!threads) {
    threads = new Thread[kThreads];
    stacks = static_cast<char*>(malloc(kThreads * kStackBytes));
#if defined(__SANITIZE_THREAD__)
    scheduler_fiber = __tsan_get_current_fiber();
#endif
  }
  // exactly as large as asked for, so that AddressSanitizer sees its end
  const size_t bytes = static_cast<size_t>(shared_bytes > 0 ? shared_bytes : 1);
  if (bytes > kSharedBytes || posix_memalign(&dynamic_shared, 1024, bytes)) fail("no shared memory");
  emulation::kernel = &kernel;
  emulation::grid.x = grid;
  for (unsigned b = 0; b < grid; ++b) {
    memset(dynamic_shared, 0xAB, bytes);  // what the last block left is nobody's input
    emulation::block.x = b;
    run_block();
  }
  free(dynamic_shared);
}
