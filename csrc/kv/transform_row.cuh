// One row of transform_blocks on a device: unit by unit, with one thread per unit or fewer; or, if
// the row is not aligned, element by element by one thread.
#pragma once

#include "kv/transform_blocks.h"

namespace mk::kv {

constexpr int kUnit = 8;  // elements processed at a time
constexpr int kPlainWords = 2;

// 8-byte words per unit: as many as an element has bytes. Plain rows: 16 bytes at a time.
MK_HD constexpr int words_of_unit(ElementType type) {
  return type == ElementType::kFloat32                                          ? 4
         : type == ElementType::kFloat8E4M3 || type == ElementType::kFloat8E5M2 ? 1
                                                                                : kPlainWords;
}

// A unit as in memory, where it is accessed 16 bytes at a time, or 8.
template <int kWords>
struct RawUnit {
  uint64_t words[kWords];

  __device__ explicit RawUnit(const char* from) {
    if constexpr (kWords == 1) {
      words[0] = *reinterpret_cast<const uint64_t*>(from);
    } else {
#pragma unroll
      for (int i = 0; i < kWords; i += 2) {
        const uint4 pair = *reinterpret_cast<const uint4*>(from + i * kWordBytes);
        memcpy(words + i, &pair, sizeof pair);
      }
    }
  }
  template <class Code>
  __device__ explicit RawUnit(const Code (&codes)[kUnit]) {
    memcpy(words, codes, sizeof words);
  }
  __device__ void write(char* to) const {
    if constexpr (kWords == 1) {
      *reinterpret_cast<uint64_t*>(to) = words[0];
    } else {
#pragma unroll
      for (int i = 0; i < kWords; i += 2) {
        uint4 pair;
        memcpy(&pair, words + i, sizeof pair);
        *reinterpret_cast<uint4*>(to + i * kWordBytes) = pair;
      }
    }
  }
  __device__ uint64_t sum(uint64_t index) const {
    uint64_t sum = 0;
#pragma unroll
    for (int i = 0; i < kWords; ++i) sum += checksum_term(words[i], index + i);
    return sum;
  }
};

struct DeviceRow {
  const TransformBlocksParams& p;
  Run run;
  float scale;
  const float* cos_sin;  // null: no rotation
  uint64_t first_word;   // position of its first word in the sum of the block

  __device__ void turn(int64_t pair, float& x, float& y) const {
    const float c = cos_sin[pair], s = cos_sin[p.rotation.num_pairs + pair], old_x = x;
    x = x * c - y * s;
    y = y * c + old_x * s;
  }
};

// By units. If both types are kBytes, rows are copied unchanged, or only summed.
template <ElementType kSrc, ElementType kDst>
struct RowOfUnits : DeviceRow {
  static constexpr bool kConverts = kSrc != ElementType::kBytes;
  static constexpr int kSrcWords = words_of_unit(kSrc), kDstWords = words_of_unit(kDst);

  // Units lane, lane + lanes, ...; returns their share of the sum.
  __device__ uint64_t transform(bool plain, int lane, int lanes) const {
    uint64_t sum = 0;
    if (plain) {
      const int64_t num_units = p.src_row_bytes / (kPlainWords * kWordBytes);
      for (int64_t unit = lane; unit < num_units; unit += lanes) sum += copy_unit(unit);
    } else if constexpr (kConverts) {
      const Rotation& r = p.rotation;
      const int64_t num_pairs = cos_sin && !r.interleaved ? r.num_pairs : 0;
      for (int64_t pair = lane * kUnit; pair < num_pairs; pair += lanes * kUnit) {
        sum += turn_units(pair);
      }
      for (int64_t i = lane * kUnit; i < p.dim - 2 * num_pairs; i += lanes * kUnit) {
        sum += convert_unit(num_pairs == 0 || i < r.first ? i : i + 2 * num_pairs);
      }
    }
    return sum;
  }

