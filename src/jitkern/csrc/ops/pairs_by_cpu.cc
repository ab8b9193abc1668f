// Which ways the rows of a call take whose row numbers are on the host.
#include "pairs_by_cpu.h"

#include <tvm/ffi/container/array.h>
#include <tvm/ffi/string.h>

#include <algorithm>
#include <cmath>
#include <string>

#include "host/cpu_copy.h"
#include "host/pinned.h"
#include "host/tuning.h"
#include "host_pairs.h"

namespace jitkern {

namespace {

Method method_arg(const char* op, AnyView value, HostSide host_side) {
  if (is_none(value)) return Method::kAuto;
  const bool may_be_both = host_side == kHostSource;
  const char* const expected =
      may_be_both ? "\"auto\", \"sm\", \"cpu\" or \"both\"" : "\"auto\", \"sm\" or \"cpu\"";
  const auto text = value.as<tvm::ffi::String>();
  if (!text) raise_type_error(op, "method", value, expected);
  if (*text == "auto") return Method::kAuto;
  if (*text == "sm") return Method::kSms;
  if (*text == "cpu") return Method::kCpu;
  if (*text == "both" && may_be_both) return Method::kBoth;
  raise_value_error(op, "method", "\"" + std::string(*text) + "\"", expected);
}

i64 num_threads_arg(const char* op, AnyView value) {
  if (is_none(value)) return 0;
  const i64 cores = num_cores();
  const i64 count = int_arg(op, "num_threads", value);
  if (count < 1 || count > cores) {
    raise_value_error(op, "num_threads", std::to_string(count),
                      "1 to " + std::to_string(cores) + ", the cores of this process");
  }
  return count;
}

// Whether SMs would wait for pages rather than for rows, even in the order of the host's memory.
bool is_bound_by_pages(const HostTraffic& traffic) {
  constexpr double kPageBytes = 64 << 10;
  constexpr double kMargin = 1.1;
  const double num_rows = double(traffic.num_rows);
  const double num_pages = std::abs(double(traffic.span_bytes)) / kPageBytes;
  // Of random rows the first of each page pays for it.
  const double touched = num_pages * -std::expm1(-num_rows / num_pages);
  const double miss_bytes = double(figure(traffic.ordinal, kPageMissBytes));
  return touched * miss_bytes > kMargin * num_rows * double(traffic.row_bytes);
}

// The CPU's way begins with waking its threads and ends with a chunk: 0.1 to 0.2 ms. Calls of 8,192
// rows out of 64 GiB come at 28.8 GB/s through it, at 17 by SMs; of 2,048 at 10 and 24. Fewer than
// 16,384 rows are not worth two ways.
constexpr i64 kMinRowsByCpu = 8192;
constexpr i64 kMinRowsBothWays = 16384;
// Into host memory rows make three ways one after the other: 32,768 into 64 GiB go at 27 and 22
// GB/s, 8,192 at 9 and 16.
constexpr i64 kMinRowsToScatterByCpu = 32768;

Method fastest_gather(const HostTraffic& traffic, i64 num_threads) {
  if (traffic.num_rows < kMinRowsByCpu || num_threads < figure(traffic.ordinal, kBothThreads) ||
      !is_bound_by_pages(traffic)) {
    return Method::kSms;
  }
  return traffic.num_rows < kMinRowsBothWays ? Method::kCpu : Method::kBoth;
}

Method fastest_scatter(const HostTraffic& traffic, i64 num_threads) {
  const bool pays = traffic.num_rows >= kMinRowsToScatterByCpu &&
                    num_threads >= figure(traffic.ordinal, kCpuScatterThreads) &&
                    std::abs(traffic.span_bytes) >= figure(traffic.ordinal, kCpuScatterSpanBytes) &&
                    is_bound_by_pages(traffic);
  return pays ? Method::kCpu : Method::kSms;
}

// The fastest way of a call on a GPU whose pairs are on the host. The device's context is current.
Method fastest(const PairArgs& args, const Lists& lists, i64 num_threads) {
  if (lists.reuse_resident) return Method::kSms;
  if (!args.host_rows().empty() && !is_mapped(args.host_rows())) return Method::kCpu;
  if (args.empty()) return Method::kSms;
  return args.host_side == kHostSource ? fastest_gather(args.traffic(), num_threads)
                                       : fastest_scatter(args.traffic(), num_threads);
}

// All that torch takes but one core, for the driver's threads and the rest of the process: 16 of 16
// move 38.8 GB/s both ways out of 64 GiB, 15 46.2.
i64 default_threads() { return std::max<i64>(1, std::min(torch_num_threads(), num_cores() - 1)); }

// A replay reads what was there when the graph was captured, and no memory of the host.
void require_no_capture(const LaunchScope& scope, const PairArgs& args) {
  int status = 0;
  const Driver& driver = Driver::get();
  driver.check(driver.cuStreamIsCapturing(scope.stream(), &status), "cuStreamIsCapturing");
  if (status == 0) return;
  args.pairs.value_error(
      "device cpu while a graph is captured",
      "device " + args.device_rows().device_name() + ": a replay would not read them again");
}

// Copies the pairs to the GPU and launches the call there.
void launch_pairs_of_host(const LaunchScope& scope, const PairArgs& args, KernelTable& table,
                          const Lists& lists, i64 num_threads) {
  const int index_bytes = narrow_index_bytes(args);
  const i64 num_pairs = args.params.num_pairs;
  PairCall call = args;
  call.index_bytes = index_bytes;
  // In front of the locks: they may have to be compiled, in Python.
  find_pair_kernels(scope, call, table, lists);
  Staging& staging = Staging::get(scope);
  const std::lock_guard<std::mutex> turn(staging.turn);
  CpuWork work(args, num_threads, 16 * num_pairs);
  work.run([&] {
    work.check_pairs();
    const auto list =
        allocate({2 * num_pairs * index_bytes}, DLDataType{kDLUInt, 8, 1}, args.device);
    call.params.pairs = list.data_ptr();
    for (i64 begin = 0; begin < num_pairs; begin += kBlockPairs) {
      PairList block{nullptr, index_bytes};
      const i64 count = std::min(kBlockPairs, num_pairs - begin);
      block.data = staging.uploads.take(block.bytes(count));
      work.start_copy(block, begin, count);
      work.finish_copy();
      copy_to_device(static_cast<char*>(list.data_ptr()) + block.bytes(begin),
                     static_cast<const char*>(block.data), block.bytes(count), scope.stream());
      staging.uploads.mark(scope.stream());
    }
    launch_pairs(scope, call, table, lists);
  });
}

}  // namespace

Way way_arg(AnyView method, AnyView num_threads, const PairArgs& args, bool reuse_resident) {
  const char* op = args.src.op;
  const Way way{method_arg(op, method, args.host_side), num_threads_arg(op, num_threads)};
  if (way.method != Method::kCpu && way.method != Method::kBoth) return way;
  const std::string came = way.method == Method::kCpu ? "\"cpu\"" : "\"both\"";
  if (args.pairs.on_cuda()) {
    raise_value_error(op, "method", came + " with pairs on " + args.pairs.device_name(),
                      "pairs on the CPU, whose cores read them, or \"sm\"");
  }
  if (reuse_resident) {
    raise_value_error(op, "method", came + " with reuse_resident",
                      "\"sm\": the slot map is on the GPU");
  }
  return way;
}

void run_pairs(const LaunchScope& scope, PairArgs& args, KernelTable& table, const Lists& lists,
               const Way& way) {
  const bool of_host = !args.pairs.on_cuda();
  i64 num_threads = way.num_threads;
  if (of_host && num_threads == 0) num_threads = default_threads();
  Method method = way.method;
  if (method == Method::kAuto) {
    args.max_sms = kMaxSmsBeside;
    method = of_host ? fastest(args, lists, num_threads) : Method::kSms;
  }
  if (method != Method::kCpu) args.map_host_rows();
  if (args.empty()) return;
  if (!of_host) return launch_pairs(scope, args, table, lists);

  require_no_capture(scope, args);
  const RelaxedCapture relaxed;
  if (method == Method::kSms) {
    return launch_pairs_of_host(scope, args, table, lists, num_threads);
  }
  if (args.host_side == kHostTarget) return scatter_by_cpu(scope, args, table, num_threads);
  gather_by_cpu(scope, args, table, lists, method == Method::kBoth, num_threads);
}

}  // namespace jitkern
