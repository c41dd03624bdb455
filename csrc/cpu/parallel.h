// Splits rows over threads: those of the OpenMP runtime that torch has loaded, else plain threads for this call.
#pragma once

#include <cstdint>

namespace rlk {

using RowRangeFunction = void (*)(const void* context, int64_t begin, int64_t end);

// Calls run(context, begin, end) over [0, rows) in pieces of at most `grain` rows, on at most `threads` threads.
void parallel_rows(int64_t rows, int64_t grain, int threads, RowRangeFunction run, const void* context);

template <class Body>
void for_each_row(int64_t rows, int64_t grain, int threads, const Body& body) {
  parallel_rows(
      rows, grain, threads,
      [](const void* context, int64_t begin, int64_t end) {
        const Body& row_body = *static_cast<const Body*>(context);
        for (int64_t row = begin; row < end; ++row) row_body(row);
      },
      &body);
}

}  // namespace rlk
