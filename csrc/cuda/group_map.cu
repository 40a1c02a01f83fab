// The map of the blocks of groups of rows: every group's blocks counted, their sums over the groups in shared memory, and each
// block looked up in those. Every thread block sums up anew: groups are few.
#include "launch.h"

namespace mh::cuda {
namespace {

constexpr int kMostGroups = 4096;  // two numbers each, and two a thread, fit into 48 KiB

struct GroupMapPass {
  GroupMapArgs to;
  int a_thread;  // groups
};

template <class Int>
__device__ __forceinline__ int32_t size_of(const GroupMapArgs& to, int g) {
  return static_cast<int32_t>(static_cast<const Int*>(to.sizes)[g]);
}

template <class Int>
__global__ void __launch_bounds__(kThreads) map_of_groups(const __grid_constant__ GroupMapPass a) {
  MH_DYNAMIC_SHARED(int32_t, shared);
  const GroupMapArgs& to = a.to;
  const int groups = static_cast<int>(to.groups), t = threadIdx.x, begin = min(groups, t * a.a_thread);
  const int end = min(groups, begin + a.a_thread);
  int32_t *blocks = shared, *rows = blocks + groups, *of_threads = rows + groups;  // inclusive sums, each
  int32_t my_blocks = 0, my_rows = 0;
  for (int g = begin; g < end; ++g) {
    const int32_t size = size_of<Int>(to, g);
    blocks[g] = my_blocks += (size + kPanelRows - 1) / kPanelRows;
    rows[g] = my_rows += size;
  }
  for (int away = 1; away < kThreads; away *= 2) {  // sums over the threads before
    of_threads[t] = my_blocks, of_threads[kThreads + t] = my_rows;
    __syncthreads();
    if (t >= away) my_blocks += of_threads[t - away], my_rows += of_threads[kThreads + t - away];
    __syncthreads();
  }
  if (begin < end) {
    const int32_t before_blocks = my_blocks - blocks[end - 1], before_rows = my_rows - rows[end - 1];
    for (int g = begin; g < end; ++g) blocks[g] += before_blocks, rows[g] += before_rows;
  }
  __syncthreads();
  if (blockIdx.x == 0)
    for (int g = begin; g < end; ++g) to.ends[g] = blocks[g];
  const int64_t block = static_cast<int64_t>(blockIdx.x) * kThreads + t;
  if (block >= to.count) return;
  int32_t found[3] = {0, 0, 0};  // after the last group's
  if (groups && block < blocks[groups - 1]) {
    int low = 0, high = groups - 1;  // the first group that ends behind the block
    while (low < high) {
      const int middle = (low + high) / 2;
      if (blocks[middle] > block)
        high = middle;
      else
        low = middle + 1;
    }
    const int32_t within = (static_cast<int32_t>(block) - (low ? blocks[low - 1] : 0)) * kPanelRows;
    const int32_t first = (low ? rows[low - 1] : 0) + within;
    found[0] = low, found[1] = first, found[2] = min(rows[low] - first, static_cast<int32_t>(kPanelRows));
  }
  for (int i = 0; i < 3; ++i) to.blocks[i * to.count + block] = found[i];
}

}  // namespace

void group_map(const GroupMapArgs& args, const Where& where) {
  const OnDevice on(where, "group_map");
  if (args.groups > kMostGroups)
    throw std::runtime_error("megatron_hybrid._C_cuda.group_map: more than " + std::to_string(kMostGroups) + " groups");
  const GroupMapPass pass{args, static_cast<int>((args.groups + kThreads - 1) / kThreads)};
  const int shared = static_cast<int>((2 * args.groups + 2 * kThreads) * sizeof(int32_t));
  const unsigned grid = grid_for((args.count + kThreads - 1) / kThreads);
  if (args.wide)
    launch(map_of_groups<int64_t>, grid, shared, where, "group_map", pass);
  else
    launch(map_of_groups<int32_t>, grid, shared, where, "group_map", pass);
}

}  // namespace mh::cuda
