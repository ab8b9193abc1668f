// A ring of slots full of descriptors in host memory that GPUs map: a CPU thread pushes, without a
// copy and without a driver call, and a kernel or another CPU thread consumes. Needs nothing of
// jitkern but descriptor.h. Users may include it.
//
// Pushes are numbered from 0 on: the number is a push's ticket. Push t is in slot t % num_slots, as
// its generation t / num_slots + 1; memory that nobody wrote is of generation 0. One producer at a
// time writes, in this order:
//
//   1. it waits until the slot's completion word has reached the generation before (acquire): the
//      consumer reads nothing of the slot any more, and its rows have been copied
//   2. the descriptors, by plain stores (streaming ones need an sfence behind them)
//   3. the seals: the 8 bytes that end each half of a descriptor become the word of step 4
//   4. the word, by ONE release store of 8 bytes that hold generation and count
//   5. the head: how many pushes there have been, for the next producer
//
// A consumer of ticket t, whose generation is g:
//
//   1. reads the word by an acquire load (of system scope on a GPU: ld.acquire.sys.b64) until it is
//      generation g with a count of at most max_descriptors. Anything else is not there yet: an
//      older push, or none.
//   2. reads that many descriptors, and takes them only if both seals of each are the word. Each
//      descriptor is read once: what is checked is what is used.
//   3. copies the rows that are inside of both buffers
//   4. writes g to the completion word by a release store (st.release.sys), behind its last copy
//
// Why nothing torn or stale is taken: generation and count are one word, which is written and read
// whole, so a count never comes with another push's generation; and g is there only behind the
// release of step 4, with which the consumer's acquire synchronises: all that the producer wrote
// before is seen. A producer killed before step 4 leaves the word of generation g - 1, whatever it
// wrote of the descriptors; one killed between 4 and 5 leaves a whole push, which the next producer
// finds by its generation. On x86 stores are seen in their order and loads made in theirs (TSO), so
// that acquire and release cost nothing there and bind the compiler alone; elsewhere they bind the
// processor as well.
//
// Why there are seals: over PCIe a read is a round trip of 1.2 us, and a GPU that first reads the
// word, then the descriptors, makes two. It may have both under way at once, in any order, for each
// 32 bytes of a descriptor carry a seal of their own. 32 aligned bytes are what a GPU asks for at
// once, and what a line of the CPU hands over as of one moment; and a seal is stored behind all
// fields. So the fields beside a seal that is right were written before it: they are those of push
// t. A seal that is wrong beside a word that is right means: read again, behind the acquire. The
// word has a line of its own, as two reads of one line of the host are served one after the other,
// 1.06 us each. All this is a property of machines and not of CUDA's memory model, as NCCL's LL128
// is; where it is not to be relied on, descriptors are read behind the acquire.
//
// One gap is left to a GPU that reads both at once: the seals of a producer that was killed between
// steps 3 and 4 are right, too. Where the next one pushes as many descriptors, reads of which one
// was served before that push and one behind it have the word of the living and a descriptor of the
// dead.
#pragma once

#include "descriptor.h"

namespace jitkern {

constexpr unsigned long long kRingMagic = 0x676e69726b74696aULL;  // "jitkring"
constexpr unsigned kRingVersion = 2;
// A GPU's line. The words that different sides write lie on different ones, and a slot's word on
// another one than its descriptors, which begin with the line behind.
constexpr unsigned kRingLineBytes = 128;
constexpr unsigned kRingMaxDescriptors = 65'535;
constexpr unsigned kRingMaxSlots = 65'536;

// A slot's word: the generation in the upper 48 bits, which never wrap around, and the count.
JITKERN_HOST_DEVICE constexpr unsigned long long ring_word(unsigned long long generation,
                                                           unsigned count) {
  return generation << 16 | count;
}
JITKERN_HOST_DEVICE constexpr unsigned long long ring_generation(unsigned long long word) {
  return word >> 16;
}
JITKERN_HOST_DEVICE constexpr unsigned ring_count(unsigned long long word) {
  return static_cast<unsigned>(word & 0xffff);
}

// The first line of a ring; nobody writes it once it is there. What follows, from the ring's first
// byte on: the head at head_at, a completion word every done_bytes from dones_at on, a slot every
// slot_bytes from slots_at on. Each of them has lines of its own.
struct RingHeader {
  unsigned long long magic;
  unsigned version;
  unsigned num_slots;
  unsigned max_descriptors;
  unsigned descriptor_bytes;
  long long head_at;
  long long dones_at, done_bytes;
  long long slots_at, slot_bytes;
  long long num_bytes;

