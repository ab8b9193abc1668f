// Pinned memory through which rows and row numbers travel to a GPU, and the streams for them. Made
// at a device's first use, kept for good. Also events, streams and copies by the driver.
#pragma once

#include <jitkern/launch.h>

#include <deque>
#include <mutex>

namespace jitkern {

// 76 us of the link. Chunks of 1 and 2 MiB move as much from 64 GiB, and less from 16. All chunks
// together fit the last-level cache of a server.
constexpr i64 kChunkBytes = i64(4) << 20;
constexpr int kNumChunks = 6;

// Rows between the CPU's cores and a GPU.
struct Chunk {
  char* host;
  char* device;
  CUevent copied;
  CUevent done;  // the GPU no longer uses it
};

// Pinned memory from which small things are copied to the GPU, in turn.
class Uploads {
 public:
  static constexpr i64 kBytes = i64(16) << 20;

  // The next `bytes`, at most kBytes. Waits until the GPU has copied what was there.
  char* take(i64 bytes);
  // The GPU has read what was taken since when it reaches this point of the stream.
  void mark(CUstream stream);

 private:
  struct Taken {
    i64 begin;
    i64 end;
    CUevent read;
  };
  char* memory_ = nullptr;
  i64 begin_ = 0;  // of what is taken and not marked
  i64 end_ = 0;
  std::deque<Taken> taken_;
  std::vector<CUevent> free_;
};

class Staging {
 public:
  // Of the scope's device, whose context is current. RuntimeError if there is no memory for it.
  static Staging& get(const LaunchScope& scope);

  // A call's turn at the chunks, which then have host memory; RuntimeError if there is none. If the
  // call fails, its stream and later calls wait for what it has queued.
  class Turn {
   public:
    // `stream` is torch's current one.
    Turn(Staging& staging, CUstream stream);
    ~Turn();
    Turn(const Turn&) = delete;
    Turn& operator=(const Turn&) = delete;

    // Before anything is queued: `places` waits for the stream, and chunks get device memory;
    // RuntimeError if there is none.
    void begin();
    // The call's stream waits for all that was queued, or nothing is left.
    void finish() { has_begun_ = false; }

   private:
    Staging& staging_;
    const std::lock_guard<std::mutex> lock_;
    const CUstream stream_;
    bool has_begun_ = false;
  };

  std::mutex turn;  // of a call
  Uploads uploads;
  Chunk* chunks() { return chunks_.data(); }  // for a call that has its turn
  CUstream copies = nullptr;                  // by the copy engine
  CUstream places = nullptr;                  // of rows, in device memory
  CUevent start = nullptr;
  CUevent end = nullptr;
  CUevent fetched = nullptr;

  // The share of rows with which SMs and the CPU ended at once in the last call by both.
  double sms_share = 0.4;

 private:
  explicit Staging(int ordinal);

  void make_chunks();
  void give_device_memory(CUstream stream);

  int ordinal_;
  std::array<Chunk, kNumChunks> chunks_{};
  // From torch's allocator, which counts it, and gives it to no other stream.
  tvm::ffi::Tensor device_memory_;
};

// Streams and events of the current context. Streams do not synchronise with the default one.
CUstream make_stream(int priority);
CUevent make_event();
void record(CUevent event, CUstream stream);
void wait_for(CUstream stream, CUevent event);
// Whether all that was recorded has been done.
bool is_done(CUevent event);
// Sleeps most of the time.
void wait_for(CUevent event);
char* allocate_pinned(i64 bytes);
void copy_to_device(char* device, const char* host, i64 bytes, CUstream stream);
void copy_to_host(char* host, const char* device, i64 bytes, CUstream stream);

}  // namespace jitkern
