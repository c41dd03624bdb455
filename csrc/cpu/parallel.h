// Splits rows over threads: those of the OpenMP runtime that torch has loaded, else plain threads for this call.
#pragma once

#include <cstdint>

namespace rlk {

using RowRangeFunction = void (*)(const void* context, int worker, int64_t begin, int64_t end);

// Calls run(context, worker, begin, end) over [0, rows) in pieces of at most `grain` rows, on at most `threads`
// threads; worker < threads says which of them it is.
void parallel_rows(int64_t rows, int64_t grain, int threads, RowRangeFunction run, const void* context);

// body(worker, row)
template <class Body>
void for_each_row_of_worker(int64_t rows, int64_t grain, int threads, const Body& body) {
  parallel_rows(
      rows, grain, threads,
      [](const void* context, int worker, int64_t begin, int64_t end) {
        const Body& row_body = *static_cast<const Body*>(context);
        for (int64_t row = begin; row < end; ++row) row_body(worker, row);
      },
      &body);
}

template <class Body>
void for_each_row(int64_t rows, int64_t grain, int threads, const Body& body) {
  for_each_row_of_worker(rows, grain, threads, [&](int, int64_t row) { body(row); });
}

}  // namespace rlk
