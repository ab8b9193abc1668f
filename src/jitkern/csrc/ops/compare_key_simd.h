// Where two arrays of 32-bit words first differ: one function per instruction set, chosen once at
// run time on x86 and at compile time on ARM. None reads behind the `n` words it was given.
//
// The long loops take four vectors of each array per step and look at the OR of their differences:
// one branch per 256 bytes (AVX-512), so that equal keys run as fast as they can be read. The
// shorter loop behind finds the word.
#pragma once

#include <jitkern/types.h>

#include <cstring>
#include <string_view>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace jitkern {

// The position of the first difference in a[0, n) and b[0, n), or n.
using FirstDifference = i64 (*)(const u32* a, const u32* b, i64 n);

template <class T>
T load(const u32* p) {
  T value;
  std::memcpy(&value, p, sizeof value);
  return value;
}

inline i64 first_difference_portable(const u32* a, const u32* b, i64 n) {
  i64 i = 0;
  for (; n - i >= 8; i += 8) {
    u64 any = 0;
    for (int j = 0; j < 8; j += 2) any |= load<u64>(a + i + j) ^ load<u64>(b + i + j);
    if (any != 0) break;
  }
  for (; n - i >= 2; i += 2) {
    if (load<u64>(a + i) != load<u64>(b + i)) break;
  }
  // Of the last word, or the two that differ, the first may be equal.
  return i < n && load<u32>(a + i) == load<u32>(b + i) ? i + 1 : i;
}

#if defined(__x86_64__)

__attribute__((target("avx2,bmi"))) inline i64 first_difference_avx2(const u32* a, const u32* b,
                                                                     i64 n) {
  const auto* x = reinterpret_cast<const __m256i*>(a);
  const auto* y = reinterpret_cast<const __m256i*>(b);
  i64 i = 0;
  for (; n - i >= 32; i += 32, x += 4, y += 4) {
    const __m256i d0 = _mm256_xor_si256(_mm256_loadu_si256(x), _mm256_loadu_si256(y));
    const __m256i d1 = _mm256_xor_si256(_mm256_loadu_si256(x + 1), _mm256_loadu_si256(y + 1));
    const __m256i d2 = _mm256_xor_si256(_mm256_loadu_si256(x + 2), _mm256_loadu_si256(y + 2));
    const __m256i d3 = _mm256_xor_si256(_mm256_loadu_si256(x + 3), _mm256_loadu_si256(y + 3));
    const __m256i any = _mm256_or_si256(_mm256_or_si256(d0, d1), _mm256_or_si256(d2, d3));
    if (!_mm256_testz_si256(any, any)) break;
  }
  for (; n - i >= 8; i += 8, ++x, ++y) {
    const __m256i same = _mm256_cmpeq_epi32(_mm256_loadu_si256(x), _mm256_loadu_si256(y));
    const u32 differ = ~static_cast<u32>(_mm256_movemask_ps(_mm256_castsi256_ps(same))) & 0xff;
    if (differ != 0) return i + _tzcnt_u32(differ);
  }
  if (i == n) return n;
  // The rest, 1 to 7 words: lanes that are masked off are not read, so no fault behind the end.
  const __m256i lanes = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  const __m256i mask = _mm256_cmpgt_epi32(_mm256_set1_epi32(static_cast<int>(n - i)), lanes);
  const __m256i same =
      _mm256_cmpeq_epi32(_mm256_maskload_epi32(reinterpret_cast<const int*>(x), mask),
                         _mm256_maskload_epi32(reinterpret_cast<const int*>(y), mask));
  const u32 differ = ~static_cast<u32>(_mm256_movemask_ps(_mm256_castsi256_ps(same))) & 0xff;
  return differ != 0 ? i + _tzcnt_u32(differ) : n;
}

__attribute__((target("avx512f,bmi"))) inline i64 first_difference_avx512(const u32* a,
                                                                          const u32* b, i64 n) {
  i64 i = 0;
  for (; n - i >= 64; i += 64) {
    const __m512i d0 = _mm512_xor_si512(_mm512_loadu_si512(a + i), _mm512_loadu_si512(b + i));
    const __m512i d1 =
        _mm512_xor_si512(_mm512_loadu_si512(a + i + 16), _mm512_loadu_si512(b + i + 16));
    const __m512i d2 =
        _mm512_xor_si512(_mm512_loadu_si512(a + i + 32), _mm512_loadu_si512(b + i + 32));
    const __m512i d3 =
        _mm512_xor_si512(_mm512_loadu_si512(a + i + 48), _mm512_loadu_si512(b + i + 48));
    const __m512i any = _mm512_or_si512(_mm512_or_si512(d0, d1), _mm512_or_si512(d2, d3));
    if (_mm512_test_epi32_mask(any, any) != 0) break;
  }
  for (; n - i >= 16; i += 16) {
    const u32 differ =
        _mm512_cmpneq_epi32_mask(_mm512_loadu_si512(a + i), _mm512_loadu_si512(b + i));
    if (differ != 0) return i + _tzcnt_u32(differ);
  }
  if (i == n) return n;
  // The rest, 1 to 15 words: lanes that are masked off are not read, so no fault behind the end.
  const auto mask = static_cast<__mmask16>((1u << (n - i)) - 1);
  const u32 differ = _mm512_cmpneq_epi32_mask(_mm512_maskz_loadu_epi32(mask, a + i),
                                              _mm512_maskz_loadu_epi32(mask, b + i));
  return differ != 0 ? i + _tzcnt_u32(differ) : n;
}

#elif defined(__aarch64__)

inline i64 first_difference_neon(const u32* a, const u32* b, i64 n) {
  i64 i = 0;
  for (; n - i >= 16; i += 16) {
    const uint32x4_t d0 = veorq_u32(vld1q_u32(a + i), vld1q_u32(b + i));
    const uint32x4_t d1 = veorq_u32(vld1q_u32(a + i + 4), vld1q_u32(b + i + 4));
    const uint32x4_t d2 = veorq_u32(vld1q_u32(a + i + 8), vld1q_u32(b + i + 8));
    const uint32x4_t d3 = veorq_u32(vld1q_u32(a + i + 12), vld1q_u32(b + i + 12));
    if (vmaxvq_u32(vorrq_u32(vorrq_u32(d0, d1), vorrq_u32(d2, d3))) != 0) break;
  }
  return i + first_difference_portable(a + i, b + i, n - i);
}

#endif

// The instruction sets that were compiled in, the best first.
struct CompareLevel {
  std::string_view name;
  FirstDifference first_difference;
  bool (*supported)();
};

inline constexpr CompareLevel kCompareLevels[] = {
#if defined(__x86_64__)
    // Ice Lake, Zen 4 and newer (VBMI2 stands for them): older CPUs run at a lower clock for
    // milliseconds after 512-bit instructions, a poor bargain for a comparison of microseconds.
    {"avx512", first_difference_avx512,
     [] { return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vbmi2"); }},
    {"avx2", first_difference_avx2,
     [] { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("bmi"); }},
#elif defined(__aarch64__)
    {"neon", first_difference_neon, [] { return true; }},
#endif
    {"portable", first_difference_portable, [] { return true; }},
};

}  // namespace jitkern