 private:
  __device__ uint64_t copy_unit(int64_t unit) const {
    const RawUnit<kPlainWords> raw(run.src + unit * kPlainWords * kWordBytes);
    if (!p.sums_src()) raw.write(run.dst + unit * kPlainWords * kWordBytes);
    return p.sums ? raw.sum(first_word + unit * kPlainWords) : 0;
  }
  // The unit that begins at an element; any pairs are inside it.
  __device__ uint64_t convert_unit(int64_t first) const {
    float values[kUnit];
    load(first, values);
    const Rotation& r = p.rotation;
    if (cos_sin && r.interleaved && r.first <= first && first < r.first + 2 * r.num_pairs) {
      const int64_t pair = (first - r.first) / 2;
#pragma unroll
      for (int i = 0; i < kUnit / 2; ++i) turn(pair + i, values[2 * i], values[2 * i + 1]);
    }
    return store(first, values);
  }
  // The two units that hold pairs [pair, pair + kUnit).
  __device__ uint64_t turn_units(int64_t pair) const {
    float x[kUnit], y[kUnit];
    load(p.rotation.x(pair), x);
    load(p.rotation.y(pair), y);
#pragma unroll
    for (int i = 0; i < kUnit; ++i) turn(pair + i, x[i], y[i]);
    return store(p.rotation.x(pair), x) + store(p.rotation.y(pair), y);
  }
  __device__ void load(int64_t first, float* values) const {
    const RawUnit<kSrcWords> raw(run.src + first / kUnit * kSrcWords * kWordBytes);
    typename Element<kSrc>::Code codes[kUnit];
    memcpy(codes, raw.words, sizeof codes);
#pragma unroll
    for (int i = 0; i < kUnit; ++i) {
      const float value = Element<kSrc>::to_float(codes[i]);
      values[i] = p.dequantizes() ? value * scale : value;
    }
  }
  __device__ uint64_t store(int64_t first, const float* values) const {
    typename Element<kDst>::Code codes[kUnit];
#pragma unroll
    for (int i = 0; i < kUnit; ++i) {
      codes[i] = Element<kDst>::from_float(p.quantizes() ? values[i] / scale : values[i]);
    }
    const RawUnit<kDstWords> raw(codes);
    const int64_t word = first / kUnit * kDstWords;
    raw.write(run.dst + word * kWordBytes);
    return p.sums ? raw.sum(first_word + word) : 0;
  }
};

// Element by element, for any types: correct, but slow.
struct RowOfElements : DeviceRow {
  // The whole row, by the calling thread.
  __device__ uint64_t transform(bool plain, int /*lane*/, int /*lanes*/) const {
    if (p.sums_src()) return checksum_bytes(run.src, p.src_row_bytes, first_word);
    if (plain) {
      copy_bytes(run.src, run.dst, p.src_row_bytes);
    } else {
      const Rotation& r = p.rotation;
      const int64_t begin = r.first, end = cos_sin ? begin + 2 * r.num_pairs : begin;
      for (int64_t i = 0; i < p.dim; ++i) {
        if (i < begin || i >= end) store(i, load(i));
      }
      for (int64_t j = 0; begin < end && j < r.num_pairs; ++j) {
        float x = load(r.x(j)), y = load(r.y(j));
        turn(j, x, y);
        store(r.x(j), x);
        store(r.y(j), y);
      }
    }
    return p.sums ? checksum_bytes(run.dst, p.dst_row_bytes, first_word) : 0;
  }

 private:
  // Byte by byte: a device faults on unaligned elements.
  static __device__ void copy_bytes(const void* from, void* to, int64_t num_bytes) {
    for (int64_t i = 0; i < num_bytes; ++i) {
      static_cast<char*>(to)[i] = static_cast<const char*>(from)[i];
    }
  }
  __device__ float load(int64_t i) const {
    float value = 0;
    with_element(p.src_type, [&](auto element) {
      typename decltype(element)::Code code;
      copy_bytes(run.src + i * int64_t{sizeof code}, &code, sizeof code);
      value = element.to_float(code);
    });
    return p.dequantizes() ? value * scale : value;
  }
  __device__ void store(int64_t i, float value) const {
    const float scaled = p.quantizes() ? value / scale : value;
    with_element(p.dst_type, [&](auto element) {
      const auto code = element.from_float(scaled);
      copy_bytes(&code, run.dst + i * int64_t{sizeof code}, sizeof code);
    });
  }
};

}  // namespace mk::kv
