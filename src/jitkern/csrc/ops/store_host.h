// What store_cache and store_rows share on the host.
#pragma once

#include <jitkern/launch.h>

#include <optional>

namespace jitkern {

// Up to kMost items in place. With vectors a call of store_rows took 0.13 us more.
template <class T, int kMost>
class Few {
 public:
  int size() const { return size_; }
  const T& operator[](int i) const { return *items_[i]; }
  template <class... Args>
  void emplace_back(const Args&... args) {
    items_[size_++].emplace(args...);
  }

 private:
  std::optional<T> items_[kMost];
  int size_ = 0;
};

using Tensors = Few<Tensor, 2>;

// An index whose row is not stored; -1, as any negative one, for None.
inline i64 skip_arg(const char* op, AnyView value) {
  return is_none(value) ? -1 : int_arg(op, "skip", value);
}

// IndexError for the first index past the end that is not skipped. On the CPU.
void check_indices(const Indices& indices, i64 num_slots, i64 skip);

// Stores rows of one or two parts side by side in one cache, or of one part in each of two.
void store_parts(const Tensors& caches, const Indices& indices, const Tensors& parts, i64 skip,
                 FaultSite site);

}  // namespace jitkern
