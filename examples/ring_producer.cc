// A C++ producer of a DescriptorRing, such as the receiving thread of a network library.
//
// Packets of a message land in a bounce buffer in order of arrival. For each message the producer
// pushes one slot of descriptors, with which the consumer puts the packets in order. Each slot has
// its own segment of the bounce buffer. When the slot is free, so is the segment: a push counts as
// consumed when its bytes have been copied.
//
//     c++ -std=c++17 -O2 -shared -fPIC -I<jitkern>/csrc/include ring_producer.cc -o libproducer.so
//
//     import ctypes
//     producer = ctypes.CDLL("./libproducer.so")
//     address = ctypes.c_void_p
//     producer.produce(address(ring.address), address(bounce.data_ptr()), 1000, 1)
//
// ctypes releases the GIL, so that another Python thread can consume. Another process maps
// ring.fileno(), and passes the address of its mapping.
#include <jitkern/both/ring.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <random>
#include <thread>

namespace {

constexpr std::int64_t kMessageBytes = 4096;

// A byte of the message of a ticket.
unsigned char byte_of(std::uint64_t ticket, std::int64_t at) {
  return static_cast<unsigned char>(ticket * 31 + static_cast<std::uint64_t>(at) * 7 +
                                    static_cast<std::uint64_t>(at) / 256);
}

}  // namespace

// Pushes `rounds` messages. Returns -1 if there is no ring at `base`. `bounce` and the destination
// have kMessageBytes per slot, in the order of the slots.
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
    if (random() % 64 == 0) {  // let the ring run empty
      std::this_thread::sleep_for(std::chrono::microseconds(random() % 200));
    }
  }
  return 0;
}
