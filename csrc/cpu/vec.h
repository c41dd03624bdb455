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

// 2^f = 1 + f (kExp2[0] + kExp2[1] f + ...) for |f| <= 1/2: a minimax fit, error 2e-9 before rounding. The
// constant term is exactly 1, so a row of one column has log s = 0.
constexpr float kExp2[6] = {0.6931471824645996f,  0.24022647738456726f,   0.055503323674201965f,
                            0.00961843691766262f, 0.0013398873852565885f, 0.00015353361959569156f};

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
  RLK_INLINE __m256i narrowed(const BFloat16*) const {
#if defined(__AVX512BF16__)
    return (__m256i)_mm512_cvtneps_pbh(v);
#else
    const __m512i bits = _mm512_castps_si512(v);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const __m512i rounded =
        _mm512_srli_epi32(_mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff))), 16);
    const __mmask16 is_nan = _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q);
    return _mm512_cvtepi32_epi16(_mm512_mask_mov_epi32(rounded, is_nan, _mm512_set1_epi32(0x7fc0)));
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
RLK_INLINE Vec round(Vec a) { return _mm512_roundscale_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
RLK_INLINE Vec scale_by_power_of_two(Vec a, Vec n) { return _mm512_scalef_ps(a.v, n.v); }
RLK_INLINE void stream_fence() { _mm_sfence(); }

// Two vectors at once where that costs fewer instructions than one after the other.
RLK_INLINE void load_pair(const BFloat16* p, Vec* pair) {
  alignas(64) static constexpr uint16_t kOrder[2][32] = {
      {0, 0, 0, 1, 0, 2, 0, 3, 0, 4, 0, 5, 0, 6, 0, 7, 0, 8, 0, 9, 0, 10, 0, 11, 0, 12, 0, 13, 0, 14, 0, 15},
      {0, 16, 0, 17, 0, 18, 0, 19, 0, 20, 0, 21, 0, 22, 0, 23, 0, 24, 0, 25, 0, 26, 0, 27, 0, 28, 0, 29, 0, 30, 0, 31}};
  const __m512i both = _mm512_loadu_si512(p);
  for (int half = 0; half < 2; ++half) {
    pair[half] =
        _mm512_castsi512_ps(_mm512_maskz_permutexvar_epi16(0xaaaaaaaau, _mm512_load_si512(kOrder[half]), both));
  }
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
RLK_INLINE Vec round(Vec a) {
  constexpr int mode = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
  return {_mm256_round_ps(a.lo, mode), _mm256_round_ps(a.hi, mode)};
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
RLK_INLINE Vec scale_by_power_of_two(Vec a, Vec n) {
  return {scale_by_power_of_two(a.lo, n.lo), scale_by_power_of_two(a.hi, n.hi)};
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
RLK_INLINE Vec round(Vec a) {
  // adding 1.5 * 2^23 leaves no fraction bits; |a| < 2^22 here
  return lanewise([&](int i) { return (a.v[i] + 0x1.8p23f) - 0x1.8p23f; });
}
RLK_INLINE Vec scale_by_power_of_two(Vec a, Vec n) {
  return lanewise([&](int i) {
    const int32_t whole = n.v[i] == n.v[i] ? static_cast<int32_t>(n.v[i]) : 0;
    const int32_t half = whole >> 1;
    return a.v[i] * bits_to_float(static_cast<uint32_t>(half + 127) << 23) *
           bits_to_float(static_cast<uint32_t>(whole - half + 127) << 23);
  });
}
RLK_INLINE void stream_fence() {}

#endif

// 2^w for w in [Exp2Floor, 127]; 0 at the floor.
RLK_INLINE Vec exp2(Vec w) {
  const Vec n = round(w);
  const Vec f = w - n;
  Vec p(kExp2[5]);
  for (int i = 4; i >= 0; --i) p = fma(p, f, Vec(kExp2[i]));
  return scale_by_power_of_two(fma(p, f, Vec(1.0f)), n);
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

template <class V, class Elem>
RLK_INLINE void load_pair(const Elem* p, V* pair) {
  pair[0] = V::load(p);
  pair[1] = V::load(p + V::kLanes);
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
