#include "host/link.h"

#include <jitkern/launch.h>
#include <tvm/ffi/function.h>
#include <tvm/ffi/string.h>

#include <array>
#include <atomic>
#include <cstdio>
#include <fstream>
#include <string>

namespace jitkern {

namespace {

// CUdevice_attribute
constexpr int kPciBusId = 33, kPciDeviceId = 34, kPciDomainId = 50;

// In GT/s, all lanes together.
constexpr double kMeasuredLink = 16 * 32;  // PCIe 5.0 x16
constexpr double kSlowestLink = 8 * 8;     // PCIe 3.0 x8

// The number that a file begins with, as "32.0 GT/s PCIe" does; 0 if there is none.
double number_in(const std::string& file) {
  double number = 0;
  std::ifstream(file) >> number;
  return number;
}

// GT/s of all lanes of the PCIe device with this folder of sysfs. 0 if it is unknown: in some
// virtual machines, or below kSlowestLink, as where a GPU reaches host memory by another link.
double link_gt_s(const std::string& folder) {
  // An idle link may drop to 2.5 or 5 GT/s. Its maximum counts then.
  double lane_gt_s = number_in(folder + "current_link_speed");
  if (lane_gt_s < 8) lane_gt_s = number_in(folder + "max_link_speed");
  double num_lanes = number_in(folder + "current_link_width");
  if (num_lanes < 1 || num_lanes > 16) num_lanes = number_in(folder + "max_link_width");
  const double gt_s = lane_gt_s * num_lanes;
  return gt_s >= kSlowestLink ? gt_s : 0;
}

std::string sysfs_folder(int ordinal) {
  const CUdevice handle = device_handle(ordinal);
  const auto attribute = [handle](int which) {
    return static_cast<unsigned>(device_attribute(handle, which));
  };
  char folder[64];
  std::snprintf(folder, sizeof(folder), "/sys/bus/pci/devices/%04x:%02x:%02x.0/",
                attribute(kPciDomainId), attribute(kPciBusId), attribute(kPciDeviceId));
  return folder;
}

// For tests.
double export_link_gt_s(tvm::ffi::String folder) { return link_gt_s(std::string(folder)); }

// The speed of each device's link over kMeasuredLink; 0 until it is read.
std::array<std::atomic<double>, kMaxDevices> scales;

}  // namespace

i64 scaled_to_link(int ordinal, i64 figure) {
  if (ordinal < 0 || ordinal >= kMaxDevices) return figure;
  double scale = scales[ordinal].load(std::memory_order_relaxed);
  if (scale == 0) {
    const double gt_s = link_gt_s(sysfs_folder(ordinal));
    scale = gt_s > 0 ? gt_s / kMeasuredLink : 1;
    scales[ordinal] = scale;
  }
  return static_cast<i64>(static_cast<double>(figure) * scale);
}

TVM_FFI_DLL_EXPORT_TYPED_FUNC(link_gt_s, export_link_gt_s);

}  // namespace jitkern
