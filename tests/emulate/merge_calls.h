// Random launches of the merge kernel, and their expected results.
#pragma once

#include <memory>

#include "head_buffer.h"
#include "merge_reference.h"

namespace emulate {

constexpr i64 kMostRows = (i64(1) << 31) - 1;

struct MergeKernel {
  int dim, elems, in_type, out_type, capacity;
  bool plain;   // all partials are present, with equally spaced rows and the same layout
  int threads;  // in a large block
  int rows;     // in a small block
  int times;    // small blocks in a large one
  void (*launch)(const MergeParams<kMostStates>& params, unsigned blocks, unsigned threads,
                 Order order);

  std::string name() const {
    std::string name = "merge:";
    for (const int number : {dim, elems, in_type, out_type, capacity, int(plain)}) {
      name += " " + std::to_string(number);
    }
    return name;
  }
};

class MergeRun {
 public:
  MergeRun(const MergeKernel& kernel, Random& random) : kernel_(kernel) {
    choose_sizes(random);
    choose_partials(random);
    choose_targets(random);
    fill(random);
    open();
  }
  const MergeParams<kMostStates>& params() const { return params_; }
  i64 num_rows() const { return tokens_ * heads_; }
  unsigned num_threads() const { return kernel_.threads / kernel_.times * times_; }

  void begin() {
    for (HeadBuffer* buffer : all()) buffer->begin();
  }
  // The first launch is compared with what is right, the others with the first.
  void end() {
    for (HeadBuffer* buffer : all()) buffer->end();
    for (i64 token = 0; is_first_ && token < tokens_; ++token) {
      for (i64 head = 0; head < heads_; ++head) expect_row(token, head);
    }
    is_first_ = false;
    for (const HeadBuffer* buffer : all()) buffer->check();
  }

 private:
  // What the partials' lse are: any number; one of each row, and -inf or +inf; all of them those;
  // or any of these and NaN.
  enum Logs { kAny, kAlone, kEmpty, kMixed };

  void choose_sizes(Random& random) {
    heads_ = random.pick({i64(1), i64(2), i64(3), i64(7), 1 + random.below(40)});
    if (kernel_.dim * kernel_.capacity > 4096) heads_ = 1 + random.below(3);
    times_ = random.pick({1, kernel_.times});
    const i64 rows = kernel_.rows * times_;
    tokens_ = random.pick({i64(1), rows - 1, rows, rows + 1, rows * 5 / 2 + 1});
    tokens_ = (tokens_ + heads_ - 1) / heads_;
    tokens_of_first_ =
        random.pick({kMostRows, kMostRows, i64(0), random.below(tokens_ + 1), tokens_});
    const i64 most = kernel_.capacity;
    num_states_ = random.pick({most, most, most - 1, most / 2 + 1, 1 + random.below(most)});
    if (kernel_.plain) num_states_ = std::max<i64>(num_states_, 2);
    if (kernel_.plain || most != 2 || num_states_ != 2) tokens_of_first_ = kMostRows;
    MergeTarget& to = params_.to;
    to.tokens_of_first = static_cast<u32>(tokens_of_first_);
    to.num_rows = static_cast<u32>(num_rows());
    to.rows_of_block = static_cast<u32>(rows);
    to.num_states = static_cast<i32>(num_states_);
    to.heads = Divisor::of(static_cast<u32>(heads_));
    log2_of_base_ = random.below(2) == 0 ? 1 : std::log2(std::exp(1.0));
    to.log2_of_base = static_cast<float>(log2_of_base_);
    to.base_log_of_2 = static_cast<float>(1 / log2_of_base_);
  }

