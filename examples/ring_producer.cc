// A C++ producer of a DescriptorRing, as the receiving thread of a network library may be one.
//
// Packets of a message land in a bounce buffer, in whatever order they come. For each message the
// producer pushes one slot of descriptors, by which the consumer puts its packets in order. Each
// slot has a segment of the bounce buffer of its own: once the slot is free, so is the segment, for
// a push counts as consumed when its bytes have been copied.
//
//     c++ -std=c++17 -O2 -shared -fPIC -I<jitkern>/csrc/include ring_producer.cc -o libproducer.so
//
//     import ctypes
//     producer = ctypes.CDLL("./libproducer.so")
//     address = ctypes.c_void_p
//     producer.produce(address(ring.address), address(bounce.data_ptr()), 1000, 1)
//
// ctypes gives up the GIL, so that another Python thread can consume meanwhile. In another process
// the ring's address is where that has mapped ring.fileno().
#include <jitkern/both/ring.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <random>
#include <thread>

namespace {

constexpr std::int64_t kMessageBytes = 4096;

// What the message of a ticket says.
unsigned char byte_of(std::uint64_t ticket, std::int64_t at) {
  return static_cast<unsigned char>(ticket * 31 + static_cast<std::uint64_t>(at) * 7 +
                                    static_cast<std::uint64_t>(at) / 256);
}

}  // namespace

// Pushes `rounds` messages; -1 if there is no ring at `base`. `bounce` has kMessageBytes for each
// slot, as has the destination, in the order of the slots.
extern "C" int produce(void* base, unsigned char* bounce, int rounds, unsigned seed) {
  if (!jitkern::is_ring(base)) return -1;
  const jitkern::RingProducer ring(base);
  std::mt19937 random(seed);
  for (int round = 0; round < rounds; ++round) {
    jitkern::Descriptor* descriptors = ring.try_reserve();
    while (descriptors == nullptr) {  // the ring is full
      std::this_thread::yield();
      descriptors = ring.try_reserve();
    }
    const std::uint64_t ticket = ring.next();
    const std::int64_t segment = ring.header().slot(ticket) * kMessageBytes;

    // Packets of random sizes, the last ones first.
    const unsigned most = std::min(ring.header().max_descriptors, 64U);
    const unsigned num_packets = 1 + static_cast<unsigned>(random()) % most;
    std::int64_t landed = 0, end = kMessageBytes;
    for (unsigned i = 0; i < num_packets; ++i) {
      const bool is_last = i + 1 == num_packets;
      const std::int64_t begin = is_last ? 0 : random() % static_cast<unsigned>(end + 1);
      for (std::int64_t at = begin; at < end; ++at) {
        bounce[segment + landed + at - begin] = byte_of(ticket, at);
      }
      const unsigned len = static_cast<unsigned>(end - begin);
      descriptors[i] = {segment + landed, segment + begin, len, 1, 0, 0};
      landed += len;
      end = begin;
    }
    ring.publish(num_packets);
    if (random() % 64 == 0) {  // let it run empty
      std::this_thread::sleep_for(std::chrono::microseconds(random() % 200));
    }
  }
  return 0;
}
