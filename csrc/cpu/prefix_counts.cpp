// Prefix-set counts: counts[i, t] = #{j in i's group : len_j > t and the first t + 1 tokens of j and i agree}.
//
// A group's rows are sorted lexicographically, so the longest common prefix (LCP) of two rows is the minimum of
// the LCPs of the neighbours between them. Walking outwards from a row gives its LCP with every other row, and
// counts[i, t] = #{j : LCP(i, j) > t} falls in steps: O(G log G + G^2) comparisons and writes of whole runs,
// and every token is read O(log G) times. Exact token identity throughout; nothing is hashed.
#include <algorithm>
#include <cstring>
#include <vector>

#include "../check_params.h"
#include "dispatch.h"
#include "parallel.h"

namespace rlk {
namespace {

constexpr int64_t kBlock = 64;  // tokens compared by one memcmp

int64_t common_prefix(const int64_t* a, const int64_t* b, int64_t n) {
  int64_t i = 0;
  while (i + kBlock <= n && std::memcmp(a + i, b + i, kBlock * sizeof *a) == 0) i += kBlock;
  while (i < n && a[i] == b[i]) ++i;
  return i;
}

struct Group {
  const PrefixCountsParams& params;
  std::vector<int64_t> rows;   // sorted lexicographically
  std::vector<int64_t> lcp;    // lcp[k] of sorted rows k and k + 1
  std::vector<int64_t> steps;  // scratch

  const int64_t* tokens(int64_t row) const { return params.token_ids + row * params.width; }
  int64_t length(int64_t row) const { return params.lengths[row]; }

  int64_t common_prefix_of(int64_t a, int64_t b) const {
    return common_prefix(tokens(a), tokens(b), std::min(length(a), length(b)));
  }

  bool precedes(int64_t a, int64_t b) const {
    const int64_t shared = common_prefix_of(a, b);
    if (shared == length(a) || shared == length(b)) return length(a) < length(b);
    return tokens(a)[shared] < tokens(b)[shared];
  }

  void sort() {
    std::sort(rows.begin(), rows.end(), [this](int64_t a, int64_t b) { return precedes(a, b); });
    lcp.resize(rows.size());
    for (size_t k = 0; k + 1 < rows.size(); ++k) lcp[k] = common_prefix_of(rows[k], rows[k + 1]);
  }

  void write_counts(size_t position) {
    const int64_t row = rows[position];
    steps.assign(1, length(row));  // where the count drops by one: a row shares its whole length with itself
    int64_t shared = length(row);
    for (size_t k = position; k > 0 && (shared = std::min(shared, lcp[k - 1])) > 0; --k) steps.push_back(shared);
    shared = length(row);
    for (size_t k = position; k + 1 < rows.size() && (shared = std::min(shared, lcp[k])) > 0; ++k) {
      steps.push_back(shared);
    }
    std::sort(steps.begin(), steps.end());
    int32_t* counts = params.counts + row * params.width;
    int64_t begin = 0;
    for (size_t passed = 0; passed < steps.size(); ++passed) {
      std::fill(counts + begin, counts + steps[passed], static_cast<int32_t>(steps.size() - passed));
      begin = steps[passed];
    }
    std::fill(counts + begin, counts + params.width, 1);
  }
};

// What is an address later on.
void check_values(const PrefixCountsParams& p) {
  for (int64_t row = 0; row < p.rows; ++row) {
    if (p.lengths[row] < 0 || p.lengths[row] > p.width) {
      fail("lengths: expected numbers in [0, ", p.width, "], got ", p.lengths[row], " at row ", row);
    }
  }
  std::vector<bool> is_there(p.rows);
  for (int64_t position = 0; position < p.rows; ++position) {
    const int64_t row = p.row_order[position];
    if (row < 0 || row >= p.rows || is_there[row]) {
      fail("row_order: expected each row of [0, ", p.rows, ") once, got ", row, " at position ", position);
    }
    is_there[row] = true;
  }
  if (p.groups == 0) return;
  const int64_t* const starts = p.group_starts;
  const bool rises = std::is_sorted(starts, starts + p.groups + 1);
  if (!rises || starts[0] != 0 || starts[p.groups] != p.rows) {
    fail("group_starts: expected borders that rise from 0 to ", p.rows, ", got ", starts[0], " to ", starts[p.groups],
         rises ? "" : ", not rising");
  }
}

}  // namespace

void prefix_counts(const PrefixCountsParams& params) {
  check(params, RunsOn::kThreads);
  check_values(params);
  for_each_row(params.groups, 1, params.threads, [&](int64_t index) {
    Group group{params,
                {params.row_order + params.group_starts[index], params.row_order + params.group_starts[index + 1]},
                {},
                {}};
    group.sort();
    for (size_t position = 0; position < group.rows.size(); ++position) group.write_counts(position);
  });
}

}  // namespace rlk
