#include "sweep.h"

#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>

#include <limits>
#include <numeric>

namespace emulate {

std::string now_running;

void fail(const std::string& what) {
  std::fprintf(stderr, "FAILED: %s: %s\n", now_running.c_str(), what.c_str());
  std::_Exit(1);  // may be in a fiber, where exit would wait for ever
}

void install_reports() {
  __sanitizer_set_death_callback(
      [] { std::fprintf(stderr, "FAILED: %s: sanitizer\n", now_running.c_str()); });
}

Memory allocate(size_t align, size_t bytes) {
  void* memory = nullptr;
  if (posix_memalign(&memory, align, bytes) != 0) fail("out of memory");
  return Memory(static_cast<char*>(memory));
}

std::vector<i64> Random::distinct(i64 count, i64 bound) {
  std::vector<i64> numbers(bound);
  std::iota(numbers.begin(), numbers.end(), i64(0));
  for (i64 i = 0; i < count; ++i) std::swap(numbers[i], numbers[i + below(bound - i)]);
  numbers.resize(count);
  return numbers;
}

RowBuffer::RowBuffer(const char* name, i64 num_rows, i64 row_bytes, Placement at, Random& random)
    : name_(name),
      num_rows_(num_rows),
      row_bytes_(row_bytes),
      stride_bytes_(at.stride_bytes),
      offset_(at.offset),
      bytes_(offset_ + (num_rows - 1) * stride_bytes_ + row_bytes),
      memory_(allocate(128, bytes_)),
      image_(bytes_) {
  for (i64 i = 0; i < bytes_; i += 8) {
    const u64 word = random.bits() * 0x9e3779b97f4a7c15u;
    std::memcpy(image_.data() + i, &word, std::min(i64(8), bytes_ - i));
  }
  std::memcpy(memory_.get(), image_.data(), bytes_);
  if (offset_ == 0 && stride_bytes_ == row_bytes) return;
  ASAN_POISON_MEMORY_REGION(memory_.get(), bytes_);
  for (i64 i = 0; i < num_rows; ++i) ASAN_UNPOISON_MEMORY_REGION(row(i), row_bytes);
}

void RowBuffer::check() {
  ASAN_UNPOISON_MEMORY_REGION(memory_.get(), bytes_);
  for (i64 i = 0; has_race && i < num_rows_; ++i) std::memcpy(expected(i), row(i), row_bytes_);
  if (std::memcmp(memory_.get(), image_.data(), bytes_) == 0) return;
  i64 at = 0;
  while (memory_[at] == image_[at]) ++at;
  const i64 row = at < offset_ || stride_bytes_ == 0 ? 0 : (at - offset_) / stride_bytes_;
  const i64 byte = at - offset_ - row * stride_bytes_;
  const bool inside = byte >= 0 && byte < row_bytes_;
  fail(std::string(name_) + ": row " + std::to_string(row) + ", byte " + std::to_string(byte) +
       (inside ? "" : ", which is padding,") + " is " + std::to_string(memory_[at] & 0xff) +
       ", expected " + std::to_string(image_[at] & 0xff));
}

IntBuffer::IntBuffer(const char* name, const std::vector<i64>& values, int int_bytes)
    : name_(name),
      values_(values),
      int_bytes_(int_bytes),
      memory_(allocate(16, (values.size() + 1) * int_bytes)) {
  std::memset(memory_.get(), 0x7f, int_bytes);
  for (size_t i = 0; i < values.size(); ++i) {
    const i32 narrow = static_cast<i32>(values[i]);
    const void* from = int_bytes == 4 ? static_cast<const void*>(&narrow) : &values[i];
    std::memcpy(&memory_[(i + 1) * int_bytes], from, int_bytes);
    values_[i] = at(static_cast<i64>(i));
  }
  if (int_bytes == 8) ASAN_POISON_MEMORY_REGION(memory_.get(), 8);
}

i64 IntBuffer::at(i64 i) const {
  const char* from = &memory_[(i + 1) * int_bytes_];
  return int_bytes_ == 4 ? *reinterpret_cast<const i32*>(from)
                         : *reinterpret_cast<const i64*>(from);
}

void IntBuffer::store(i64 i, i64 value) {
  char* to = &memory_[(i + 1) * int_bytes_];
  if (int_bytes_ == 4) {
    __atomic_store_n(reinterpret_cast<i32*>(to), static_cast<i32>(value), __ATOMIC_RELAXED);
  } else {
    __atomic_store_n(reinterpret_cast<i64*>(to), value, __ATOMIC_RELAXED);
  }
}

void IntBuffer::check() {
  if (has_race) return;
  for (i64 i = 0; i < size(); ++i) {
    const auto [first, last] = expected_.equal_range(i);
    const i64 wanted = first == last ? values_[i] : first->second;
    const auto is_right = [&](const auto& item) { return item.second == at(i); };
    if (first == last ? at(i) == wanted : std::any_of(first, last, is_right)) continue;
    fail(std::string(name_) + ": element " + std::to_string(i) + " is " + std::to_string(at(i)) +
         ", expected " + std::to_string(wanted));
  }
}

Rewriter::Rewriter(IntBuffer& buffer, std::vector<i64> bounds) {
  if (!has_race) return;
  thread_ = std::thread([this, &buffer, bounds = std::move(bounds)] {
    for (i64 round = 0; !stop_; ++round) {
      for (i64 i = 0; i < buffer.size(); ++i) {
        const i64 bound = bounds[i % bounds.size()];
        const i64 good = (round + i) % (bound + 1) - 1;
        const i64 bad = (round / 2 + i) % 3 == 0 ? bound : std::numeric_limits<i32>::max();
        buffer.store(i, round % 2 == 0 ? good : bad);
      }
    }
  });
}

Rewriter::~Rewriter() {
  stop_ = true;
  if (thread_.joinable()) thread_.join();
}

FaultWord::FaultWord(u32 state) : record_(new FaultRecord), before_{state, FaultSite{}, 0, 0, 0} {
  if (state != 0) before_ = {state, FaultSite(77), -1, -2, -3};
  *record_ = before_;
}

void FaultWord::expect(FaultSite site, i64 position, i64 value, i64 bound) {
  expected_.push_back({2, site, position, value, bound});
}

void FaultWord::check() const {
  if (has_race) return;
  const auto same = [this](const FaultRecord& other) {
    return record_->state == other.state && record_->site == other.site &&
           record_->position == other.position && record_->value == other.value &&
           record_->bound == other.bound;
  };
  const bool changes = before_.state == 0 && !expected_.empty();
  if (changes ? std::any_of(expected_.begin(), expected_.end(), same) : same(before_)) return;
  fail("fault word: state " + std::to_string(record_->state) + ", site " +
       std::to_string(static_cast<u32>(record_->site)) + ", position " +
       std::to_string(record_->position) + ", value " + std::to_string(record_->value) +
       ", bound " + std::to_string(record_->bound) + "; expected " +
       (changes ? "one of " + std::to_string(expected_.size()) + " faults, the first at position " +
                      std::to_string(expected_[0].position)
                : "no change"));
}

Placement any_placement(i64 row_bytes, int vec_bytes, Random& random) {
  const i64 pads[] = {0, 0, vec_bytes, 2 * vec_bytes, 3 * vec_bytes, 16, 48, 128, row_bytes};
  const i64 pad = pads[random.below(std::size(pads))];
  return {random.below(128 / vec_bytes) * vec_bytes, row_bytes + pad};
}

CacheLayout CacheLayout::any(i64 num_slots, bool is_paged, i64 num_heads, i64 num_caches,
                             Random& random) {
  CacheLayout layout;
  layout.page = is_paged ? random.pick({1, 2, 3, 5, 16}) : std::max<i64>(num_slots, 1);
  layout.num_blocks = (num_slots + layout.page - 1) / layout.page;
  layout.num_heads = num_heads;
  layout.num_caches = num_caches;
  const std::pair<i64*, i64> dims[] = {{&layout.block_step, layout.num_blocks},
                                       {&layout.slot_step, layout.page},
                                       {&layout.head_step, num_heads},
                                       {&layout.cache_step, num_caches}};
  i64 step = 1;
  for (const i64 dim : random.distinct(4, 4)) {
    *dims[dim].first = step;
    step *= dims[dim].second;
  }
  return layout;
}

void spoil(std::vector<i64>& values, i64 bound, int index_bytes, Random& random) {
  const i64 lowest =
      index_bytes == 4 ? std::numeric_limits<i32>::min() : std::numeric_limits<i64>::min();
  const i64 highest = -(lowest + 1);
  const auto padding = [&] { return random.pick({i64(-1), i64(-2), lowest}); };
  const auto too_large = [&] { return random.pick({bound, bound, bound + 1, highest}); };
  const i64 kind = random.below(6);
  for (i64& value : values) {
    const i64 dice = random.below(3);
    if (kind == 1 && dice == 0) value = padding();
    if (kind == 2 && dice == 0) value = too_large();
    if (kind == 3 && dice != 0) value = dice == 1 ? padding() : too_large();
    if (kind == 4) value = padding();
  }
  if (kind == 5) values[random.below(static_cast<i64>(values.size()))] = too_large();
}

std::vector<i64> any_pairs(i64 count, i64 src_rows, i64 dst_rows, int index_bytes, Random& random,
                           bool repeats) {
  std::vector<i64> sources(count);
  for (i64& source : sources) source = random.below(src_rows);
  if (!repeats) sources = random.distinct(count, src_rows);
  std::vector<i64> targets = random.distinct(count, dst_rows);
  if (random.below(2) == 0) spoil(sources, src_rows, index_bytes, random);
  if (random.below(2) == 0) spoil(targets, dst_rows, index_bytes, random);
  std::vector<i64> flat;
  for (i64 i = 0; i < count; ++i) flat.insert(flat.end(), {sources[i], targets[i]});
  return flat;
}

i64 any_num_rows(const GroupShape& shape, i64 threads_per_block, Random& random) {
  const i64 full = std::max(i64(1), threads_per_block / (shape.lanes * shape.splits) * shape.rows);
  return random.pick({i64(1), i64(2), full, full - (full > 1), full + 1, full * 5 / 2 + 1});
}

Order any_order(Random& random) {
  return random.pick({Order::kForward, Order::kReverse, Order::kShuffled});
}

}  // namespace emulate
