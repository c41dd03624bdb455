// Whether a struct can be what it says it is: sizes, strides, codes, and pointers that are needed or misaligned. No
// pointer is followed, so this is the same for arrays of any device; what stands in them is for those to check who may
// look.
#pragma once

#include <cstddef>
#include <limits>

#include "check.h"
#include "params.h"
#include "row_math.h"

namespace rlk {

// No array has more elements than a process has addresses, and what is kept of so many rows, tokens or sequences still
// has its size in 64 bits.
constexpr int64_t kLargestSize = int64_t{1} << 47;

// Of numbers >= 0; what does not fit is kTooLarge.
constexpr int64_t kTooLarge = std::numeric_limits<int64_t>::max();
inline int64_t product(int64_t a, int64_t b) {
  int64_t result;
  return __builtin_mul_overflow(a, b, &result) ? kTooLarge : result;
}
inline int64_t sum(int64_t a, int64_t b) {
  int64_t result;
  return __builtin_add_overflow(a, b, &result) ? kTooLarge : result;
}

inline size_t element_bytes(DType dtype) {
  return dtype == DType::kFloat64 ? sizeof(double) : dtype == DType::kFloat32 ? sizeof(float) : sizeof(uint16_t);
}
inline DType compute_dtype(DType dtype) { return dtype == DType::kFloat64 ? dtype : DType::kFloat32; }

// Whose threads run the kernels: those that the struct counts, or a device's.
enum class RunsOn { kThreads, kDevice };

class StructCheck {
 public:
  explicit StructCheck(const char* name) : name_(name) {}

  template <class... Parts>
  void require(bool holds, const char* field, const Parts&... expected) const {
    if (__builtin_expect(!holds, 0)) fail(name_, ".", field, ": expected ", expected...);
  }

  void within(const char* field, int64_t value, int64_t low, int64_t high) const {
    require(value >= low && value <= high, field, "a number in [", low, ", ", high, "], got ", value);
  }
  void size(const char* field, int64_t value) const { within(field, value, 0, kLargestSize); }
  template <class Code>
  void code(const char* field, Code value, Code first, Code last) const {
    within(field, static_cast<int>(value), static_cast<int>(first), static_cast<int>(last));
  }

  void aligned(const char* field, const void* pointer, size_t to) const {
    require(reinterpret_cast<uintptr_t>(pointer) % to == 0, field, "an address that ", to, " divides, got ", pointer);
  }
  // Of values that are there, if there are any.
  void array(const char* field, const void* pointer, int64_t count, size_t to) const {
    require(pointer != nullptr || count == 0, field, "the address of an array, got none");
    aligned(field, pointer, to);
  }

