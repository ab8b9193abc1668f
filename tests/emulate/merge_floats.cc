// floats.h against the types' definition, and Divisor of merge.h against division: all numbers of
// the small types, and of float32 each of theirs, the middles between them, and what lies beside.
#include "float_formats.h"
#include "ops/merge.h"
#include "sweep.h"

namespace emulate {

using namespace jitkern;

std::string hex(u32 bits) {
  char text[16];
  std::snprintf(text, sizeof(text), "0x%x", bits);
  return text;
}

template <int kType>
void check_rounding(float value) {
  const u32 bits = bits_as<kType>(value);
  const double expected = rounded_to(kType, value);
  if (std::isnan(expected) ? std::isnan(value_of_bits(kType, bits))
                           : bits == bits_of_value(kType, expected)) {
    return;
  }
  fail(hex(bits_of_float(value)) + " becomes " + hex(bits) + ", expected " +
       hex(bits_of_value(kType, expected)));
}

void check_number(u32 bits) {
  const float value = float_of_bits(bits);
  check_rounding<kFloat16>(value);
  check_rounding<kBFloat16>(value);
  check_rounding<kFloat8E4M3>(value);
  if (bits_as<kFloat32>(value) != bits || bits_of_float(float_of<kFloat32>(bits)) != bits) {
    fail("float32 is changed: " + hex(bits));
  }
}

// All that a type has, and of each the middle to the next one, with neighbours.
template <int kType>
void check_type() {
  now_running = "type " + std::to_string(kType);
  for (u32 bits = 0; bits < 1u << (8 * item_bytes_of(kType)); ++bits) {
    const double value = value_of_bits(kType, bits);
    if constexpr (kType != kFloat8E4M3) {
      const float seen = float_of<kType>(static_cast<Bits<kType>>(bits));
      const bool same = seen == value && std::signbit(seen) == std::signbit(value);
      if (!same && !(std::isnan(seen) && std::isnan(value))) fail(hex(bits) + " to float");
      if (!std::isnan(value) && bits_as<kType>(seen) != bits)
        fail(hex(bits) + " to float and back");
    }
    if (!std::isfinite(value)) continue;
    const double next = value_of_bits(kType, bits + 1);
    const FloatFormat format = format_of(kType);
    // Behind the largest there is one more, as it were.
    const double last_step =
        std::copysign(std::ldexp(1, std::ilogb(format.largest) - format.mantissa), value);
    const double middle =
        std::isfinite(next) && next != 0 ? (value + next) / 2 : value + last_step / 2;
    const u32 here = bits_of_float(static_cast<float>(value));
    const u32 between = bits_of_float(static_cast<float>(middle));
    for (u32 i = 0; i < 3; ++i) {
      check_number(here + i - 1);
      check_number(between + i - 1);
    }
  }
}

void check_others(Random& random) {
  now_running = "any float32";
  for (u32 exponent = 0; exponent < 512; ++exponent) {
    for (u32 shift = 0; shift < 23; ++shift) {
      for (const u32 fraction : {1u << shift, (1u << shift) - 1, (3u << shift) & 0x7fffff,
                                 (0x7fffffu << shift) & 0x7fffff}) {
        check_number(exponent << 23 | fraction);
      }
    }
  }
  for (int i = 0; i < 100'000; ++i) check_number(static_cast<u32>(random.bits()));
}

void check_divisor(u32 value, Random& random) {
  now_running = "division by " + std::to_string(value);
  const Divisor divisor = Divisor::of(value);
  const auto check = [&](i64 n) {
    if (n < 0 || n >= i64(1) << 31) return;
    const u32 quotient = divisor.quotient(static_cast<u32>(n));
    if (quotient != n / value) fail(std::to_string(n) + " gives " + std::to_string(quotient));
  };
  if (divisor.value != value) fail("it is known as " + std::to_string(divisor.value));
  const i64 most = ((i64(1) << 31) - 1) / value;
  // Multiples are where quotients change: the first ones, the last ones, any.
  for (i64 i = 0; i < 40; ++i) {
    for (const i64 times : {i, most - i, random.below(most + 1)}) {
      for (i64 more = -1; more <= 1; ++more) check(times * value + more);
    }
    check((i64(1) << 31) - 1 - i);
  }
}

void check_divisors(Random& random) {
  for (u32 value = 1; value < 2000; ++value) check_divisor(value, random);
  for (int log2 = 11; log2 < 32; ++log2) {
    for (i64 value = (i64(1) << log2) - 2; value <= (i64(1) << log2) + 2; ++value) {
      if (value < i64(1) << 31) check_divisor(static_cast<u32>(value), random);
    }
    for (int i = 0; i < 100; ++i) {
      check_divisor(static_cast<u32>(1 + random.below((i64(1) << log2) - 1)), random);
    }
  }
}

}  // namespace emulate

int main() {
  using namespace emulate;
  install_reports();
  Random random(1);
  check_type<kFloat16>();
  check_type<kBFloat16>();
  check_type<kFloat8E4M3>();
  check_others(random);
  check_divisors(random);
}
