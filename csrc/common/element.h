// The floating-point types of KV caches, and their conversion to and from float.
//
// Conversion to float is exact; conversion back rounds to nearest even. The two fp8 types saturate,
// as engines quantize: values beyond their largest number, infinity included, become that number.
// NaN stays NaN, though its code is unspecified. Written as branch-free arithmetic, which the
// compiler vectorizes; on a GPU its own conversions are used, which give the same numbers.
// Layer: common.
#pragma once

#include <cstdint>
#include <cstring>

#include "common/hd.h"

#if defined(__CUDA_ARCH__)
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>
#endif

namespace mk {

// mooncake_kernels/transforms.py uses these numbers.
enum class ElementType : int32_t {
  kBytes,
  kFloat32,
  kFloat16,
  kBFloat16,
  kFloat8E4M3,
  kFloat8E5M2
};

MK_HD int64_t size_of(ElementType type) {
  if (type == ElementType::kFloat32) return 4;
  return type == ElementType::kFloat16 || type == ElementType::kBFloat16 ? 2 : 1;
}

MK_HD uint32_t bits_of(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof bits);
  return bits;
}

MK_HD float float_of(uint32_t bits) {
  float value;
  memcpy(&value, &bits, sizeof value);
  return value;
}

// A type with fewer bits than float. If it has no infinities (the "fn" of e4m3fn), its last
// exponent is an ordinary one and only the largest code is NaN.
template <int kExponentBits, int kMantissaBits, bool kHasInfinity, bool kSaturates>
struct SmallFloat {
  static constexpr int kShift = 23 - kMantissaBits;
  static constexpr int kBias = (1 << (kExponentBits - 1)) - 1;
  static constexpr uint32_t kMagnitude = (1u << (kExponentBits + kMantissaBits)) - 1;
  static constexpr uint32_t kInfinity = kMagnitude >> kMantissaBits << kMantissaBits;
  static constexpr uint32_t kNan = kMagnitude;
  static constexpr uint32_t kLargest = (kHasInfinity ? kInfinity : kMagnitude) - 1;
  static constexpr uint32_t kRebias = uint32_t{127 - kBias} << 23;
  static constexpr uint32_t kSmallestNormal = kRebias + (1u << 23);  // floats, as the next two
  static constexpr uint32_t kLargestFloat = (kLargest << kShift) + kRebias;
  // Its last bit has the weight of a subnormal's: adding it rounds a float to one.
  static constexpr uint32_t kRounder = kSmallestNormal + (uint32_t{kShift} << 23);

  static MK_HD float to_float(uint32_t code) {
    const uint32_t magnitude = code & kMagnitude;
    const uint32_t shifted = magnitude << kShift;
    const float normal = float_of(shifted + kRebias);
    const float subnormal = float_of(shifted + kSmallestNormal) - float_of(kSmallestNormal);
    uint32_t bits = bits_of(magnitude >> kMantissaBits ? normal : subnormal);
    const bool is_special = kHasInfinity ? magnitude >= kInfinity : magnitude == kNan;
    bits = is_special ? shifted | 0x7f800000u : bits;
    return float_of(bits | (code & ~kMagnitude) << (31 - kExponentBits - kMantissaBits));
  }

  static MK_HD uint32_t from_float(float value) {
    const uint32_t bits = bits_of(value), all = bits & 0x7fffffffu;
    const uint32_t magnitude = kSaturates && all > kLargestFloat ? kLargestFloat : all;
    const uint32_t subnormal = bits_of(float_of(magnitude) + float_of(kRounder)) - kRounder;
    const uint32_t half = (1u << (kShift - 1)) - 1 + (magnitude >> kShift & 1);
    uint32_t code = (magnitude + half - kRebias) >> kShift;
    code = code > kInfinity && !kSaturates ? kInfinity : code;
    code = magnitude < kSmallestNormal ? subnormal : code;
    code = all > 0x7f800000u ? kNan : code;
    return code | bits >> 31 << (kExponentBits + kMantissaBits);
  }
};

#if defined(__CUDA_ARCH__)
// The first of two numbers of 16 bits. Single ones are not converted: where their code is then
// written byte by byte, ptxas (CUDA 13.0) writes the number made an integer (F2I.U8.F16) as the low
// byte, and their conversion is slower than that of a pair.
template <class Pair>
__device__ inline uint16_t low_half(const Pair& pair) {
  uint32_t bits;
  memcpy(&bits, &pair, sizeof bits);
  return static_cast<uint16_t>(bits);
}
#endif

