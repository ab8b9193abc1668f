// Calls of h2d_gather and d2h_scatter with pairs on the host, and what has to come of them.
#pragma once

#include <tvm/ffi/error.h>

#include <string>
#include <vector>

#include "fake_gpu.h"

namespace calls {

using fake::CUstream;
using jitkern::i64;

// Under ThreadSanitizer, which needs no more of a kind than one.
#if defined(__SANITIZE_THREAD__)
constexpr bool kIsSlow = true;
#else
constexpr bool kIsSlow = false;
#endif

// Ends the program, naming the case, unless it is so.
void require(bool so, const std::string& what);
extern std::string running_case;

// Has the module find the fake GPU's kernels and memory. To be called once.
void set_up();
// The stream that this thread's calls on its device go to.
void use_stream(CUstream stream);

// Bytes between guards, which are looked at when it goes.
class Memory {
 public:
  enum Kind { kPageable, kPinned, kDevice };
  Memory(i64 bytes, Kind kind, int device = 0);
  ~Memory();
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;

  char* data() const { return data_; }
  i64 bytes() const { return bytes_; }

 private:
  char* base_;
  char* data_;
  i64 bytes_;
  Kind kind_;
};

struct Shape {
  bool is_gather = true;
  i64 row_bytes = 656;
  i64 num_pairs = 1000;
  int index_bytes = 8;
  int slot_bytes = 0;  // of an entry of the slot map; 0: there is none
  bool is_pinned = false;
  i64 gap_bytes = 0;  // between rows
  int device = 0;
};

// Tables, pairs of random rows with padding between them, and what is in them after a copy.
class Tables {
 public:
  Tables(const Shape& shape, CUstream stream);
  // Behind all that is queued on the stream.
  ~Tables();

  // The call; `num_threads` 0: not given. What it throws is a tvm::ffi::Error.
  void run(const std::string& method, int num_threads = 0);
  // The same; the kind of the error and its text, "": none.
  std::string try_run(const std::string& method, int num_threads = 0);

  // Waits for the call's stream, no other; all has to be as expected.
  void check(const std::string& what);
  // Without waiting: a scatter by the CPU is over.
  void check_now(const std::string& what);
  // Nothing was written.
  void check_untouched(const std::string& what);
  // Each row of the target is as it was, or a row of the source.
  void check_rows(const std::string& what);

  i64 pair_item(i64 i) const;
  void set_pair_item(i64 i, i64 value);  // atomic, as another thread's
  // Of a pair that the call has not come to: its row stays as it is.
  void spoil_pair(i64 i, i64 src_row, i64 dst_row);
  // Now the device's table is something else; once the stream comes to it, it is as it was.
  void fill_late();
  void scribble_pairs();
  void scribble_source();

  const Shape shape;
  const CUstream stream;
  const i64 num_src_rows;
  const i64 num_dst_rows;

 private:
  void fill(Memory& table, i64 num_rows, i64 seed);
  char* row_of(char* table, i64 row) const { return table + row * stride_; }

  const i64 stride_;
  Memory* src_;
  Memory* dst_;
  Memory* slots_;
  Memory pairs_;
  std::vector<char> before_;
  std::vector<char> expected_;
  std::vector<char> expected_slots_;
};

// A case is a function by its name.
struct Case {
  const char* name;
  void (*run)();
};
extern const std::vector<Case> kCallCases;
extern const std::vector<Case> kTroubleCases;

}  // namespace calls
