// Prefix-set counts, defined in csrc/cpu/prefix_counts.cpp. With LCP(i, j) the longest common prefix of rows i and j,
//
//   counts[i, t] = 1 + #{j != i : LCP(i, j) > t}
//
// One block a row: its warps find the row's LCPs, its threads count them at every position.
#include "launch.h"

namespace rlk {
namespace cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kOthers = 256;  // rows compared before their LCPs are counted

// Nobody could look at what is in the arrays: a number that is out of range is not let out of them.
RLK_DEVICE int64_t limited(int64_t number, int64_t most) { return number < 0 ? 0 : number < most ? number : most; }

RLK_DEVICE bool has_row(const PrefixCountsParams& p, int64_t row) { return row >= 0 && row < p.rows; }

RLK_DEVICE int64_t length_of(const PrefixCountsParams& p, int64_t row) { return limited(p.lengths[row], p.width); }

// By bisection: the last group that starts at or before the position; empty groups are skipped.
RLK_DEVICE int64_t group_of(const PrefixCountsParams& p, int64_t position) {
  int64_t low = 0, high = p.groups;
  while (high - low > 1) {
    const int64_t middle = low + (high - low) / 2;
    if (p.group_starts[middle] <= position) {
      low = middle;
    } else {
      high = middle;
    }
  }
  return low;
}

// Of all lanes of a warp; the same in each.
RLK_DEVICE int64_t common_prefix(const PrefixCountsParams& p, int64_t row, int64_t other) {
  const int64_t length = length_of(p, row), other_length = length_of(p, other);
  const int64_t end = length < other_length ? length : other_length;
  const int64_t* const mine = p.token_ids + row * p.width;
  const int64_t* const theirs = p.token_ids + other * p.width;
  for (int64_t begin = 0; begin < end; begin += kWarp) {
    const int64_t column = begin + thread_index() % kWarp;
    const bool differs = column >= end || mine[column] != theirs[column];
    const unsigned lanes = __ballot_sync(kAllLanes, differs);
    if (lanes != 0) return begin + __ffs(static_cast<int>(lanes)) - 1;
  }
  return end;
}

RLK_KERNEL(kThreads, 1) void prefix_counts_kernel(PrefixCountsParams p) {
  RLK_SHARED(int64_t, shared_prefix, kOthers);
  const int64_t position = block_index();
  const int64_t row = p.row_order[position];
  if (!has_row(p, row)) return;
  const int64_t group = group_of(p, position);
  const int64_t begin = limited(p.group_starts[group], p.rows), end = limited(p.group_starts[group + 1], p.rows);
  int32_t* const counts = p.counts + row * p.width;
  for (int64_t column = thread_index(); column < p.width; column += kThreads) counts[column] = 1;
  for (int64_t first = begin; first < end; first += kOthers) {
    const int others = static_cast<int>(end - first < kOthers ? end - first : kOthers);
    for (int i = thread_index() / kWarp; i < others; i += kThreads / kWarp) {
      const int64_t other = p.row_order[first + i];
      const int64_t prefix = first + i == position || !has_row(p, other) ? 0 : common_prefix(p, row, other);
      if (thread_index() % kWarp == 0) shared_prefix[i] = prefix;
    }
    __syncthreads();
    for (int64_t column = thread_index(); column < p.width; column += kThreads) {
      int32_t longer = 0;
      for (int i = 0; i < others; ++i) longer += shared_prefix[i] > column;
      counts[column] += longer;
    }
    __syncthreads();  // the prefixes have been counted before the next ones take their place
  }
}

}  // namespace

void prefix_counts(const PrefixCountsParams& params, LaunchTarget target) {
  RLK_LAUNCH(target, (prefix_counts_kernel), params.rows, kThreads, 0, params);
}

}  // namespace cuda
}  // namespace rlk