template <ElementType>
struct Element;

template <>
struct Element<ElementType::kFloat32> {
  static constexpr ElementType kType = ElementType::kFloat32;
  using Code = uint32_t;
  static MK_HD float to_float(Code code) { return float_of(code); }
  static MK_HD Code from_float(float value) { return bits_of(value); }
};

template <>
struct Element<ElementType::kBFloat16> {
  static constexpr ElementType kType = ElementType::kBFloat16;
  using Code = uint16_t;
  static MK_HD float to_float(Code code) { return float_of(uint32_t{code} << 16); }
  static MK_HD Code from_float(float value) {
#if defined(__CUDA_ARCH__)
    return low_half(__floats2bfloat162_rn(value, 0));
#else
    const uint32_t bits = bits_of(value);
    const uint32_t rounded = (bits + 0x7fffu + (bits >> 16 & 1)) >> 16;
    return static_cast<Code>((bits & 0x7fffffffu) > 0x7f800000u ? 0x7fc0u : rounded);
#endif
  }
};

template <>
struct Element<ElementType::kFloat16> {
  static constexpr ElementType kType = ElementType::kFloat16;
  using Code = uint16_t;
  using Software = SmallFloat<5, 10, true, false>;
  static MK_HD float to_float(Code code) {
#if defined(__CUDA_ARCH__)
    return __half2float(__ushort_as_half(code));
#else
    return Software::to_float(code);
#endif
  }
  static MK_HD Code from_float(float value) {
#if defined(__CUDA_ARCH__)
    return low_half(__floats2half2_rn(value, 0));
#else
    return static_cast<Code>(Software::from_float(value));
#endif
  }
};

#if defined(__CUDA_ARCH__)
#define MK_FLOAT8(name, software, hardware)                                 \
  template <>                                                               \
  struct Element<ElementType::name> {                                       \
    static constexpr ElementType kType = ElementType::name;                 \
    using Code = uint8_t;                                                   \
    static MK_HD float to_float(Code code) {                                \
      return __half2float(__half(__nv_cvt_fp8_to_halfraw(code, hardware))); \
    }                                                                       \
    static MK_HD Code from_float(float value) {                             \
      return __nv_cvt_float_to_fp8(value, __NV_SATFINITE, hardware);        \
    }                                                                       \
  };
#else
#define MK_FLOAT8(name, software, hardware)                                     \
  template <>                                                                   \
  struct Element<ElementType::name> {                                           \
    static constexpr ElementType kType = ElementType::name;                     \
    using Code = uint8_t;                                                       \
    using Software = software;                                                  \
    static MK_HD float to_float(Code code) { return Software::to_float(code); } \
    static MK_HD Code from_float(float value) {                                 \
      return static_cast<Code>(Software::from_float(value));                    \
    }                                                                           \
  };
#endif
using SoftwareE4M3 = SmallFloat<4, 3, false, true>;
using SoftwareE5M2 = SmallFloat<5, 2, true, true>;
MK_FLOAT8(kFloat8E4M3, SoftwareE4M3, __NV_E4M3)
MK_FLOAT8(kFloat8E5M2, SoftwareE5M2, __NV_E5M2)
#undef MK_FLOAT8

// Calls body(Element<type>{}), so that the body is compiled for each type; not for kBytes. Kernels
// pass bodies for the device and launchers bodies for the host, of which nvcc would warn each time.
#if defined(__CUDACC__)
#pragma nv_exec_check_disable
#endif
template <class Body>
MK_HD void with_element(ElementType type, const Body& body) {
  switch (type) {
    case ElementType::kFloat32:
      return body(Element<ElementType::kFloat32>{});
    case ElementType::kFloat16:
      return body(Element<ElementType::kFloat16>{});
    case ElementType::kBFloat16:
      return body(Element<ElementType::kBFloat16>{});
    case ElementType::kFloat8E4M3:
      return body(Element<ElementType::kFloat8E4M3>{});
    case ElementType::kFloat8E5M2:
      return body(Element<ElementType::kFloat8E5M2>{});
    case ElementType::kBytes:
      return;
  }
}

}  // namespace mk
