// Sixteen floats: one AVX-512 register, two AVX2 registers, or an array that the compiler vectorises as it can.
// Everything lives in namespace RLK_ISA, so that the three builds of one source never share a symbol.
// `Lane<double>` is the same interface one element wide; float64 is for checks, not for speed.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

#include "../dtype.h"
#include "../row_math.h"

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace rlk {
namespace RLK_ISA {

#define RLK_INLINE inline __attribute__((always_inline))

// 2^f = 1 + f (kExp2[0] + kExp2[1] f + ...) for 0 <= f <= 1: a minimax fit, error 2e-9 before rounding, 6e-8 with it.
// The constant term is exactly 1, so a row of one column has log s = 0.
constexpr float kExp2[6] = {0.6931470632553101f,   0.24022908508777618f,   0.05548618361353874f,
                            0.009673775173723698f, 0.0012482288293540478f, 0.00021565984934568405f};

#if defined(__AVX512F__)

struct Vec {
  __m512 v;
  static constexpr int kLanes = 16;
  using Scalar = float;

  Vec() = default;
  RLK_INLINE Vec(__m512 x) : v(x) {}
  RLK_INLINE explicit Vec(float x) : v(_mm512_set1_ps(x)) {}

  static RLK_INLINE Vec load(const float* p) { return _mm512_loadu_ps(p); }
  static RLK_INLINE Vec load(const BFloat16* p) {
    const __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
    return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
  }
  static RLK_INLINE Vec load(const Float16* p) {
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  }
  // The upper halves of the result; what is below them is not zero.
  static RLK_INLINE __m512i rounded_to_bfloat16(__m512 x) {
    const __m512i bits = _mm512_castps_si512(x);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const __m512i rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
    return _mm512_mask_mov_epi32(rounded, _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q), _mm512_set1_epi32(0x7fc00000));
  }
  RLK_INLINE __m256i narrowed(const BFloat16*) const {
#if defined(__AVX512BF16__)
    return (__m256i)_mm512_cvtneps_pbh(v);
#else
    return _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded_to_bfloat16(v), 16));
#endif
  }
  RLK_INLINE __m256i narrowed(const Float16*) const { return _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT); }

  RLK_INLINE void store(float* p) const { _mm512_storeu_ps(p, v); }
  template <class Half>
  RLK_INLINE void store(Half* p) const {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), narrowed(p));
  }
  RLK_INLINE void stream(float* p) const { _mm512_stream_ps(p, v); }
  template <class Half>
  RLK_INLINE void stream(Half* p) const {
    _mm256_stream_si256(reinterpret_cast<__m256i*>(p), narrowed(p));
  }
};

RLK_INLINE Vec operator+(Vec a, Vec b) { return _mm512_add_ps(a.v, b.v); }
RLK_INLINE Vec operator-(Vec a, Vec b) { return _mm512_sub_ps(a.v, b.v); }
RLK_INLINE Vec operator*(Vec a, Vec b) { return _mm512_mul_ps(a.v, b.v); }
RLK_INLINE Vec operator/(Vec a, Vec b) { return _mm512_div_ps(a.v, b.v); }
RLK_INLINE Vec fma(Vec a, Vec b, Vec c) { return _mm512_fmadd_ps(a.v, b.v, c.v); }
// The second operand wins where one is NaN.
RLK_INLINE Vec max_keep_second_nan(Vec a, Vec b) { return _mm512_max_ps(a.v, b.v); }
RLK_INLINE Vec abs(Vec a) { return _mm512_abs_ps(a.v); }
RLK_INLINE Vec select_less(Vec a, Vec b, Vec yes, Vec no) {
  return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(a.v, b.v, _CMP_LT_OQ), no.v, yes.v);
}
RLK_INLINE Vec copysign(Vec magnitude, Vec sign) {
  const __m512i bit = _mm512_set1_epi32(INT32_MIN);
  return _mm512_castsi512_ps(
      _mm512_ternarylogic_epi32(bit, _mm512_castps_si512(sign.v), _mm512_castps_si512(magnitude.v), 0xca));
}
RLK_INLINE Vec fraction(Vec a) { return _mm512_reduce_ps(a.v, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC); }
// a 2^floor(w); f is w's fraction
RLK_INLINE Vec scale_by_power_of_two(Vec a, Vec w, Vec) { return _mm512_scalef_ps(a.v, w.v); }
RLK_INLINE void stream_fence() { _mm_sfence(); }

