// Which ways the rows of a call take whose row numbers are on the host.
#include "pairs_by_cpu.h"

#include <tvm/ffi/container/array.h>
#include <tvm/ffi/string.h>

#include <algorithm>
#include <string>

#include "host/cpu_copy.h"
#include "host/pinned.h"
#include "host/tuning.h"
#include "host_pairs.h"

namespace jitkern {

namespace {

Method method_arg(const char* op, AnyView value) {
  const char* const expected = "\"auto\", \"sm\", \"cpu\" or \"both\"";
  const auto text = value.as<tvm::ffi::String>();
  if (!text) raise_type_error(op, "method", value, expected);
  if (*text == "auto") return Method::kAuto;
  if (*text == "sm") return Method::kSms;
  if (*text == "cpu") return Method::kCpu;
  if (*text == "both") return Method::kBoth;
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

// So many rows, as short, are worth the host's cores: longer ones hide the misses of the link's
// address translation.
constexpr i64 kMinRowsByCpu = 16384;
constexpr i64 kMaxRowBytesByCpu = 2048;

// The fastest way of a call on a GPU whose pairs are on the host. The device's context is current.
Method fastest(const PairArgs& args, const Lists& lists, i64 num_threads) {
  if (lists.reuse_resident || args.empty()) return Method::kSms;
  if (!is_mapped(args.host_rows())) return Method::kCpu;
  const bool gathers = args.host_side == kHostSource;
  const HostTraffic traffic = args.traffic();
  const auto limit = [&](Figure figure_of_gather, Figure figure_of_scatter) {
    return figure(traffic.ordinal, gathers ? figure_of_gather : figure_of_scatter);
  };
  const bool pays = std::abs(traffic.span_bytes) >= limit(kBothSpanBytes, kCpuScatterSpanBytes) &&
                    num_threads >= limit(kBothThreads, kCpuScatterThreads) &&
                    traffic.num_rows >= kMinRowsByCpu && traffic.row_bytes <= kMaxRowBytesByCpu;
  if (!pays) return Method::kSms;
  return gathers ? Method::kBoth : Method::kCpu;
}

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
                          const Lists& lists) {
  Staging& staging = Staging::get(scope);
  CpuWork work(args, 1);
  work.run([&] {
    work.check_pairs();
    const int index_bytes = narrow_index_bytes(args);
    const i64 num_pairs = args.params.num_pairs;
    PairCall call = args;
    call.index_bytes = index_bytes;
    const auto list =
        allocate({2 * num_pairs * index_bytes}, DLDataType{kDLUInt, 8, 1}, args.device);
    call.params.pairs = list.data_ptr();
    const std::lock_guard<std::mutex> turn(staging.turn);
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

Way way_arg(AnyView value, const PairArgs& args, bool reuse_resident) {
  if (is_none(value)) return {};
  const char* op = args.src.op;
  const auto given = value.cast<tvm::ffi::Array<tvm::ffi::Any>>();
  const Way way{method_arg(op, given[0]), num_threads_arg(op, given[1])};
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
  if (way.method == Method::kBoth && args.host_side == kHostTarget) {
    raise_value_error(op, "method", came, "\"auto\", \"sm\" or \"cpu\"");
  }
  return way;
}

void run_pairs(const LaunchScope& scope, PairArgs& args, KernelTable& table, const Lists& lists,
               const Way& way) {
  const bool of_host = !args.pairs.on_cuda();
  i64 num_threads = way.num_threads;
  if (of_host && num_threads == 0) num_threads = std::min(torch_num_threads(), num_cores());
  Method method = way.method;
  if (method == Method::kAuto) {
    method = of_host ? fastest(args, lists, num_threads) : Method::kSms;
  }
  if (method != Method::kCpu) args.map_host_rows();
  if (args.empty()) return;
  if (!of_host) return launch_pairs(scope, args, table, lists);

  require_no_capture(scope, args);
  const RelaxedCapture relaxed;
  if (method == Method::kSms) return launch_pairs_of_host(scope, args, table, lists);
  if (args.host_side == kHostTarget) return scatter_by_cpu(scope, args, table, num_threads);
  gather_by_cpu(scope, args, table, lists, method == Method::kBoth, num_threads);
}

}  // namespace jitkern