  JITKERN_HOST_DEVICE constexpr unsigned slot(unsigned long long ticket) const {
    return static_cast<unsigned>(ticket % num_slots);
  }
  JITKERN_HOST_DEVICE constexpr unsigned long long generation(unsigned long long ticket) const {
    return ticket / num_slots + 1;
  }
  // Offsets of what is a ticket's.
  JITKERN_HOST_DEVICE constexpr long long word_at(unsigned long long ticket) const {
    return slots_at + slot(ticket) * slot_bytes;
  }
  JITKERN_HOST_DEVICE constexpr long long descriptors_at(unsigned long long ticket) const {
    return word_at(ticket) + kRingLineBytes;
  }
  JITKERN_HOST_DEVICE constexpr long long done_at(unsigned long long ticket) const {
    return dones_at + slot(ticket) * done_bytes;
  }
};
static_assert(sizeof(RingHeader) <= kRingLineBytes, "one line");

// What a ring of this size looks like.
JITKERN_HOST_DEVICE constexpr RingHeader ring_layout(unsigned num_slots, unsigned max_descriptors) {
  constexpr long long line = kRingLineBytes;
  const long long used = line + max_descriptors * static_cast<long long>(sizeof(Descriptor));
  const long long slot_bytes = (used + line - 1) / line * line;
  const long long slots_at = (2 + num_slots) * line;
  return {kRingMagic,
          kRingVersion,
          num_slots,
          max_descriptors,
          sizeof(Descriptor),
          line,
          2 * line,
          line,
          slots_at,
          slot_bytes,
          slots_at + num_slots * slot_bytes};
}

#ifndef __CUDACC_RTC__  // the host's side

// Makes a ring of memory that is zero, of ring_layout(...).num_bytes from a line on.
inline void ring_init(void* base, unsigned num_slots, unsigned max_descriptors) {
  RingHeader header = ring_layout(num_slots, max_descriptors);
  header.magic = 0;
  *static_cast<RingHeader*>(base) = header;
  __atomic_store_n(&static_cast<RingHeader*>(base)->magic, kRingMagic, __ATOMIC_RELEASE);
}

// Whether there is a ring that this header describes.
inline bool is_ring(const void* base) {
  const RingHeader* header = static_cast<const RingHeader*>(base);
  return __atomic_load_n(&header->magic, __ATOMIC_ACQUIRE) == kRingMagic &&
         header->version == kRingVersion;
}

// The words of a ring, by ticket. Those who only ask may do so from any thread.
class Ring {
 public:
  using Word = unsigned long long;

  // `base` is that of a ring: is_ring.
  explicit Ring(void* base)
      : base_(static_cast<char*>(base)), header_(*static_cast<const RingHeader*>(base)) {}

  const RingHeader& header() const { return header_; }
  Descriptor* descriptors(Word ticket) const {
    return reinterpret_cast<Descriptor*>(base_ + header_.descriptors_at(ticket));
  }
  // Whether a consumer has done all that this push asked for.
  bool is_done(Word ticket) const { return load(done(ticket)) >= header_.generation(ticket); }
  // Whether the push's slot may be written: what was in it before has been consumed.
  bool is_free(Word ticket) const { return load(done(ticket)) + 1 >= header_.generation(ticket); }

 protected:
  Word* word(Word ticket) const { return at(header_.word_at(ticket)); }
  Word* done(Word ticket) const { return at(header_.done_at(ticket)); }
  Word* head() const { return at(header_.head_at); }
  static Word load(const Word* word) { return __atomic_load_n(word, __ATOMIC_ACQUIRE); }
  static void store(Word* word, Word value) { __atomic_store_n(word, value, __ATOMIC_RELEASE); }

 private:
  Word* at(long long offset) const { return reinterpret_cast<Word*>(base_ + offset); }

  char* base_;
  RingHeader header_;
};

// The one that pushes; at any time a ring has one. Nothing waits.
class RingProducer : public Ring {
 public:
  using Ring::Ring;

  // The ticket of the next push.
  Word next() const {
    const Word ticket = load(head());
    // It is one more where the producer before was killed in front of step 5.
    return ticket + (ring_generation(load(word(ticket))) == header().generation(ticket) ? 1 : 0);
  }
  // max_descriptors of the next push, to be written; null while its slot is being read.
  Descriptor* try_reserve() const {
    const Word ticket = next();
    return is_free(ticket) ? descriptors(ticket) : nullptr;
  }
  // Hands over the first `count`, at most max_descriptors, of those that were reserved: the ticket.
  Word publish(unsigned count) const {
    const Word ticket = next();
    const Word value = ring_word(header().generation(ticket), count);
    Descriptor* const written = descriptors(ticket);
    for (unsigned i = 0; i < count; ++i) {
      store(&written[i].first_seal, value);
      store(&written[i].second_seal, value);
    }
    store(word(ticket), value);
    store(head(), ticket + 1);
    return ticket;
  }
};

// One that consumes, on the CPU. There may be several, of different tickets.
class RingConsumer : public Ring {
 public:
  using Ring::Ring;

  // The descriptors of a push, and how many they are; null where it is not there yet.
  const Descriptor* find(Word ticket, unsigned* count) const {
    const Word value = load(word(ticket));
    *count = ring_count(value);
    if (ring_generation(value) != header().generation(ticket)) return nullptr;
    if (*count > header().max_descriptors) return nullptr;
    const Descriptor* const found = descriptors(ticket);
    for (unsigned i = 0; i < *count; ++i) {
      // Behind the acquire of the word, which is enough.
      if (__atomic_load_n(&found[i].first_seal, __ATOMIC_RELAXED) != value) return nullptr;
      if (__atomic_load_n(&found[i].second_seal, __ATOMIC_RELAXED) != value) return nullptr;
    }
    return found;
  }
  // The push has been consumed: its slot, and what its descriptors name, may be written.
  void complete(Word ticket) const { store(done(ticket), header().generation(ticket)); }
};

#endif  // __CUDACC_RTC__

}  // namespace jitkern
