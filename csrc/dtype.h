// Element types by code, and the two 16-bit floats as bits: no vendor header, the same on host and device.
#pragma once

#include <cstdint>
#include <cstring>

#include "host_device.h"

namespace rlk {

enum class DType : int { kFloat64 = 0, kFloat32 = 1, kBFloat16 = 2, kFloat16 = 3 };

struct BFloat16 {
  uint16_t bits;
};
struct Float16 {
  uint16_t bits;
};

// Calls function(element) with a value of the dtype's element type.
template <class Function>
void with_element_type(DType dtype, Function function) {
  switch (dtype) {
    case DType::kFloat64:
      return function(double{});
    case DType::kFloat32:
      return function(float{});
    case DType::kBFloat16:
      return function(BFloat16{});
    case DType::kFloat16:
      return function(Float16{});
  }
}

// The type a row of elements is reduced in.
template <class Elem>
struct ComputeType {
  using type = float;
};
template <>
struct ComputeType<double> {
  using type = double;
};

HOST_DEVICE float bits_to_float(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

HOST_DEVICE uint32_t float_to_bits(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

HOST_DEVICE float widen(BFloat16 x) { return bits_to_float(uint32_t{x.bits} << 16); }

HOST_DEVICE float widen(Float16 x) {
  const uint32_t sign = uint32_t{x.bits & 0x8000u} << 16;
  const uint32_t magnitude = x.bits & 0x7fffu;
  if (magnitude >= 0x7c00u) return bits_to_float(sign | 0x7f800000u | (magnitude & 0x3ffu) << 13);
  // 2^112 moves the exponent bias from 15 to 127 and turns subnormals into normal numbers exactly.
  return bits_to_float(sign | float_to_bits(bits_to_float(magnitude << 13) * 0x1p112f));
}

HOST_DEVICE float widen(float x) { return x; }
HOST_DEVICE double widen(double x) { return x; }

// Round to nearest, ties to even; NaN stays NaN.
HOST_DEVICE void narrow(float x, BFloat16* out) {
  const uint32_t bits = float_to_bits(x);
  const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  out->bits = static_cast<uint16_t>((bits & 0x7fffffffu) > 0x7f800000u ? (bits >> 16) | 0x40u : rounded);
}

HOST_DEVICE void narrow(float x, Float16* out) {
  const uint32_t bits = float_to_bits(x);
  const uint32_t sign = (bits >> 16) & 0x8000u;
  const uint32_t magnitude = bits & 0x7fffffffu;
  uint32_t half;
  if (magnitude > 0x7f800000u) {
    half = 0x7e00u;
  } else if (magnitude >= 0x477ff000u) {  // 65520, the first value that rounds to infinity
    half = 0x7c00u;
  } else if (magnitude < 0x38800000u) {  // subnormal: adding 0.5 aligns the mantissa and rounds it
    half = float_to_bits(bits_to_float(magnitude) + 0.5f) - 0x3f000000u;
  } else {
    half = (magnitude - 0x38000000u + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
  }
  out->bits = static_cast<uint16_t>(sign | half);
}

HOST_DEVICE void narrow(float x, float* out) { *out = x; }
HOST_DEVICE void narrow(double x, double* out) { *out = x; }
HOST_DEVICE void narrow(double x, float* out) { *out = static_cast<float>(x); }
HOST_DEVICE void narrow(double x, BFloat16* out) { narrow(static_cast<float>(x), out); }
HOST_DEVICE void narrow(double x, Float16* out) { narrow(static_cast<float>(x), out); }

}  // namespace rlk
