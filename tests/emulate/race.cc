// The kernels while another thread rewrites their indices: whichever they come to read, they touch
// nothing but rows. What those hold afterwards is anyone's guess.
#include <atomic>
#include <thread>

#include "lists.h"
#include "ops/index.cu"
#include "ops/sort.cuh"
#include "ops/store.cu"

namespace emulate {

constexpr int kRuns = 300;
constexpr i64 kRows = 64;  // rows of every table, and pairs
constexpr i64 kRowBytes = 24;
constexpr int kVecBytes = 8;
constexpr i64 kStrideBytes = kRowBytes + 16;

// Writes row numbers and -1 into its buffers, then what is out of range, until it is destroyed.
template <class Int>
class Rewriter {
 public:
  explicit Rewriter(std::vector<IntBuffer*> buffers)
      : buffers_(std::move(buffers)), thread_([this] {
          for (i64 round = 0; !stop_.load(std::memory_order_relaxed); ++round) {
            for (IntBuffer* buffer : buffers_) rewrite(*buffer, round);
          }
        }) {}
  ~Rewriter() {
    stop_ = true;
    thread_.join();
  }

 private:
  static void rewrite(IntBuffer& buffer, i64 round) {
    constexpr i64 kFar = sizeof(Int) == 4 ? (i64(1) << 31) - 1 : i64(1) << 40;
    for (i64 i = 0; i < buffer.size(); ++i) {
      const i64 good = (round + i) % (kRows + 1) - 1;
      const i64 bad = (round / 2 + i) % 3 == 0 ? kRows : kFar;
      __atomic_store_n(static_cast<Int*>(buffer.data()) + i,
                       static_cast<Int>(round % 2 == 0 ? good : bad), __ATOMIC_RELAXED);
    }
  }

  std::vector<IntBuffer*> buffers_;
  std::atomic<bool> stop_{false};
  std::thread thread_;
};

// A table of which only the bytes between the rows have to stay as they are.
struct Table : RowBuffer {
  Table(const char* name, Random& random)
      : RowBuffer(name, kRows, kRowBytes, kStrideBytes, 0, random) {}
  void check_padding() {
    for (i64 i = 0; i < kRows; ++i) std::memcpy(expected(i), row(i), kRowBytes);
    check();
  }
};

// Launches `grid_y` tables on as many threads as the host would start for rows shared out in
// `shape`.
template <class Kernel>
void run(const GroupShape& shape, typename Kernel::Params params, Random& random,
         unsigned grid_y = 1) {
  FaultWord fault(0);
  params.fault = fault.record();
  const unsigned blocks = ceil_div(shape.num_threads(kRows), Kernel::kNumThreads);
  run_kernel<typename Kernel::Params>(
      {kRowBytes, kVecBytes, 0, 0, Kernel::kNumThreads, Kernel::run}, {blocks, grid_y},
      Kernel::kNumThreads, random, params);
}

template <class Int>
void store_and_index(IntBuffer& indices, Random& random) {
  using Store = StoreKernel<kRowBytes, STORE_CONFIG, kVecBytes, sizeof(Int), STORE_IN_FLIGHT>;
  using Index = IndexKernel<kRowBytes, 1, INDEX_CONFIG, kVecBytes, sizeof(Int), INDEX_IN_FLIGHT>;
  Table a("a", random), b("b", random), c("c", random), d("d", random);
  run<Store>(group_shape(kRowBytes, kVecBytes, STORE_IN_FLIGHT),
             {{{a.row(0), c.row(0), kStrideBytes, kStrideBytes},
               {b.row(0), d.row(0), kStrideBytes, kStrideBytes}},
              indices.data(),
              kRows,
              kRows,
              0,
              FaultSite(1),
              nullptr},
             random, 2);
  run<Index>(group_shape(kRowBytes, kVecBytes, INDEX_IN_FLIGHT),
             {c.row(0), a.row(0), kStrideBytes, kStrideBytes, indices.data(), kRows, 0, kRows - 9,
              kRows - 9, 9, kRows - 9, kRows - 1, FaultSite(1), nullptr},
             random);
  for (Table* table : {&a, &b, &c, &d}) table->check_padding();
}

// A small call, which also writes the slot map; then the lists of a large one.
template <class Int>
void gather(IntBuffer& pairs, Random& random) {
  using Small = H2DGather<kRowBytes, kSmallConfig.num_threads, 1, kVecBytes, sizeof(Int), false,
                          false, PAIRS_SMALL_IN_FLIGHT>;
  using List = ListPairs<sizeof(Int), kListConfig.num_threads, 1, kHostSource>;
  using Place = PlacePairs<sizeof(Int), kListConfig.num_threads, 1, kHostSource>;

  Table src("src", random), dst("dst", random);
  IntBuffer written_map("written_map", kRows, -1, sizeof(Int));
  FaultWord fault(0);
  PairCopyParams params = pair_params(dst, src, pairs, fault);
  params.slot_map = written_map.data();
  params.slot_map_bytes = sizeof(Int);
  const i64 window = window_bytes(kRowBytes, kVecBytes, false);
  run<Small>(group_shape(window, kVecBytes, PAIRS_SMALL_IN_FLIGHT), params, random);

  const std::vector<i64> none(2 * kRows, -1);
  IntBuffer table("table", none, 4), last_entries("last_entries", {-1, -1, -1}, 4);
  IntBuffer fetches("fetches", none, sizeof(Int)), copies("copies", none, sizeof(Int));
  ListParams list{params};
  list.table = table.words();
  list.table_mask = static_cast<u32>(table.size() - 1);
  list.last_entries = last_entries.words();
  list.fetches = fetches.data();
  list.copies = copies.data();
  IntBuffer ranks("ranks", kRows, -1, 4);
  RegionBuffers regions(kRows * kStrideBytes, random);
  list.regions = regions.regions(list.last_entries);
  if (random.below(2) == 0) list.ranks = ranks.words();
  launch_fibers({1}, {List::kNumThreads}, any_order(random), [&] { List::run(list); });
  if (list.ranks != nullptr) {
    scan(list.regions, random);
    launch_fibers({1}, {Place::kNumThreads}, any_order(random), [&] { Place::run(list); });
  }
  src.check_padding();
  dst.check_padding();
}

template <class Int>
void all_runs() {
  IntBuffer indices("indices", std::vector<i64>(2 * kRows), sizeof(Int));
  const Rewriter<Int> rewriter({&indices});
  rounds("race: indices of " + std::to_string(sizeof(Int)), kRuns, [&](Random& random, int) {
    store_and_index<Int>(indices, random);
    gather<Int>(indices, random);
  });
}

}  // namespace emulate

int main() {
  using namespace emulate;
  all_runs<i32>();
  all_runs<i64>();
}