  void choose_partials(Random& random) {
    const i64 in_item = item_bytes_of(kernel_.in_type);
    const bool in_place = kernel_.in_type == kernel_.out_type && random.below(3) == 0;
    const i64 out_at = in_place ? random.below(num_states_) : -1;
    const i64 lse_at = random.below(3) == 0 ? random.below(num_states_) : -1;
    // Plain kernels: all partials are laid out as the first. No rows share bytes if one is written.
    HeadLayout out, lse;
    for (i64 s = 0; s < num_states_; ++s) {
      const std::string number = std::to_string(s);
      const bool new_one = s == 0 || !kernel_.plain;
      const auto expands = [&](i64 at) { return kernel_.plain ? at < 0 : s != at; };
      if (new_one)
        out = layout(kernel_.dim * in_item, kernel_.elems * in_item, expands(out_at), random);
      if (new_one) lse = layout(4, 4, expands(lse_at), random);
      outs_.push_back(std::make_unique<HeadBuffer>("out " + number, out, random));
      lses_.push_back(std::make_unique<HeadBuffer>("lse " + number, lse, random));
    }
    if (out_at >= 0) out_ = outs_[out_at].get();
    if (lse_at >= 0) lse_ = lses_[lse_at].get();
    params_.to.lse_is_in_place = lse_at >= 0;
  }

  HeadLayout layout(i64 row_bytes, i64 align, bool expands, Random& random) const {
    const auto any = kernel_.plain ? plain_layout : any_layout;
    return any(tokens_, heads_, row_bytes, align, expands, random);
  }

  void choose_targets(Random& random) {
    MergeTarget& to = params_.to;
    const i64 item = item_bytes_of(kernel_.out_type);
    if (out_ == nullptr) {
      const i64 vec_bytes = std::min<i64>(16, kernel_.elems * item);
      own_out_ = std::make_unique<HeadBuffer>(
          "out", layout(kernel_.dim * item, vec_bytes, false, random), random);
      out_ = own_out_.get();
    }
    if (lse_ == nullptr && random.below(4) != 0) {
      own_lse_ = std::make_unique<HeadBuffer>("lse", layout(4, 4, false, random), random);
      lse_ = own_lse_.get();
    }
    if (kernel_.out_type != kFloat8E4M3) return;
    scale_ = random.pick({1.0f, 0.5f, 16.0f, 0.0371f, 3.3f});
    scale_there_ = std::make_unique<float>(scale_);
    to.scale = scale_there_.get();
  }

  void fill(Random& random) {
    logs_ = random.pick({kAny, kAny, kAlone, kEmpty, kMixed, kMixed});
    const int alone = static_cast<int>(random.below(num_states_));
    for (i64 s = 0; s < num_states_; ++s) {
      for (i64 token = 0; token < tokens_; ++token) {
        for (i64 head = 0; head < heads_; ++head) {
          const double log = any_log((alone + token + head) % num_states_ == s, random);
          store_number(lses_[s]->before(token, head), kFloat32, log);
          fill_row(outs_[s]->before(token, head), std::isinf(log), random);
        }
      }
    }
  }

