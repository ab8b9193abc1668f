// When the order of the host's memory pays, and how finely a call is sorted.
#include <algorithm>
#include <string>

#include "host/tuning.h"
#include "regions_host.h"

namespace jitkern {

namespace {

// A miss lasts as long as 1.7 KB: rows of 2 KB out of 16 GiB come at 45, those of 3 KB at 51 GB/s
// as they are, in order both at 51.
constexpr i64 kMaxRowBytesToOrder = 2048;
// The sort takes 10 us. Calls of 2,048 rows are faster without, of 4,096 as fast (64 GiB) or slower
// (16 and 2 GiB), but out of 1 GiB, where one row in four misses. So are those of swap_rows: 2,048
// triples take 92 us in either order out of 1.5 GiB, 156 and 164 out of 16, 4,096 203 and 156, 311
// and 273.
constexpr i64 kMinRowsToOrder = 4096;
constexpr double kMinMissesToOrder = 2560;

// What a sorted call has on its way: 4 SMs with rows of 656 bytes, where 3 lose 5 % at 8 GiB, and 8
// beyond, which at 16 GiB move 43.2 GB/s where 4 move 41.1 ...
constexpr i64 kOrderedBytesInFlight = 512 << 10;
constexpr i64 kLargeSpanBytes = i64(8) << 30;
// ... but no more rows than lie within 1 GiB of each other: 32,768 out of 64 GiB come at 23.7 GB/s
// on 4 SMs, at 20.7 on 8.
constexpr i64 kInFlightSpanBytes = i64(1) << 30;

}  // namespace

bool is_worth_ordering(const HostTraffic& traffic) {
  if (traffic.span_bytes < 1) return false;
  if (traffic.num_rows < kMinRowsToOrder || traffic.row_bytes > kMaxRowBytesToOrder) return false;
  const double reach_bytes = double(figure(traffic.ordinal, kReachBytes));
  const double hits = reach_bytes / double(traffic.span_bytes);
  return double(traffic.num_rows) * (1.0 - hits) >= kMinMissesToOrder;
}

bool order_arg(const char* op, AnyView value, const HostTraffic& traffic) {
  if (is_none(value)) return is_worth_ordering(traffic);
  const auto text = value.as<tvm::ffi::String>();
  if (text && *text == "auto") return is_worth_ordering(traffic);
  if (text && *text == "given") return false;
  if (text && *text == "host") return traffic.span_bytes >= 1;
  constexpr const char* kExpected = "\"auto\", \"given\" or \"host\"";
  if (!text) raise_type_error(op, "order", value, kExpected);
  raise_value_error(op, "order", "\"" + std::string(*text) + "\"", kExpected);
}

i64 ordered_bytes_in_flight(const HostTraffic& traffic, i64 unsorted) {
  const bool is_large = traffic.span_bytes > kLargeSpanBytes;
  const i64 wanted = is_large ? 2 * kOrderedBytesInFlight : kOrderedBytesInFlight;
  const double bytes = double(traffic.num_rows) * double(traffic.row_bytes);
  const double within = double(kInFlightSpanBytes) / double(traffic.span_bytes) * bytes;
  return within < double(wanted) ? std::max(unsorted, static_cast<i64>(within)) : wanted;
}

Regions cut_regions(i64 span_bytes, u32 num_kinds) {
  Regions regions{};
  regions.num_kinds = num_kinds;
  while (((span_bytes - 1) >> regions.shift) >= i64(kNumRegions)) ++regions.shift;
  return regions;
}

}  // namespace jitkern
