// The producer of examples/ring_producer.cc and a consumer of its ring, as fast as they can, by
// what both/ring.h offers: messages are checked, under ThreadSanitizer. Plain memory, no jitkern.
#include <jitkern/both/ring.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <thread>

extern "C" int produce(void* base, unsigned char* bounce, int rounds, unsigned seed);

namespace {

constexpr unsigned kSlots = 3, kMost = 7;
constexpr unsigned long long kPushes = 2000;
constexpr long long kMessageBytes = 4096;  // of the example

[[noreturn]] void fail(const char* what, unsigned long long ticket) {
  std::fprintf(stderr, "FAILED: push %llu: %s\n", ticket, what);
  std::_Exit(1);
}

void consume(void* base, const unsigned char* bounce) {
  const auto begin = std::chrono::steady_clock::now();
  const jitkern::RingConsumer ring(base);
  for (unsigned long long ticket = 0; ticket < kPushes; ++ticket) {
    unsigned count = 0;
    const jitkern::Descriptor* found = nullptr;
    while ((found = ring.find(ticket, &count)) == nullptr) {
      if (std::chrono::steady_clock::now() - begin > std::chrono::seconds(30)) {
        fail("never there", ticket);
      }
      std::this_thread::yield();
    }
    unsigned char message[kMessageBytes] = {};
    const long long segment = ring.header().slot(ticket) * kMessageBytes;
    for (unsigned i = 0; i < count; ++i) {
      std::memcpy(message + found[i].dst_off - segment, bounce + found[i].src_off, found[i].len);
    }
    ring.complete(ticket);
    for (long long at = 0; at < kMessageBytes; ++at) {
      const auto expected = static_cast<unsigned char>(ticket * 31 + at * 7 + at / 256);
      if (message[at] != expected) fail("another message", ticket);
    }
  }
}

}  // namespace

int main() {
  const long long bytes = jitkern::ring_layout(kSlots, kMost).num_bytes;
  void* const base = std::aligned_alloc(jitkern::kRingLineBytes, static_cast<size_t>(bytes));
  std::memset(base, 0, static_cast<size_t>(bytes));
  jitkern::ring_init(base, kSlots, kMost);
  static unsigned char bounce[kSlots * kMessageBytes];
  std::thread consumer(consume, base, bounce);
  if (produce(base, bounce, kPushes, 1) != 0) fail("no ring", 0);
  consumer.join();
  const jitkern::RingProducer ring(base);
  for (unsigned long long ticket = kPushes - kSlots; ticket < kPushes; ++ticket) {
    if (!ring.is_done(ticket)) fail("not done", ticket);
  }
  std::free(base);
}
