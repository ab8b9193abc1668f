#include "fake_fabric.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <random>

#include "ops/floats.h"

namespace fake {

namespace {

constexpr int kMaxRanks = 8;
constexpr i64 kSlotBytes = i64(1) << 20;  // so that tests have calls of several steps
constexpr i64 kPieceBytes = i64(64) << 10;
constexpr int kPauseUs = 20;
constexpr int kPausesPerLook = 50;
constexpr int kSignatureItems = 6;

// Nobody may have waited for it yet: a zombie's connections are closed.
bool has_ended(int pid) {
  std::ifstream file("/proc/" + std::to_string(pid) + "/stat");
  std::string about((std::istreambuf_iterator<char>(file)), {});
  const size_t name_end = about.rfind(')');
  return name_end == std::string::npos || about.compare(name_end, 3, ") Z") == 0;
}

}  // namespace

// All zero at first. Only what is touched takes memory.
struct SharedMemory {
  struct Rank {
    std::atomic<u64> met[Fabric::kNumMeetings];
    std::atomic<u64> wants[kMaxRanks];
    std::atomic<int> pid;
    std::atomic<bool> has_left;
    std::atomic<u64> posted;  // step whose data is in the slot
    std::atomic<u64> read;    // step of which this rank has read all slots
    i64 signature[kSignatureItems];
    alignas(64) char slot[kSlotBytes];
  };
  struct Channel {
    std::atomic<u64> sent;
    std::atomic<u64> received;
    i64 total;
    i64 bytes;
    char piece[kPieceBytes];
  };
  std::atomic<int> num_left;
  Rank ranks[kMaxRanks];
  Channel channels[kMaxRanks][kMaxRanks];
};

std::string Fabric::make() {
  const char* folder = std::getenv("FAKE_NCCL_FOLDER");
  std::random_device random;
  const std::string path = std::string(folder == nullptr ? "/dev/shm" : folder) + "/fake-nccl-" +
                           std::to_string(getpid()) + "-" + std::to_string(random());
  const int file = open(path.c_str(), O_RDWR | O_CREAT | O_EXCL, 0600);
  if (file < 0 || ftruncate(file, sizeof(SharedMemory)) != 0) fail_program("has no /dev/shm");
  close(file);
  return path;
}

Fabric::Fabric(const std::string& path, int rank, int size, const std::atomic<bool>& stop)
    : rank(rank), size(size), stop_(stop), path_(path) {
  const int file = open(path.c_str(), O_RDWR);
  if (file < 0 || size > kMaxRanks) return;
  void* const memory =
      mmap(nullptr, sizeof(SharedMemory), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  close(file);
  if (memory == MAP_FAILED) return;
  shared_ = static_cast<SharedMemory*>(memory);
  shared_->ranks[rank].pid = getpid();
}

Fabric::~Fabric() {
  if (shared_ != nullptr) munmap(shared_, sizeof(SharedMemory));
}

void Fabric::leave() {
  shared_->ranks[rank].has_left = true;
  if (shared_->num_left.fetch_add(1) + 1 == size) unlink(path_.c_str());
}

bool Fabric::wait(const std::function<bool()>& until) {
  for (int pause = 0; !until(); ++pause) {
    if (stop_.load(std::memory_order_acquire)) return false;
    if (pause % kPausesPerLook == 0 && is_one_gone() && !until()) return is_broken_ = true, false;
    usleep(kPauseUs);
  }
  return true;
}

// A process that has ended, or given up: its end of a connection is closed.
bool Fabric::is_one_gone() const {
  static const bool has_connections = std::getenv("FAKE_NCCL_SOCKETS") != nullptr;
  if (!has_connections) return false;
  return std::any_of(shared_->ranks, shared_->ranks + size, [](const auto& one) {
    const int pid = one.pid;
    return one.has_left || (pid != 0 && has_ended(pid));
  });
}

bool Fabric::meet(Meeting what, u64 time) {
  shared_->ranks[rank].met[what] = time;
  return wait([&] {
    return std::all_of(shared_->ranks, shared_->ranks + size,
                       [&](const auto& one) { return one.met[what] >= time; });
  });
}

void Fabric::want_peer(int peer) { shared_->ranks[rank].wants[peer] = 1; }

bool Fabric::meet_peer(int peer) {
  return wait([&] { return shared_->ranks[peer].wants[rank] != 0; });
}

// Ranks that make different calls wait for each other for ever, as NCCL's often do.
bool Fabric::step(const std::vector<i64>& signature, const std::function<void(char*)>& write,
                  const Read& read) {
  const u64 number = ++num_steps_;
  const auto all = [&](auto is_there) {
    return wait([&] { return std::all_of(shared_->ranks, shared_->ranks + size, is_there); });
  };
  auto& own = shared_->ranks[rank];
  if (!all([&](const auto& one) { return one.read + 1 >= number; })) return false;
  std::copy(signature.begin(), signature.end(), own.signature);
  write(own.slot);
  own.posted = number;
  if (!all([&](const auto& one) { return one.posted >= number; })) return false;
  std::vector<const char*> slots;
  for (int one = 0; one < size; ++one) {
    const auto& other = shared_->ranks[one];
    if (!std::equal(signature.begin(), signature.end(), other.signature)) {
      return wait([] { return false; });
    }
    slots.push_back(other.slot);
  }
  read(slots);
  own.read = number;
  return true;
}

bool Fabric::progress(Transfer& transfer) {
  auto& channel = transfer.is_send ? shared_->channels[rank][transfer.peer]
                                   : shared_->channels[transfer.peer][rank];
  char* const at = transfer.data + transfer.done;
  const bool is_full = channel.sent != channel.received;
  if (is_full == transfer.is_send) return false;
  if (transfer.is_send) {
    channel.total = transfer.bytes;
    channel.bytes = std::min(kPieceBytes, transfer.bytes - transfer.done);
    std::memcpy(channel.piece, at, static_cast<size_t>(channel.bytes));
    ++channel.sent;
  } else {
    if (channel.total != transfer.bytes) return false;  // for ever
    std::memcpy(at, channel.piece, static_cast<size_t>(channel.bytes));
    ++channel.received;
  }
  transfer.done += std::min(kPieceBytes, transfer.bytes - transfer.done);
  return true;
}

// All progress together, but for those of one direction between the same two, which have an order.
bool Fabric::run(std::vector<Transfer> transfers) {
  return wait([&] {
    bool has_moved = true;
    while (has_moved) {
      has_moved = false;
      for (size_t i = 0; i < transfers.size(); ++i) {
        Transfer& one = transfers[i];
        const bool is_first =
            std::none_of(transfers.begin(), transfers.begin() + i, [&](const Transfer& other) {
              return other.done < other.bytes && other.peer == one.peer &&
                     other.is_send == one.is_send;
            });
        if (is_first && one.done < one.bytes) has_moved |= progress(one);
      }
    }
    return std::all_of(transfers.begin(), transfers.end(),
                       [](const Transfer& one) { return one.done >= one.bytes; });
  });
}

// -- reductions -----------------------------------------------------------------------------------

namespace {

enum Op : int { kSum, kProd, kMax, kMin, kAvg };

template <class T>
T combine(T a, T b, int op) {
  if (op == kProd) return static_cast<T>(a * b);
  if (op == kMax) return std::max(a, b);
  if (op == kMin) return std::min(a, b);
  return static_cast<T>(a + b);
}

template <class T>
struct Plain {
  using Stored = T;
  using Value = T;
  static Value load(Stored x) { return x; }
  static Stored store(Value x) { return x; }
};

template <int kType>
struct Half {
  using Stored = jitkern::Bits<kType>;
  using Value = float;
  static Value load(Stored x) { return jitkern::float_of<kType>(x); }
  static Stored store(Value x) { return jitkern::bits_as<kType>(x); }
};

template <class Format>
void reduce(const std::vector<const char*>& parts, char* output, i64 count, int op) {
  for (i64 i = 0; i < count; ++i) {
    const auto at = [&](const char* part) {
      typename Format::Stored one;
      std::memcpy(&one, part + i * i64(sizeof(one)), sizeof(one));
      return Format::load(one);
    };
    typename Format::Value total = at(parts[0]);
    for (size_t rank = 1; rank < parts.size(); ++rank) total = combine(total, at(parts[rank]), op);
    using Value = typename Format::Value;
    if (op == kAvg) total = static_cast<Value>(total / static_cast<Value>(parts.size()));
    const typename Format::Stored stored = Format::store(total);
    std::memcpy(output + i * i64(sizeof(stored)), &stored, sizeof(stored));
  }
}

using Reduce = void (*)(const std::vector<const char*>&, char*, i64, int);
struct Dtype {
  i64 bytes;
  Reduce reduce;
};
constexpr Dtype kDtypes[] = {
    {1, reduce<Plain<signed char>>},
    {1, reduce<Plain<unsigned char>>},
    {4, reduce<Plain<int>>},
    {4, reduce<Plain<u32>>},
    {8, reduce<Plain<i64>>},
    {8, reduce<Plain<u64>>},
    {2, reduce<Half<jitkern::kFloat16>>},
    {4, reduce<Plain<float>>},
    {8, reduce<Plain<double>>},
    {2, reduce<Half<jitkern::kBFloat16>>},
};

}  // namespace

i64 item_bytes(int dtype) {
  if (dtype < 0 || dtype >= int(std::size(kDtypes))) fail_program("is given an unknown dtype");
  return kDtypes[dtype].bytes;
}

bool Fabric::run(const Collective& what) {
  const i64 bytes = what.count * item_bytes(what.dtype);
  const bool is_scatter = what.kind == Collective::kReduceScatter;
  const i64 most = kSlotBytes / (is_scatter ? size : 1) / 64 * 64;
  for (i64 begin = 0; begin < bytes; begin += most) {
    const i64 length = std::min(most, bytes - begin);
    const auto n = static_cast<size_t>(length);
    const auto write = [&](char* slot) {
      if (is_scatter) {
        for (int part = 0; part < size; ++part) {
          std::memcpy(slot + part * length, what.x + part * bytes + begin, n);
        }
      } else if (what.kind != Collective::kBroadcast || what.root == rank) {
        std::memcpy(slot, what.x + begin, n);
      }
    };
    const auto read = [&](std::vector<const char*> slots) {
      if (what.kind == Collective::kAllGather) {
        for (int one = 0; one < size; ++one) {
          std::memcpy(what.output + one * bytes + begin, slots[size_t(one)], n);
        }
      } else if (what.kind == Collective::kBroadcast) {
        std::memcpy(what.output + begin, slots[size_t(what.root)], n);
      } else {
        for (const char*& slot : slots) slot += is_scatter ? rank * length : 0;
        const Dtype& dtype = kDtypes[what.dtype];
        dtype.reduce(slots, what.output + begin, length / dtype.bytes, what.op);
      }
    };
    if (!step({what.kind, what.count, what.dtype, what.op, what.root, begin}, write, read)) {
      return false;
    }
  }
  return true;
}

}  // namespace fake
