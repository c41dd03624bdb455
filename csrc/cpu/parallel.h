// Splits rows over threads: those of the OpenMP runtime that torch has loaded, else plain threads for this call.
#pragma once

#include <cstdint>

namespace rlk {

using RowRangeFunction = void (*)(const void* context, int worker, int64_t begin, int64_t end);

// Calls run(context, worker, begin, end) over [0, rows) in pieces of at most `grain` rows, on at most `threads`
// threads; worker < threads says which of them it is.
void parallel_rows(int64_t rows, int64_t grain, int threads, RowRangeFunction run, const void* context);

// body(worker, begin, end)
template <class Body>
void for_each_piece(int64_t rows, int64_t grain, int threads, const Body& body) {
  parallel_rows(
      rows, grain, threads,
      [](const void* context, int worker, int64_t begin, int64_t end) {
        (*static_cast<const Body*>(context))(worker, begin, end);
      },
      &body);
}

// body(worker, row)
template <class Body>
void for_each_row_of_worker(int64_t rows, int64_t grain, int threads, const Body& body) {
  for_each_piece(rows, grain, threads, [&](int worker, int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) body(worker, row);
  });
}

template <class Body>
void for_each_row(int64_t rows, int64_t grain, int threads, const Body& body) {
  for_each_row_of_worker(rows, grain, threads, [&](int, int64_t row) { body(row); });
}

}  // namespace rlk
