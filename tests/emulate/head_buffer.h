// Rows [token, head] of any strides in exactly the bytes that they take. Only rows that are opened
// may be read or written while a kernel runs, and afterwards every byte is compared.
#pragma once

#include <sanitizer/asan_interface.h>

#include "buffers.h"

namespace emulate {

struct HeadLayout {
  i64 tokens, heads, row_bytes;
  i64 token_stride, head_stride;  // in bytes
  i64 offset;                     // behind a boundary of 128 bytes
};

// Any that vectors of `align` bytes allow; where it expands, rows may share bytes.
inline HeadLayout any_layout(i64 tokens, i64 heads, i64 row_bytes, i64 align, bool expands,
                             Random& random) {
  const auto pad = [&] { return align * random.pick({0, 0, 0, 1, 2, 3, 8}); };
  HeadLayout at{tokens, heads, row_bytes, 0, 0, align * random.below(128 / align)};
  if (random.below(3) != 0) {
    at.head_stride = row_bytes + pad();
    at.token_stride = heads * at.head_stride + pad();
  } else {
    at.token_stride = row_bytes + pad();
    at.head_stride = tokens * at.token_stride + pad();
  }
  if (expands && random.below(6) == 0) at.token_stride = 0;
  if (expands && random.below(6) == 0) at.head_stride = 0;
  return at;
}

// Equally spaced rows of all tokens and heads.
inline HeadLayout plain_layout(i64 tokens, i64 heads, i64 row_bytes, i64 align, bool expands,
                               Random& random) {
  HeadLayout at = any_layout(tokens * heads, 1, row_bytes, align, expands, random);
  at.head_stride = at.token_stride;
  at.token_stride *= heads;
  at.tokens = tokens;
  at.heads = heads;
  return at;
}

class HeadBuffer {
 public:
  HeadBuffer(std::string name, const HeadLayout& layout, Random& random)
      : layout(layout), name_(std::move(name)) {
    const i64 last = std::max<i64>(layout.tokens - 1, 0) * layout.token_stride +
                     (layout.heads - 1) * layout.head_stride;
    before_.resize(layout.offset + last + (layout.tokens > 0 ? layout.row_bytes : 0));
    for (size_t i = 0; i < before_.size(); i += 8) {
      const u64 word = random.bits() * 0x9e3779b97f4a7c15u;
      std::memcpy(&before_[i], &word, std::min<size_t>(8, before_.size() - i));
    }
    memory_ = allocate(128, before_.size());
  }

  // What a row holds before the kernel runs.
  char* before(i64 token, i64 head) { return before_.data() + offset_of(token, head); }
  const char* memory(i64 token, i64 head) const { return &memory_[offset_of(token, head)]; }
  char* row_0() { return &memory_[layout.offset]; }

  void open(i64 token, i64 head) { opened_.push_back(offset_of(token, head)); }
  bool is_shut() const { return opened_.empty(); }
  // To be called before each launch.
  void begin() {
    std::copy(before_.begin(), before_.end(), memory_.get());
    ASAN_POISON_MEMORY_REGION(memory_.get(), before_.size());
    for (const i64 at : opened_) ASAN_UNPOISON_MEMORY_REGION(&memory_[at], layout.row_bytes);
  }
  // And these behind it. The row that it wrote, if that is right, is what others have to write.
  void end() {
    ASAN_UNPOISON_MEMORY_REGION(memory_.get(), before_.size());
    if (after_.empty()) after_ = before_;
  }
  void accept(i64 token, i64 head) {
    std::memcpy(&after_[offset_of(token, head)], memory(token, head), layout.row_bytes);
  }
  void check() const {
    const auto differ = std::mismatch(after_.begin(), after_.end(), memory_.get());
    if (differ.first == after_.end()) return;
    const i64 at = differ.first - after_.begin();
    fail(name_ + ": byte " + std::to_string(at - layout.offset) + " behind its start is " +
         std::to_string(memory_[at] & 0xff) + ", expected " + std::to_string(after_[at] & 0xff));
  }

  const HeadLayout layout;

 private:
  i64 offset_of(i64 token, i64 head) const {
    return layout.offset + token * layout.token_stride + head * layout.head_stride;
  }

  std::string name_;
  std::vector<char> before_, after_;
  std::vector<i64> opened_;
  Memory memory_;
};

}  // namespace emulate