// A pair holds 32 columns, even ones and odd ones apart: no lane has to move.
RLK_INLINE void load_pair(const BFloat16* p, Vec* pair) {
  const __m512i both = _mm512_loadu_si512(p);
  pair[0] = _mm512_castsi512_ps(_mm512_slli_epi32(both, 16));
  pair[1] = _mm512_castsi512_ps(_mm512_and_si512(both, _mm512_set1_epi32(INT32_MIN >> 15)));
}
RLK_INLINE __m512i narrowed_pair(const Vec* pair, const BFloat16*) {
#if defined(__AVX512BF16__)
  alignas(64) static constexpr uint16_t kOrder[32] = {0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                                                      8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
  const __m512i apart = (__m512i)_mm512_cvtne2ps_pbh(pair[1].v, pair[0].v);
  return _mm512_permutexvar_epi16(_mm512_load_si512(kOrder), apart);
#else
  const __m512i odd_bits = _mm512_set1_epi32(INT32_MIN >> 15);
  const __m512i even = _mm512_srli_epi32(Vec::rounded_to_bfloat16(pair[0].v), 16);
  const __m512i odd = Vec::rounded_to_bfloat16(pair[1].v);
  return _mm512_ternarylogic_epi32(odd_bits, odd, even, 0xca);
#endif
}
RLK_INLINE void store_pair(const Vec* pair, BFloat16* p) { _mm512_storeu_si512(p, narrowed_pair(pair, p)); }
RLK_INLINE void stream_pair(const Vec* pair, BFloat16* p) {
  _mm512_stream_si512(reinterpret_cast<__m512i*>(p), narrowed_pair(pair, p));
}

#elif defined(__AVX2__)

struct Vec {
  __m256 lo, hi;
  static constexpr int kLanes = 16;
  using Scalar = float;

  Vec() = default;
  RLK_INLINE Vec(__m256 l, __m256 h) : lo(l), hi(h) {}
  RLK_INLINE explicit Vec(float x) : lo(_mm256_set1_ps(x)), hi(_mm256_set1_ps(x)) {}

  static RLK_INLINE __m128i load_half(const void* p) { return _mm_loadu_si128(static_cast<const __m128i*>(p)); }
  static RLK_INLINE __m256 from_bfloat16(__m128i x) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(x), 16));
  }
  static RLK_INLINE Vec load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
  static RLK_INLINE Vec load(const BFloat16* p) {
    return {from_bfloat16(load_half(p)), from_bfloat16(load_half(p + 8))};
  }
  static RLK_INLINE Vec load(const Float16* p) {
    return {_mm256_cvtph_ps(load_half(p)), _mm256_cvtph_ps(load_half(p + 8))};
  }
  static RLK_INLINE __m256i rounded_bfloat16(__m256 v) {
    const __m256i bits = _mm256_castps_si256(v);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i rounded =
        _mm256_srli_epi32(_mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff))), 16);
    const __m256i is_nan = _mm256_castps_si256(_mm256_cmp_ps(v, v, _CMP_UNORD_Q));
    return _mm256_blendv_epi8(rounded, _mm256_set1_epi32(0x7fc0), is_nan);
  }
  RLK_INLINE __m256i narrowed(const BFloat16*) const {
    // packus works within 128-bit halves; the permutation restores the order
    const __m256i packed = _mm256_packus_epi32(rounded_bfloat16(lo), rounded_bfloat16(hi));
    return _mm256_permute4x64_epi64(packed, 0xd8);
  }
  RLK_INLINE __m256i narrowed(const Float16*) const {
    return _mm256_set_m128i(_mm256_cvtps_ph(hi, _MM_FROUND_TO_NEAREST_INT),
                            _mm256_cvtps_ph(lo, _MM_FROUND_TO_NEAREST_INT));
  }

  RLK_INLINE void store(float* p) const {
    _mm256_storeu_ps(p, lo);
    _mm256_storeu_ps(p + 8, hi);
  }
  template <class Half>
  RLK_INLINE void store(Half* p) const {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), narrowed(p));
  }
  RLK_INLINE void stream(float* p) const {
    _mm256_stream_ps(p, lo);
    _mm256_stream_ps(p + 8, hi);
  }
  template <class Half>
  RLK_INLINE void stream(Half* p) const {
    _mm256_stream_si256(reinterpret_cast<__m256i*>(p), narrowed(p));
  }
};

