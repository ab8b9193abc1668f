// A producer and a consumer of one ring as fast as they can, by what both/ring.h offers: contents
// are checked, and ThreadSanitizer looks on where it is built with it. Plain memory, no jitkern.
#include <jitkern/both/ring.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <thread>

namespace {

constexpr unsigned kSlots = 3;
constexpr unsigned kMost = 7;
constexpr unsigned long long kPushes = 2000;

// What the push of a ticket says.
unsigned count_of(unsigned long long ticket) {
  return static_cast<unsigned>(ticket * 5 % (kMost + 1));
}
jitkern::Descriptor descriptor_of(unsigned long long ticket, unsigned i) {
  const long long t = static_cast<long long>(ticket);
  return {t, t + i, i, static_cast<unsigned>(ticket), t * 3, t * 5};
}
bool same(const jitkern::Descriptor& a, const jitkern::Descriptor& b) {
  return a.src_off == b.src_off && a.dst_off == b.dst_off && a.len == b.len && a.count == b.count &&
         a.src_stride == b.src_stride && a.dst_stride == b.dst_stride;
}

[[noreturn]] void fail(const char* what, unsigned long long ticket) {
  std::fprintf(stderr, "FAILED: push %llu: %s\n", ticket, what);
  std::_Exit(1);
}

// Between two questions; a ring that is wrong may have no answer.
void rest(const char* what, unsigned long long ticket) {
  static const auto begin = std::chrono::steady_clock::now();
  if (std::chrono::steady_clock::now() - begin > std::chrono::seconds(6)) fail(what, ticket);
  std::this_thread::yield();
}

// What a packet lands in: the producer writes it before a push, the consumer reads it.
long long bounce[kSlots];

void consume(void* base) {
  const jitkern::RingConsumer ring(base);
  for (unsigned long long ticket = 0; ticket < kPushes; ++ticket) {
    unsigned count = 0;
    const jitkern::Descriptor* found = ring.find(ticket, &count);
    for (; found == nullptr; found = ring.find(ticket, &count)) rest("never there", ticket);
    if (count != count_of(ticket)) fail("another count", ticket);
    for (unsigned i = 0; i < count; ++i) {
      if (!same(found[i], descriptor_of(ticket, i))) fail("another descriptor", ticket);
    }
    if (bounce[ring.header().slot(ticket)] != static_cast<long long>(ticket)) {
      fail("another packet", ticket);
    }
    ring.complete(ticket);
  }
}

}  // namespace

int main() {
  const long long bytes = jitkern::ring_layout(kSlots, kMost).num_bytes;
  void* const base = std::aligned_alloc(jitkern::kRingLineBytes, static_cast<size_t>(bytes));
  std::memset(base, 0, static_cast<size_t>(bytes));
  jitkern::ring_init(base, kSlots, kMost);
  if (!jitkern::is_ring(base)) fail("no ring", 0);
  const jitkern::RingProducer ring(base);
  std::thread consumer(consume, base);
  for (unsigned long long ticket = 0; ticket < kPushes; ++ticket) {
    jitkern::Descriptor* to = ring.try_reserve();
    for (; to == nullptr; to = ring.try_reserve()) rest("never free", ticket);
    if (ring.next() != ticket) fail("another ticket", ticket);
    bounce[ring.header().slot(ticket)] = static_cast<long long>(ticket);
    for (unsigned i = 0; i < count_of(ticket); ++i) to[i] = descriptor_of(ticket, i);
    ring.publish(count_of(ticket));
  }
  consumer.join();
  for (unsigned long long t = kPushes - kSlots; t < kPushes; ++t) {
    if (!ring.is_done(t)) fail("not done", t);
  }
  std::free(base);
}
