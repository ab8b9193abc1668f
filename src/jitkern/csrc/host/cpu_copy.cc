// Streaming stores of whole lines: one function per instruction set, chosen once at run time.
#include <jitkern/cpu_copy.h>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace jitkern {

#if defined(__x86_64__)

namespace {

void stream_lines_sse2(char* dst, const char* src, i64 lines) {
  auto* to = reinterpret_cast<__m128i*>(dst);
  const auto* from = reinterpret_cast<const __m128i*>(src);
  for (i64 i = 0; i < lines; ++i, to += 4, from += 4) {
    const __m128i a = _mm_loadu_si128(from);
    const __m128i b = _mm_loadu_si128(from + 1);
    const __m128i c = _mm_loadu_si128(from + 2);
    const __m128i d = _mm_loadu_si128(from + 3);
    _mm_stream_si128(to, a);
    _mm_stream_si128(to + 1, b);
    _mm_stream_si128(to + 2, c);
    _mm_stream_si128(to + 3, d);
  }
}

// 5 to 25 % faster than by 16 bytes.
__attribute__((target("avx512f"))) void stream_lines_avx512(char* dst, const char* src, i64 lines) {
  for (i64 i = 0; i < lines; ++i, dst += kLineBytes, src += kLineBytes) {
    _mm512_stream_si512(reinterpret_cast<__m512i*>(dst), _mm512_loadu_si512(src));
  }
}

template <void (*kStreamLines)(char* dst, const char* src, i64 lines)>
void stream_row(char* dst, const char* src, i64 row_bytes) {
  const i64 head_bytes = -reinterpret_cast<u64>(dst) % kLineBytes;
  const i64 lines = (row_bytes - head_bytes) / kLineBytes;
  if (lines <= 0) return copy_row(dst, src, row_bytes);
  // A part of a line, streamed alone, would cost memory a read and a write.
  const i64 tail = head_bytes + lines * kLineBytes;
  if (head_bytes != 0) std::memcpy(dst, src, head_bytes);
  kStreamLines(dst + head_bytes, src + head_bytes, lines);
  if (tail != row_bytes) std::memcpy(dst + tail, src + tail, row_bytes - tail);
}

}  // namespace

CopyRow streaming_copy_row() {
  static const CopyRow best = __builtin_cpu_supports("avx512f") ? stream_row<stream_lines_avx512>
                                                                : stream_row<stream_lines_sse2>;
  return best;
}

void end_stream() { _mm_sfence(); }

#else

CopyRow streaming_copy_row() { return copy_row; }

void end_stream() {}

#endif

}  // namespace jitkern