RLK_INLINE Vec operator+(Vec a, Vec b) { return {_mm256_add_ps(a.lo, b.lo), _mm256_add_ps(a.hi, b.hi)}; }
RLK_INLINE Vec operator-(Vec a, Vec b) { return {_mm256_sub_ps(a.lo, b.lo), _mm256_sub_ps(a.hi, b.hi)}; }
RLK_INLINE Vec operator*(Vec a, Vec b) { return {_mm256_mul_ps(a.lo, b.lo), _mm256_mul_ps(a.hi, b.hi)}; }
RLK_INLINE Vec operator/(Vec a, Vec b) { return {_mm256_div_ps(a.lo, b.lo), _mm256_div_ps(a.hi, b.hi)}; }
RLK_INLINE Vec fma(Vec a, Vec b, Vec c) {
  return {_mm256_fmadd_ps(a.lo, b.lo, c.lo), _mm256_fmadd_ps(a.hi, b.hi, c.hi)};
}
RLK_INLINE Vec max_keep_second_nan(Vec a, Vec b) { return {_mm256_max_ps(a.lo, b.lo), _mm256_max_ps(a.hi, b.hi)}; }
RLK_INLINE Vec abs(Vec a) {
  const __m256 sign = _mm256_set1_ps(-0.0f);
  return {_mm256_andnot_ps(sign, a.lo), _mm256_andnot_ps(sign, a.hi)};
}
RLK_INLINE Vec select_less(Vec a, Vec b, Vec yes, Vec no) {
  return {_mm256_blendv_ps(no.lo, yes.lo, _mm256_cmp_ps(a.lo, b.lo, _CMP_LT_OQ)),
          _mm256_blendv_ps(no.hi, yes.hi, _mm256_cmp_ps(a.hi, b.hi, _CMP_LT_OQ))};
}
RLK_INLINE __m256 copysign(__m256 magnitude, __m256 sign) {
  const __m256 bit = _mm256_set1_ps(-0.0f);
  return _mm256_or_ps(_mm256_andnot_ps(bit, magnitude), _mm256_and_ps(bit, sign));
}
RLK_INLINE Vec copysign(Vec magnitude, Vec sign) {
  return {copysign(magnitude.lo, sign.lo), copysign(magnitude.hi, sign.hi)};
}
RLK_INLINE Vec fraction(Vec a) {
  return {_mm256_sub_ps(a.lo, _mm256_floor_ps(a.lo)), _mm256_sub_ps(a.hi, _mm256_floor_ps(a.hi))};
}
RLK_INLINE __m256 power_of_two(__m256i n) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(n, _mm256_set1_epi32(127)), 23));
}
RLK_INLINE __m256 scale_by_power_of_two(__m256 a, __m256 n) {
  // in two factors: 2^-150 alone has no float
  const __m256i whole = _mm256_cvtps_epi32(n);
  const __m256i half = _mm256_srai_epi32(whole, 1);
  return _mm256_mul_ps(_mm256_mul_ps(a, power_of_two(half)), power_of_two(_mm256_sub_epi32(whole, half)));
}
// a 2^floor(w); f is w's fraction
RLK_INLINE Vec scale_by_power_of_two(Vec a, Vec w, Vec f) {
  return {scale_by_power_of_two(a.lo, _mm256_sub_ps(w.lo, f.lo)),
          scale_by_power_of_two(a.hi, _mm256_sub_ps(w.hi, f.hi))};
}
RLK_INLINE void stream_fence() { _mm_sfence(); }

