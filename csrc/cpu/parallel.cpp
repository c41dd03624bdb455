#include "parallel.h"

#include <algorithm>
#include <atomic>
#include <system_error>
#include <thread>
#include <vector>

#if __has_include(<dlfcn.h>)
#include <dlfcn.h>
#endif

namespace rlk {
namespace {

using GompParallel = void (*)(void (*body)(void*), void* data, unsigned threads, unsigned flags);

// The OpenMP runtime that torch has loaded already. Its workers spin for a while after each torch operation;
// threads of our own would have to share the cores with them.
GompParallel loaded_openmp() {
#if __has_include(<dlfcn.h>)
  static const GompParallel found = reinterpret_cast<GompParallel>(dlsym(RTLD_DEFAULT, "GOMP_parallel"));
  return found;
#else
  return nullptr;
#endif
}

void run_on_own_threads(int threads, void (*body)(void*), void* data) {
  std::vector<std::thread> helpers;
  try {
    for (int i = 1; i < threads; ++i) helpers.emplace_back(body, data);
  } catch (const std::system_error&) {
    // the process is out of threads: those that started, and this one, take all the pieces
  }
  body(data);
  for (std::thread& helper : helpers) helper.join();
}

struct Pieces {
  int64_t rows, grain, count;
  RowRangeFunction run;
  const void* context;
  std::atomic<int64_t> next{0};
  std::atomic<int> workers{0};

  static void work(void* data) {
    Pieces& pieces = *static_cast<Pieces*>(data);
    const int worker = pieces.workers.fetch_add(1, std::memory_order_relaxed);
    for (int64_t i; (i = pieces.next.fetch_add(1, std::memory_order_relaxed)) < pieces.count;) {
      pieces.run(pieces.context, worker, i * pieces.grain, std::min(pieces.rows, (i + 1) * pieces.grain));
    }
  }
};

}  // namespace

void parallel_rows(int64_t rows, int64_t grain, int threads, RowRangeFunction run, const void* context) {
  if (rows <= 0) return;
  Pieces pieces{rows, grain, (rows + grain - 1) / grain, run, context};
  const int wanted = static_cast<int>(std::min<int64_t>(threads, pieces.count));
  if (wanted <= 1) {
    Pieces::work(&pieces);
  } else if (const GompParallel openmp = loaded_openmp()) {
    openmp(&Pieces::work, &pieces, static_cast<unsigned>(wanted), 0);
  } else {
    run_on_own_threads(wanted, &Pieces::work, &pieces);
  }
}

}  // namespace rlk