 private:
  const char* name_;
};

// From the first to the last byte of the logits. A row without columns has an offset as well.
inline int64_t span_bytes(const LogitsView& view) {
  if (view.outer == 0 || view.inner == 0) return 0;
  const int64_t last_column = view.vocab > 0 ? view.vocab - 1 : 0;
  const int64_t last = sum(sum(product(view.outer - 1, view.stride_outer), product(view.inner - 1, view.stride_inner)),
                           product(last_column, view.stride_vocab));
  return product(sum(last, 1), static_cast<int64_t>(element_bytes(view.dtype)));
}

inline int64_t gradient_bytes(const LogitsView& view) {
  return product(product(view.count, view.vocab), static_cast<int64_t>(element_bytes(view.dtype)));
}

inline void check(const LogitsView& view) {
  const StructCheck s("LogitsView");
  s.code("dtype", view.dtype, DType::kFloat64, DType::kFloat16);
  s.size("outer", view.outer);
  s.size("inner", view.inner);
  s.size("vocab", view.vocab);
  s.size("count", view.count);
  s.within("stride_outer", view.stride_outer, 0, kTooLarge);
  s.within("stride_inner", view.stride_inner, 0, kTooLarge);
  s.within("stride_vocab", view.stride_vocab, 0, kTooLarge);
  const int64_t stored = product(view.outer, view.inner);
  s.require(stored <= kLargestSize, "inner", "at most ", kLargestSize, " rows, got ", view.outer, " x ", view.inner);
  s.require(span_bytes(view) < kTooLarge, "data", "logits whose bytes have 64-bit offsets, got [", view.outer, ", ",
            view.inner, ", ", view.vocab, "] of strides [", view.stride_outer, ", ", view.stride_inner, ", ",
            view.stride_vocab, "]");
  s.require(gradient_bytes(view) < kTooLarge, "count", "rows whose bytes have 64-bit offsets, got ", view.count, " of ",
            view.vocab, " columns");
  if (view.index) {
    s.require(view.count == 0 || stored > 0, "index", "stored rows to take rows from, got none");
  } else {
    s.require(view.count == 0 || view.count == stored, "count", "outer x inner = ", stored,
              " rows where there is no index, got ", view.count);
  }
  s.aligned("index", view.index, alignof(int64_t));
  s.array("data", view.data, view.vocab == 0 ? 0 : view.count, element_bytes(view.dtype));
}

inline void check(const RowScaling& scaling, int64_t rows, size_t bytes) {
  const StructCheck s("RowScaling");
  s.within("temperature_stride", scaling.temperature_stride, 0, 1);
  s.array("temperature", scaling.temperature, rows, bytes);
  s.aligned("softcap", scaling.softcap, bytes);
  s.array("logit_scale", scaling.logit_scale, rows, bytes);
}

inline void check(const RowStatsOut& out, size_t bytes) {
  const StructCheck s("RowStatsOut");
  s.aligned("logp", out.logp, bytes);
  s.aligned("entropy", out.entropy, bytes);
  s.aligned("lse", out.lse, bytes);
  s.aligned("log_sum_sq_probs", out.log_sum_sq_probs, bytes);
  s.aligned("mean_logits", out.mean_logits, bytes);
  s.aligned("row_max", out.row_max, bytes);
  s.aligned("log_sum_exp", out.log_sum_exp, bytes);
}

// What forward and backward have in common. Returns the bytes of a value of a row.
template <class Params>
size_t check_rows(const StructCheck& s, const Params& p, RunsOn where) {
  check(p.logits);
  const size_t bytes = element_bytes(compute_dtype(p.logits.dtype));
  s.within("vocab", p.vocab, p.logits.vocab, kLargestSize);
  s.within("vocab_start", p.vocab_start, 0, p.vocab - p.logits.vocab);
  s.array("targets", p.targets, p.logits.rows(), alignof(int64_t));
  check(p.scaling, p.logits.rows(), bytes);
  s.within("threads", p.threads, where == RunsOn::kThreads ? 1 : 0, std::numeric_limits<int>::max());
  return bytes;
}

inline void check(const TokenStatsForwardParams& p, RunsOn where) {
  const StructCheck s("TokenStatsForwardParams");
  check(p.out, check_rows(s, p, where));
  const bool is_whole = p.vocab_start == 0 && p.logits.vocab == p.vocab;
  s.array("states", p.states, is_whole ? 0 : p.logits.rows(), alignof(RowState<double>));
}

// Whether the gradient shares memory with the logits.
inline bool overlaps(const LogitsView& logits, const void* dlogits) {
  const uintptr_t from = reinterpret_cast<uintptr_t>(logits.data), to = reinterpret_cast<uintptr_t>(dlogits);
  const uintptr_t bytes = gradient_bytes(logits);
  return bytes > 0 && to < from + static_cast<uintptr_t>(span_bytes(logits)) && from < to + bytes;
}

inline bool is_contiguous(const LogitsView& view) {
  return view.index == nullptr && (view.vocab == 1 || view.stride_vocab == 1) &&
         (view.inner == 1 || view.stride_inner == view.vocab) &&
         (view.outer == 1 || view.stride_outer == view.inner * view.vocab);
}

inline void check(const TokenStatsBackwardParams& p, RunsOn where) {
  const StructCheck s("TokenStatsBackwardParams");
  const size_t bytes = check_rows(s, p, where);
  const int64_t rows = p.logits.rows();
  s.aligned("dlogp", p.dlogp, bytes);
  s.aligned("dentropy", p.dentropy, bytes);
  s.aligned("dlse", p.dlse, bytes);
  s.array("row_max", p.row_max, rows, bytes);
  s.array("log_sum_exp", p.log_sum_exp, rows, bytes);
  s.array("entropy", p.entropy, p.dentropy ? rows : 0, bytes);
  s.array("dlogits", p.dlogits, p.logits.vocab == 0 ? 0 : rows, element_bytes(p.logits.dtype));
  s.aligned("dtarget", p.dtarget, bytes);
  s.require(!overlaps(p.logits, p.dlogits) || (p.dlogits == p.logits.data && is_contiguous(p.logits)), "dlogits",
            "memory of its own or that of contiguous logits, got some of the logits'");
}

inline void check(const ObjectiveOptions& o) {
  const StructCheck s("ObjectiveOptions");
  s.code("kind", o.kind, ObjectiveKind::kClip, ObjectiveKind::kReinforce);
  s.code("level", o.level, Level::kToken, Level::kSequenceProduct);
  s.code("kl_estimator", o.kl_estimator, KlEstimator::kK1, KlEstimator::kK3);
  s.code("prompt_weight", o.prompt_weight, PromptWeight::kFailureRate, PromptWeight::kUniform);
}

// What the objective and the sweep have in common. Returns the bytes of a float.
inline size_t check_batch(const StructCheck& s, const PolicyObjectiveParams& p, RunsOn where) {
  check(p.options);
  s.code("dtype", p.dtype, DType::kFloat64, DType::kFloat32);
  s.code("reduction", p.reduction, Reduction::kTokenMean, Reduction::kTokenSum);
  s.code("entropy_reduction", p.entropy_reduction, Reduction::kTokenMean, Reduction::kTokenSum);
  s.size("tokens", p.tokens);
  s.size("sequences", p.sequences);
  s.within("threads", p.threads, where == RunsOn::kThreads ? 1 : 0, std::numeric_limits<int>::max());
  if (p.cu_seqlens) {
    s.require(p.sequences > 0 || p.tokens == 0, "sequences", "some for ", p.tokens, " tokens, got none");
  } else {
    s.size("width", p.width);
    s.require(product(p.sequences, p.width) == p.tokens, "width", "sequences of ", p.tokens,
              " tokens in all where there is no cu_seqlens, got ", p.sequences, " of ", p.width);
  }
  const size_t bytes = element_bytes(p.dtype);
  s.aligned("cu_seqlens", p.cu_seqlens, alignof(int64_t));
  s.array("mask", p.mask, p.tokens, 1);
  s.aligned("old_logp", p.old_logp, bytes);
  s.array("ref_logp", p.ref_logp, p.options.kl_coef != 0 ? p.tokens : 0, bytes);
  s.aligned("weight", p.weight, bytes);
  s.array("advantages", p.advantages, p.tokens, bytes);
  s.aligned("policy_weight", p.policy_weight, bytes);
  s.aligned("success_rate", p.success_rate, bytes);
  s.aligned("normalizer", p.normalizer, alignof(double));
  s.aligned("entropy_normalizer", p.entropy_normalizer, alignof(double));
  return bytes;
}

inline void check(const PolicyObjectiveParams& p, RunsOn where) {
  const StructCheck s("PolicyObjectiveParams");
  const size_t bytes = check_batch(s, p, where);
  s.array("logp", p.logp, p.tokens, bytes);
  s.array("entropy", p.entropy, p.options.entropy_coef != 0 ? p.tokens : 0, bytes);
  s.array("loss", p.loss, 1, bytes);
  s.array("metrics", p.metrics, 1, alignof(double));
  s.aligned("dlogp", p.dlogp, bytes);
  s.aligned("dentropy", p.dentropy, bytes);
}

inline void check(const PolicySweepParams& p, RunsOn where) {
  const StructCheck s("PolicySweepParams"), in_stats("PolicySweepParams.stats"),
      in_objective("PolicySweepParams.objective");
  const LogitsView& logits = p.stats.logits;
  in_stats.require(logits.vocab == p.stats.vocab, "vocab", "whole rows, got ", logits.vocab, " of ", p.stats.vocab,
                   " columns");
  check(p.stats, where);
  check_batch(in_objective, p.objective, where);
  const RowStatsOut& out = p.stats.out;
  const ObjectiveOptions& options = p.objective.options;
  const int64_t rows = logits.rows();
  in_stats.require(logits.index == nullptr, "logits", "rows in their order, got an index");
  in_stats.require(!out.needs_all_sums(), "out", "logp, entropy and lse alone, got what a sweep does not form");
  in_stats.array("out.logp", out.logp, rows, 1);
  in_stats.array("out.row_max", out.row_max, rows, 1);
  in_stats.array("out.log_sum_exp", out.log_sum_exp, rows, 1);
  in_stats.array("out.entropy", out.entropy, options.entropy_coef != 0 ? rows : 0, 1);
  in_objective.require(options.is_token_level(), "options", "a token-level objective, got one of whole sequences");
  in_objective.require(p.objective.tokens == rows, "tokens", "the logits' ", rows, " rows, got ", p.objective.tokens);
  in_objective.require(p.objective.dtype == compute_dtype(logits.dtype), "dtype", "the compute type of the logits' ",
                       static_cast<int>(logits.dtype), ", got ", static_cast<int>(p.objective.dtype));
  s.array("dlogits", p.dlogits, logits.vocab == 0 ? 0 : rows, element_bytes(logits.dtype));
  s.require(!overlaps(logits, p.dlogits), "dlogits", "memory of its own, got some of the logits'");
}

inline void check(const PrefixCountsParams& p, RunsOn where) {
  const StructCheck s("PrefixCountsParams");
  s.size("rows", p.rows);
  s.size("width", p.width);
  s.size("groups", p.groups);
  s.within("threads", p.threads, where == RunsOn::kThreads ? 1 : 0, std::numeric_limits<int>::max());
  const int64_t tokens = product(p.rows, p.width);
  s.require(product(tokens, sizeof(int64_t)) < kTooLarge, "width", "tokens whose bytes have 64-bit offsets, got ",
            p.rows, " x ", p.width);
  s.require(p.groups > 0 || p.rows == 0, "groups", "some for ", p.rows, " rows, got none");
  s.array("token_ids", p.token_ids, tokens, alignof(int64_t));
  s.array("lengths", p.lengths, p.rows, alignof(int64_t));
  s.array("row_order", p.row_order, p.rows, alignof(int64_t));
  s.array("group_starts", p.group_starts, p.groups, alignof(int64_t));
  s.array("counts", p.counts, tokens, alignof(int32_t));
}

}  // namespace rlk