#else

struct Vec {
  static constexpr int kLanes = 16;
  using Scalar = float;
  float v[kLanes];

  Vec() = default;
  RLK_INLINE explicit Vec(float x) {
    for (float& lane : v) lane = x;
  }
  template <class Elem>
  static RLK_INLINE Vec load(const Elem* p) {
    Vec out;
    for (int i = 0; i < kLanes; ++i) out.v[i] = widen(p[i]);
    return out;
  }
  template <class Elem>
  RLK_INLINE void store(Elem* p) const {
    for (int i = 0; i < kLanes; ++i) narrow(v[i], p + i);
  }
  template <class Elem>
  RLK_INLINE void stream(Elem* p) const {
    store(p);
  }
};

template <class Op>
RLK_INLINE Vec lanewise(Op op) {
  Vec out;
  for (int i = 0; i < Vec::kLanes; ++i) out.v[i] = op(i);
  return out;
}
RLK_INLINE Vec operator+(Vec a, Vec b) {
  return lanewise([&](int i) { return a.v[i] + b.v[i]; });
}
RLK_INLINE Vec operator-(Vec a, Vec b) {
  return lanewise([&](int i) { return a.v[i] - b.v[i]; });
}
RLK_INLINE Vec operator*(Vec a, Vec b) {
  return lanewise([&](int i) { return a.v[i] * b.v[i]; });
}
RLK_INLINE Vec operator/(Vec a, Vec b) {
  return lanewise([&](int i) { return a.v[i] / b.v[i]; });
}
RLK_INLINE Vec fma(Vec a, Vec b, Vec c) {
  return lanewise([&](int i) { return a.v[i] * b.v[i] + c.v[i]; });
}
RLK_INLINE Vec max_keep_second_nan(Vec a, Vec b) {
  return lanewise([&](int i) { return a.v[i] > b.v[i] ? a.v[i] : b.v[i]; });
}
RLK_INLINE Vec abs(Vec a) {
  return lanewise([&](int i) { return std::fabs(a.v[i]); });
}
RLK_INLINE Vec select_less(Vec a, Vec b, Vec yes, Vec no) {
  return lanewise([&](int i) { return a.v[i] < b.v[i] ? yes.v[i] : no.v[i]; });
}
RLK_INLINE Vec copysign(Vec magnitude, Vec sign) {
  return lanewise([&](int i) { return std::copysign(magnitude.v[i], sign.v[i]); });
}
RLK_INLINE Vec fraction(Vec a) {
  return lanewise([&](int i) {
    const float nearest = (a.v[i] + 0x1.8p23f) - 0x1.8p23f;  // leaves no fraction bits; |a| < 2^22 here
    return a.v[i] - (nearest > a.v[i] ? nearest - 1 : nearest);
  });
}
// a 2^floor(w); f is w's fraction
RLK_INLINE Vec scale_by_power_of_two(Vec a, Vec w, Vec f) {
  return lanewise([&](int i) {
    const float n = w.v[i] - f.v[i];
    const int32_t whole = n == n ? static_cast<int32_t>(n) : 0;
    const int32_t half = whole >> 1;
    return a.v[i] * bits_to_float(static_cast<uint32_t>(half + 127) << 23) *
           bits_to_float(static_cast<uint32_t>(whole - half + 127) << 23);
  });
}
RLK_INLINE void stream_fence() {}

#endif

