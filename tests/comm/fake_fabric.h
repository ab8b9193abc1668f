// What ranks that are processes of one host have for each other, in memory that they share.
#pragma once

#include <atomic>
#include <functional>
#include <string>
#include <vector>

#include "fake_gpu.h"

namespace fake {

using jitkern::u32;
using jitkern::u64;

struct SharedMemory;

// Between two ranks: bytes that one sends and the other receives.
struct Transfer {
  bool is_send;
  int peer;
  char* data;
  i64 bytes;
  i64 done = 0;
};

struct Collective {
  enum Kind : int { kAllReduce, kAllGather, kReduceScatter, kBroadcast };
  Kind kind;
  const char* x;
  char* output;
  i64 count;  // as NCCL is given it
  int dtype;
  int op;
  int root;
};

// The ranks of one communicator. What waits returns false once `stop` is set. Under
// FAKE_NCCL_SOCKETS it does so too when a rank is gone whom it waits for, and `is_broken` from then
// on.
class Fabric {
 public:
  // Makes the memory; a name for the others.
  static std::string make();

  // Empty where there is no such memory.
  Fabric(const std::string& path, int rank, int size, const std::atomic<bool>& stop);
  ~Fabric();
  Fabric(const Fabric&) = delete;
  Fabric& operator=(const Fabric&) = delete;

  bool is_empty() const { return shared_ == nullptr; }
  // All ranks have come to the same; `what` numbers a kind of meeting, `time` is 1 at the first.
  enum Meeting : int { kJoin, kConnect, kWindow, kNumMeetings };
  bool meet(Meeting what, u64 time);
  // Both have come to their first transfer. Who has several says so of all, and then meets them.
  void want_peer(int peer);
  bool meet_peer(int peer);

  bool run(const Collective& what);
  bool run(std::vector<Transfer> transfers);
  bool is_broken() const { return is_broken_; }
  // The last one deletes the memory.
  void leave();

  const int rank;
  const int size;

 private:
  using Read = std::function<void(const std::vector<const char*>&)>;
  bool wait(const std::function<bool()>& until);
  bool is_one_gone() const;
  bool step(const std::vector<i64>& signature, const std::function<void(char*)>& write,
            const Read& read);
  bool progress(Transfer& transfer);

  const std::atomic<bool>& stop_;
  std::string path_;
  SharedMemory* shared_ = nullptr;
  u64 num_steps_ = 0;
  std::atomic<bool> is_broken_{false};
};

i64 item_bytes(int dtype);

}  // namespace fake
