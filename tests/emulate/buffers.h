// Buffers of exactly the bytes a tensor has. Everything around and between them is either poisoned,
// so that AddressSanitizer stops at the first byte read or written there, or compared afterwards.
#pragma once

#include <jitkern/types.h>

#include <atomic>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "cuda_on_cpu.h"

namespace emulate {

using namespace jitkern;  // what emulate has of the same name goes first

// What is running now; every failure is reported with it.
extern std::string now_running;
[[noreturn]] void fail(const std::string& what);
// Makes sanitizer reports end with `now_running`, too.
void install_reports();

// Whether a Rewriter changes indices while a kernel runs. What rows hold then is anyone's guess,
// and checks compare only what lies outside of them.
inline bool has_race = false;

struct Free {
  void operator()(void* memory) const { std::free(memory); }
};
using Memory = std::unique_ptr<char[], Free>;
// Memory of exactly so many bytes.
Memory allocate(size_t align, size_t bytes);

class Random {
 public:
  explicit Random(u64 seed) : state_(seed * 0x9e3779b97f4a7c15u + 1) {}
  u64 bits() {
    state_ = state_ * 6364136223846793005u + 1442695040888963407u;
    return state_ >> 29;
  }
  i64 below(i64 bound) { return static_cast<i64>(bits() % static_cast<u64>(bound)); }
  template <class T>
  T pick(std::initializer_list<T> choices) {
    return choices.begin()[below(static_cast<i64>(choices.size()))];
  }
  // `count` of the numbers below `bound`, no two the same.
  std::vector<i64> distinct(i64 count, i64 bound);

 private:
  u64 state_;
};

// Where a buffer begins behind a boundary of 128 bytes, and the bytes from row to row.
struct Placement {
  i64 offset;
  i64 stride_bytes;
};

// Rows of bytes. The padding between rows is poisoned as far as ASan's granularity of 8 bytes goes,
// and compared in any case.
class RowBuffer {
 public:
  RowBuffer(const char* name, i64 num_rows, i64 row_bytes, Placement at, Random& random);

  i64 num_rows() const { return num_rows_; }
  i64 row_bytes() const { return row_bytes_; }
  i64 stride_bytes() const { return stride_bytes_; }
  char* row(i64 i) { return memory_.get() + offset_ + i * stride_bytes_; }
  // What row i should hold in the end; the same as now unless changed through this.
  char* expected(i64 i) { return image_.data() + offset_ + i * stride_bytes_; }
  // Compares every byte, padding included, with what is expected.
  void check();

 private:
  const char* name_;
  i64 num_rows_, row_bytes_, stride_bytes_, offset_, bytes_;
  Memory memory_;
  std::vector<char> image_;
};

// A contiguous array of int32 or int64, aligned to one element and no more.
class IntBuffer {
 public:
  IntBuffer(const char* name, const std::vector<i64>& values, int int_bytes);
  // `count` times the same value.
  IntBuffer(const char* name, i64 count, i64 value, int int_bytes)
      : IntBuffer(name, std::vector<i64>(count, value), int_bytes) {}

  void* data() const { return memory_.get() + int_bytes_; }
  u32* words() const { return static_cast<u32*>(data()); }
  i64 at(i64 i) const;
  void store(i64 i, i64 value);  // atomically
  i64 size() const { return static_cast<i64>(values_.size()); }
  // The kernel may put `value` at element i; of several expected values any one will do.
  void expect(i64 i, i64 value) { expected_.emplace(i, value); }
  // Fails unless every element holds what it was made with or, if that was said, is expected.
  void check();

 private:
  const char* name_;
  std::vector<i64> values_;
  std::multimap<i64, i64> expected_;
  int int_bytes_;
  Memory memory_;
};

// With `has_race`, a thread that writes indices until it is destroyed: good ones and -1, then ones
// out of range. Element i is below bounds[i % bounds.size()].
class Rewriter {
 public:
  Rewriter(IntBuffer& buffer, std::vector<i64> bounds);
  ~Rewriter();

 private:
  std::atomic<bool> stop_{false};
  std::thread thread_;
};

// Words that a kernel reads four at a time: exactly as many as it may read, aligned for that.
class AlignedWords {
 public:
  AlignedWords(i64 count, u32 value) : vectors_(count / 4, {value, value, value, value}) {}
  u32* data() { return &vectors_.data()->x; }

 private:
  std::vector<uint4> vectors_;
};

// The fault word, and the faults any of which may have been the first to get there.
class FaultWord {
 public:
  // `state`: 0, or 1 or 2 for a word that is taken and must not change.
  explicit FaultWord(u32 state);

  FaultRecord* record() { return record_.get(); }
  void expect(FaultSite site, i64 position, i64 value, i64 bound);
  void check() const;

 private:
  std::unique_ptr<FaultRecord> record_;
  FaultRecord before_;
  std::vector<FaultRecord> expected_;
};

}  // namespace emulate
