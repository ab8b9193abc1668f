// Pinned memory: that of callers, which a GPU accesses in place, and that of a device for copies of
// rows and row numbers, made with its streams at first use and never freed. Also events, streams
// and copies by the driver.
#pragma once

#include <jitkern/launch.h>

#include <deque>
#include <mutex>

namespace jitkern {

// The GPU's address of `rows` in memory that was allocated as pinned, or registered in one or
// several adjacent pieces. ValueError with the cure if not all rows are pinned. The device's
// context is current.
constexpr const char* kPinCure =
    "pinned host memory for a copy with a GPU; allocate it with torch.empty(..., pin_memory=True) "
    "or call .pin_memory()";
char* mapped_rows(const Rows& rows, const char* cure = kPinCure);
// Whether all rows are in pinned memory.
bool is_mapped(const Rows& rows);

// The end of the registration of the byte at this address, beyond which one copy of the engine may
// not go; 0 if the byte is not pinned. The device's context is current.
u64 registration_end(u64 at);

// Pools of pinned memory, for whose rows the driver is not called. Tensors may keep the memory of a
// closed pool; mapped_rows refuses their rows.
void add_pool(const char* begin, i64 num_bytes, const char* device_address);
void close_pool(const char* begin);
void forget_pool(u64 begin);
// How many were closed so far: addresses that were looked up before may be gone.
u64 num_pools_closed();

// 4 MiB take 76 us on the link. Chunks of 1 and 2 MiB are as fast from 64 GiB, and slower from 16.
// All chunks together fit the last-level cache of a server.
constexpr i64 kChunkBytes = i64(4) << 20;
constexpr int kNumChunks = 6;

// Rows on their way from the CPU's cores to a GPU.
struct Chunk {
  char* host;
  char* device;
  CUevent copied;
  CUevent done;  // the GPU no longer uses it
};

// A ring of pinned memory for small copies to the GPU.
class Uploads {
 public:
  static constexpr i64 kBytes = i64(16) << 20;

  // Returns the next `bytes`, at most kBytes. Waits until the GPU has copied earlier data there.
  char* take(i64 bytes);
  // All bytes taken so far are copied when the stream reaches this point.
  void mark(CUstream stream);

 private:
  struct Taken {
    i64 begin;
    i64 end;
    CUevent read;
  };
  char* memory_ = nullptr;
  i64 begin_ = 0;  // of bytes that are taken and not marked
  i64 end_ = 0;
  std::deque<Taken> taken_;
  std::vector<CUevent> free_;
};

class Staging {
 public:
  // The one of the scope's device, whose context is current. RuntimeError if memory is short.
  static Staging& get(const LaunchScope& scope);

  // A call's exclusive use of the chunks, for which it allocates host memory, or raises
  // RuntimeError. If the call fails, its stream and later calls wait for its queued work.
  class Turn {
   public:
    // `stream` is torch's current one.
    Turn(Staging& staging, CUstream stream);
    ~Turn();

    // Call it before queueing work: `places` waits for the stream, and chunks get device memory, or
    // RuntimeError.
    void begin();
    // Call it when the call's stream waits for all queued work.
    void finish() { has_begun_ = false; }

   private:
    Staging& staging_;
    const std::lock_guard<std::mutex> lock_;
    const CUstream stream_;
    bool has_begun_ = false;
  };

  std::mutex turn;  // held by a call
  Uploads uploads;
  Chunk* chunks() { return chunks_.data(); }  // for the call that holds the turn
  CUstream copies = nullptr;                  // copies by the engine
  CUstream places = nullptr;                  // kernels that place rows in device memory
  CUevent start = nullptr;
  CUevent end = nullptr;
  CUevent fetched = nullptr;

  // The share of rows with which SMs would have finished the last call together with the CPU.
  double sms_share = 0.4;

 private:
  explicit Staging(int ordinal);

  void make_chunks();
  void give_device_memory(CUstream stream);

  int ordinal_;
  std::array<Chunk, kNumChunks> chunks_{};
  // From torch's allocator, which counts it.
  tvm::ffi::Tensor device_memory_;
};

// Streams and events of the current context. Streams do not synchronise with the default stream.
CUstream make_stream(int priority);
CUevent make_event();
void destroy_event(CUevent event);  // which may be null; errors are ignored
void record(CUevent event, CUstream stream);
void wait_for(CUstream stream, CUevent event);
// Whether the work before the event is done.
bool is_done(CUevent event);
// Waits for that; the thread sleeps most of the time.
void wait_for(CUevent event);
char* allocate_pinned(i64 bytes);
void copy_to_device(char* device, const char* host, i64 bytes, CUstream stream);
void copy_to_host(char* host, const char* device, i64 bytes, CUstream stream);

}  // namespace jitkern
