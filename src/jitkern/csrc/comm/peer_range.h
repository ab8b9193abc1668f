// Memory of all ranks of a host, one behind the other in one range of this process's addresses.
#pragma once

#include <jitkern/types.h>
#include <sys/types.h>

#include <memory>
#include <vector>

namespace jitkern {

// It lives as long as somebody may use it: the PeerMemory and its tensors. In a forked child it is
// no longer there, and nothing is given back.
class PeerRange {
 public:
  virtual ~PeerRange() = default;
  PeerRange(const PeerRange&) = delete;
  PeerRange& operator=(const PeerRange&) = delete;

  const i64 size;         // ranks
  const i64 share_bytes;  // of each, whole pieces of what memory comes in
  char* base = nullptr;

  // Makes the memory of `rank`, on this GPU, and maps it; returns a descriptor of it that the
  // caller closes, -1 where it is not to be exported.
  virtual int create(i64 rank, int ordinal, bool is_exported) = 0;
  // Maps the memory of `rank`, which is the caller's descriptor.
  virtual void map(i64 rank, int fd) = 0;
  // Copies between memory here and at `offset` of the range, as this GPU sees it, or zeroes there.
  // RuntimeError where the GPU has not done that within `timeout_s`.
  virtual void write(i64 offset, const char* from, i64 bytes, int ordinal, double timeout_s) = 0;
  virtual void read(i64 offset, char* to, i64 bytes, int ordinal, double timeout_s) = 0;
  virtual void clear(i64 offset, i64 bytes, int ordinal, double timeout_s) = 0;
  // Gives back the addresses, and with them the memory unless another process has it mapped; waits
  // for the GPUs first. Once is enough.
  virtual void release() noexcept = 0;

 protected:
  PeerRange(i64 size, i64 share_bytes);

  i64 bytes() const { return size * share_bytes; }
  char* place_of(i64 rank) const { return base + rank * share_bytes; }
  bool is_here() const;  // and not in a forked child

  std::vector<bool> is_mapped_;  // by rank

 private:
  const pid_t owner_;
};

// On the CPU, of memfds. On GPUs: `ordinals` are those of this process that are to see it.
std::shared_ptr<PeerRange> make_host_range(i64 size, i64 share_bytes);
std::shared_ptr<PeerRange> make_gpu_range(i64 size, i64 share_bytes, std::vector<int> ordinals);

}  // namespace jitkern
