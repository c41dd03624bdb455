#include "parallel.h"

#include <algorithm>
#include <atomic>
#include <system_error>
#include <thread>
#include <vector>

namespace rlk {

void parallel_rows(int64_t rows, int64_t grain, int threads, RowRangeFunction run, const void* context) {
  if (rows <= 0) return;
  const int64_t pieces = (rows + grain - 1) / grain;
  std::atomic<int64_t> next{0};
  const auto work = [&] {
    for (int64_t piece; (piece = next.fetch_add(1, std::memory_order_relaxed)) < pieces;) {
      run(context, piece * grain, std::min(rows, (piece + 1) * grain));
    }
  };
  std::vector<std::thread> helpers;
  const int64_t wanted = std::min<int64_t>(threads, pieces) - 1;
  try {
    for (int64_t i = 0; i < wanted; ++i) helpers.emplace_back(work);
  } catch (const std::system_error&) {
    // the process is out of threads: those that started, and this one, take all the pieces
  }
  work();
  for (std::thread& helper : helpers) helper.join();
}

}  // namespace rlk