// 2^w of several vectors, w in [Exp2Floor, 127]; 0 at the floor. Step by step for all of them: each step waits for the
// one before, and a processor looks ahead only so far.
template <int kCount>
RLK_INLINE void exp2(const Vec* w, Vec* out) {
  Vec f[kCount];
  for (int j = 0; j < kCount; ++j) f[j] = fraction(w[j]);
  for (int j = 0; j < kCount; ++j) out[j] = fma(Vec(kExp2[5]), f[j], Vec(kExp2[4]));
  for (int i = 3; i >= 0; --i) {
    for (int j = 0; j < kCount; ++j) out[j] = fma(out[j], f[j], Vec(kExp2[i]));
  }
  for (int j = 0; j < kCount; ++j) out[j] = fma(out[j], f[j], Vec(1.0f));
  for (int j = 0; j < kCount; ++j) out[j] = scale_by_power_of_two(out[j], w[j], f[j]);
}
RLK_INLINE Vec exp2(Vec w) {
  Vec out;
  exp2<1>(&w, &out);
  return out;
}

RLK_INLINE Tanh<Vec> tanh_with_slope(Vec x) {
  const Vec one(1.0f), magnitude = abs(x), near(kTanhNear);
  const Vec e = exp2(max_keep_second_nan(Vec(Exp2Floor<float>::value), Vec(static_cast<float>(-2 / kLn2)) * magnitude));
  const Vec r = one / (one + e);
  const Vec z = x * x;
  Vec p(kTanh[4]);
  for (int i = 3; i >= 0; --i) p = fma(p, z, Vec(kTanh[i]));
  const Vec value = select_less(magnitude, near, fma(p * z, x, x), copysign((one - e) * r, x));
  return {value, select_less(magnitude, near, one - value * value, Vec(4.0f) * e * r * r)};
}

template <class T>
struct Lane;
template <>
struct Lane<double> {
  double v;
  static constexpr int kLanes = 1;
  using Scalar = double;

  Lane() = default;
  RLK_INLINE explicit Lane(double x) : v(x) {}
  static RLK_INLINE Lane load(const double* p) { return Lane(*p); }
  RLK_INLINE void store(double* p) const { *p = v; }
  RLK_INLINE void stream(double* p) const { *p = v; }
};
RLK_INLINE Lane<double> operator+(Lane<double> a, Lane<double> b) { return Lane<double>(a.v + b.v); }
RLK_INLINE Lane<double> operator-(Lane<double> a, Lane<double> b) { return Lane<double>(a.v - b.v); }
RLK_INLINE Lane<double> operator*(Lane<double> a, Lane<double> b) { return Lane<double>(a.v * b.v); }
RLK_INLINE Lane<double> fma(Lane<double> a, Lane<double> b, Lane<double> c) { return Lane<double>(a.v * b.v + c.v); }
RLK_INLINE Lane<double> max_keep_second_nan(Lane<double> a, Lane<double> b) { return a.v > b.v ? a : b; }
RLK_INLINE Lane<double> copysign(Lane<double> a, Lane<double> b) { return Lane<double>(std::copysign(a.v, b.v)); }
RLK_INLINE Lane<double> exp2(Lane<double> a) { return Lane<double>(std::exp2(a.v)); }
RLK_INLINE Tanh<Lane<double>> tanh_with_slope(Lane<double> x) {
  const Tanh<double> tanh = rlk::tanh_with_slope(x.v);
  return {Lane<double>(tanh.value), Lane<double>(tanh.slope)};
}

template <int kCount>
RLK_INLINE void exp2(const Lane<double>* w, Lane<double>* out) {
  for (int j = 0; j < kCount; ++j) out[j] = exp2(w[j]);
}

template <class V, class Elem>
RLK_INLINE void load_pair(const Elem* p, V* pair) {
  pair[0] = V::load(p);
  pair[1] = V::load(p + V::kLanes);
}
template <class V, class Elem>
RLK_INLINE void store_pair(const V* pair, Elem* p) {
  pair[0].store(p);
  pair[1].store(p + V::kLanes);
}
template <class V, class Elem>
RLK_INLINE void stream_pair(const V* pair, Elem* p) {
  pair[0].stream(p);
  pair[1].stream(p + V::kLanes);
}

// The vector type that reduces rows of Elem.
template <class Elem>
struct VectorOf {
  using type = Vec;
};
template <>
struct VectorOf<double> {
  using type = Lane<double>;
};

}  // namespace RLK_ISA
}  // namespace rlk
