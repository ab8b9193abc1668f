// Pinned memory through which rows and row numbers travel to a GPU, and the streams that carry
// them: made for a device at its first use, kept for good.
#pragma once

#include <jitkern/launch.h>

#include <deque>
#include <map>
#include <mutex>

namespace jitkern {

// 76 us of the link. Chunks of 1 and 2 MiB move as much from 64 GiB and less from 16; all chunks
// together stay in the last-level cache of a server.
constexpr i64 kChunkBytes = i64(4) << 20;
constexpr int kNumChunks = 6;

// Rows between the CPU's cores and a GPU.
struct Chunk {
  char* host;
  char* device;
  CUevent copied;
  CUevent done;  // the GPU has no more use for it
};

// Pinned memory from which small things are copied to the GPU, in turn.
class Uploads {
 public:
  static constexpr i64 kBytes = i64(16) << 20;

  // The next `bytes`, at most kBytes; waits until what the GPU copies from there has arrived.
  char* take(i64 bytes);
  // The GPU has read what was taken since once it has come to this place of the stream.
  void mark(CUstream stream);

 private:
  struct Taken {
    i64 begin;
    i64 end;
    CUevent read;
  };
  char* memory_ = nullptr;
  i64 begin_ = 0;  // of what was taken and not marked
  i64 end_ = 0;
  std::deque<Taken> taken_;
  std::vector<CUevent> free_;
};

class Staging {
 public:
  // Of the scope's device, whose context is current. RuntimeError where there is no memory for it.
  static Staging& get(const LaunchScope& scope);

  // A call's turn at the chunks, which have their host memory from then on; RuntimeError where
  // there is none. If the call fails, its stream and later calls wait for what it has queued.
  class Turn {
   public:
    // `stream` is torch's current one.
    Turn(Staging& staging, CUstream stream);
    ~Turn();
    Turn(const Turn&) = delete;
    Turn& operator=(const Turn&) = delete;

    // In front of the first thing that is queued: `places` comes behind what is on the stream, and
    // chunks have their device memory; RuntimeError where there is none.
    void begin();
    // The call's stream waits for all that was queued, or it is over.
    void finish() { has_begun_ = false; }

   private:
    Staging& staging_;
    const std::lock_guard<std::mutex> lock_;
    const CUstream stream_;
    bool has_begun_ = false;
  };

  std::mutex turn;  // of a call
  Uploads uploads;
  Chunk* chunks() { return chunks_.data(); }  // of a call that has its turn
  CUstream copies = nullptr;                  // by the copy engine
  CUstream places = nullptr;                  // of rows, in device memory
  CUevent start = nullptr;
  CUevent end = nullptr;
  CUevent fetched = nullptr;

  // What part of a call's rows SMs took when they and the CPU ended at once, by what decides it.
  using Traffic = std::array<i64, 5>;
  std::map<Traffic, double> sms_shares;

 private:
  explicit Staging(int ordinal);

  void make_chunks();
  void give_device_memory(CUstream stream);

  int ordinal_;
  std::array<Chunk, kNumChunks> chunks_{};
  // Kept for good: torch's allocator then counts it, and no other stream gets it.
  tvm::ffi::Tensor device_memory_;
};

// Streams do not wait for the default one, nor it for them.
CUstream make_stream(int priority);
CUevent make_event();
void record(CUevent event, CUstream stream);
void wait_for(CUstream stream, CUevent event);
// Whether all that was recorded has been done.
bool is_done(CUevent event);
// Asleep most of the time.
void wait_for(CUevent event);
void copy_to_device(char* device, const char* host, i64 bytes, CUstream stream);
void copy_to_host(char* host, const char* device, i64 bytes, CUstream stream);

}  // namespace jitkern
