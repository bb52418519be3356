// Conversions of single numbers, the same on every instruction set. Rounds to nearest, ties to
// even; NaN stays NaN.
#pragma once
#include <cstdint>
#include <cstring>

namespace quire {

using bf16 = uint16_t;
using f16 = uint16_t;

static inline float bits_to_f32(uint32_t u) {
  float f;
  std::memcpy(&f, &u, 4);
  return f;
}
static inline uint32_t f32_to_bits(float f) {
  uint32_t u;
  std::memcpy(&u, &f, 4);
  return u;
}

static inline float bf16_to_f32(bf16 x) { return bits_to_f32(static_cast<uint32_t>(x) << 16); }
static inline bf16 f32_to_bf16(float f) {
  uint32_t u = f32_to_bits(f);
  if ((u & 0x7fffffffu) > 0x7f800000u) return static_cast<bf16>((u >> 16) | 0x40u);
  return static_cast<bf16>((u + 0x7fffu + ((u >> 16) & 1u)) >> 16);
}

static inline float f16_to_f32(f16 x) {
  const uint32_t sign = static_cast<uint32_t>(x & 0x8000u) << 16;
  const uint32_t exponent = (x >> 10) & 31u, mantissa = x & 0x3ffu;
  if (exponent == 31) return bits_to_f32(sign | 0x7f800000u | (mantissa << 13));
  if (exponent) return bits_to_f32(sign | ((exponent + 112) << 23) | (mantissa << 13));
  const float small = static_cast<float>(mantissa) * 5.9604644775390625e-8f;  // 2**-24
  return bits_to_f32(sign | f32_to_bits(small));
}
static inline f16 f32_to_f16(float f) {
  const uint32_t u = f32_to_bits(f), sign = (u >> 16) & 0x8000u, a = u & 0x7fffffffu;
  if (a > 0x7f800000u) return static_cast<f16>(sign | 0x7e00u);
  if (a >= 0x477ff000u) return static_cast<f16>(sign | 0x7c00u);  // rounds to 2**16 or more
  if (a < 0x38800000u) {  // below 2**-14: adding 0.5 leaves the rounded multiple of 2**-24
    const uint32_t r = f32_to_bits(bits_to_f32(a) + 0.5f) - 0x3f000000u;
    return static_cast<f16>(sign | r);
  }
  const uint32_t rounded = a + 0xfffu + ((a >> 13) & 1u);
  return static_cast<f16>(sign | ((rounded - 0x38000000u) >> 13));
}

// 8-bit floats of the Open Compute Project ("OFP8", revision 1.0). E4M3 has no infinity: its largest
// number is 448 and all ones is NaN. E5M2 is the upper half of a float16.
static inline float e4m3_to_f32(uint8_t x) {
  const uint32_t sign = static_cast<uint32_t>(x & 0x80u) << 24, a = x & 0x7fu;
  if (a == 0x7fu) return bits_to_f32(sign | 0x7fc00000u);
  if (a >= 8) return bits_to_f32(sign | ((a << 20) + (120u << 23)));
  return bits_to_f32(sign | f32_to_bits(static_cast<float>(a) * 0.001953125f));  // 2**-9
}
static inline float e5m2_to_f32(uint8_t x) {
  return f16_to_f32(static_cast<f16>(static_cast<uint32_t>(x) << 8));
}
// Exponents, as scales of quantised weights are kept: 0 stands for 0 here.
static inline float e8m0_to_f32(uint8_t x) { return bits_to_f32(static_cast<uint32_t>(x) << 23); }
// What is too large becomes the largest number, infinity too.
static inline uint8_t f32_to_e4m3(float f) {
  const uint32_t u = f32_to_bits(f), sign = (u >> 24) & 0x80u, a = u & 0x7fffffffu;
  if (a > 0x7f800000u) return static_cast<uint8_t>(sign | 0x7fu);
  if (a >= 0x43e00000u) return static_cast<uint8_t>(sign | 0x7eu);  // 448
  if (a < 0x3c800000u) {  // below 2**-6: adding 2**14 leaves the rounded multiple of 2**-9
    const uint32_t r = f32_to_bits(bits_to_f32(a) + 16384.0f) - 0x46800000u;
    return static_cast<uint8_t>(sign | r);
  }
  return static_cast<uint8_t>(sign | (((a + 0x7ffffu + ((a >> 20) & 1u)) >> 20) - (120u << 3)));
}
static inline uint8_t f32_to_e5m2(float f) {
  const uint32_t u = f32_to_bits(f), sign = (u >> 24) & 0x80u, a = u & 0x7fffffffu;
  if (a > 0x7f800000u) return static_cast<uint8_t>(sign | 0x7fu);
  if (a >= 0x47600000u) return static_cast<uint8_t>(sign | 0x7bu);  // 57344
  if (a < 0x38800000u) {  // below 2**-14: adding 2**7 leaves the rounded multiple of 2**-16
    const uint32_t r = f32_to_bits(bits_to_f32(a) + 128.0f) - 0x43000000u;
    return static_cast<uint8_t>(sign | r);
  }
  return static_cast<uint8_t>(sign | (((a + 0xfffffu + ((a >> 21) & 1u)) >> 21) - (112u << 2)));
}

}  // namespace quire