  double any_log(bool is_alone, Random& random) const {
    const double any = static_cast<double>(random.below(40'000)) / 1000 - 20;
    const double none = random.pick({-kInfinity, kInfinity});
    if (logs_ == kAny) return any;
    if (logs_ == kAlone) return is_alone ? random.pick({any, -0.0}) : none;
    if (logs_ == kEmpty) return none;
    // 3000 is farther from the others than float has exponents.
    return random.pick(
        {any, any, none, -3000.0, 3000.0, random.below(9) == 0 ? std::nan("") : any});
  }

  // Rows of empty partials hold NaN.
  void fill_row(char* row, bool is_empty, Random& random) const {
    const int type = kernel_.in_type;
    for (int d = 0; d < kernel_.dim; ++d) {
      const u64 dice = random.bits();
      double value =
          std::ldexp(1 + double(dice >> 8 & 0x7fff) / (1 << 16), static_cast<int>(dice % 9) - 4);
      if (is_empty) value = std::nan("");
      if (random.below(10) == 0 && !is_empty) value = 0;
      store_number(row + d * item_bytes_of(type), type, dice & 0x80 ? -value : value);
    }
  }

  // What may be read, and what has to be written. Of a partial that nobody reads there is nothing.
  void open() {
    for (i64 token = 0; token < tokens_; ++token) {
      for (i64 head = 0; head < heads_; ++head) {
        for (i64 s = first_of(token); s < num_states_; ++s) {
          outs_[s]->open(token, head);
          lses_[s]->open(token, head);
        }
        out_->open(token, head);
        if (lse_ != nullptr) lse_->open(token, head);
      }
    }
    for (i64 s = 0; s < num_states_; ++s) {
      const HeadLayout &out = outs_[s]->layout, &lse = lses_[s]->layout;
      params_.states[s] = {outs_[s]->is_shut() ? nullptr : outs_[s]->row_0(),
                           lses_[s]->is_shut() ? nullptr : lses_[s]->row_0(),
                           out.token_stride,
                           out.head_stride,
                           lse.token_stride,
                           lse.head_stride};
      if (kernel_.plain) forget_strides(s);
    }
    MergeTarget& to = params_.to;
    to.out = out_->row_0();
    to.out_strides.token = out_->layout.token_stride;
    to.out_strides.head = out_->layout.head_stride;
    if (lse_ == nullptr) return;
    to.lse = lse_->row_0();
    to.lse_strides.token = lse_->layout.token_stride;
    to.lse_strides.head = lse_->layout.head_stride;
  }

  // A plain kernel knows how far rows are apart by the stride of heads, of the first partial.
  void forget_strides(i64 s) {
    PartialState& state = params_.states[s];
    constexpr i64 kNone = i64(1) << 40;
    state.out_strides.token = state.lse_strides.token = kNone;
    if (s > 0) state.out_strides.head = state.lse_strides.head = kNone;
  }

  i64 first_of(i64 token) const { return token < tokens_of_first_ ? 0 : 1; }

  void expect_row(i64 token, i64 head) {
    std::vector<double> logs(num_states_, -kInfinity), values(num_states_);
    for (i64 s = first_of(token); s < num_states_; ++s) {
      logs[s] = load_number(lses_[s]->before(token, head), kFloat32);
    }
    const bool is_copy = token >= tokens_of_first_;
    const Weights weights = is_copy ? Weights::of_copy(logs[1]) : Weights(logs, log2_of_base_);
    const int in_item = item_bytes_of(kernel_.in_type);
    const int out_item = item_bytes_of(kernel_.out_type);
    // The product with the inverse of a power of two is exact, of other scales it is not.
    const bool is_exact = std::exp2(std::ilogb(scale_)) == scale_;
    for (int d = 0; d < kernel_.dim; ++d) {
      for (i64 s = 0; s < num_states_; ++s) {
        if (weights.of[s] == 0) continue;
        values[s] = load_number(outs_[s]->before(token, head) + d * in_item, kernel_.in_type);
      }
      const char* const at = out_->memory(token, head) + d * out_item;
      const Mean mean = mean_of(weights, values);
      const double value = mean.value / scale_;
      double slack = mean.slack / scale_;
      if (!is_exact && std::isfinite(value)) slack += 1e-6 * std::fabs(value);
      expect_number("a value", at, kernel_.out_type, value, slack);
    }
    out_->accept(token, head);
    if (lse_ == nullptr) return;
    const double slack = weights.num <= 1 ? 0 : 3 * kSlack + 1e-6 * std::fabs(weights.log);
    expect_number("an lse", lse_->memory(token, head), kFloat32, weights.log, slack);
    lse_->accept(token, head);
  }

  std::vector<HeadBuffer*> all() {
    std::vector<HeadBuffer*> found;
    for (const auto& buffers : {&outs_, &lses_}) {
      for (const auto& buffer : *buffers) found.push_back(buffer.get());
    }
    if (own_out_) found.push_back(own_out_.get());
    if (own_lse_) found.push_back(own_lse_.get());
    return found;
  }

  const MergeKernel& kernel_;
  MergeParams<kMostStates> params_{};
  i64 tokens_ = 0, heads_ = 1, tokens_of_first_ = 0, num_states_ = 1;
  int times_ = 1;
  Logs logs_ = kAny;
  double log2_of_base_ = 1;
  float scale_ = 1;
  std::unique_ptr<float> scale_there_;
  std::vector<std::unique_ptr<HeadBuffer>> outs_, lses_;
  std::unique_ptr<HeadBuffer> own_out_, own_lse_;  // where not in place
  HeadBuffer* out_ = nullptr;
  HeadBuffer* lse_ = nullptr;  // null: not asked for
  bool is_first_ = true;
};

}  // namespace emulate
