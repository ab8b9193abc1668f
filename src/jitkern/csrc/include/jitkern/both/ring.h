// A ring of slots of descriptors in host memory that GPUs map. A CPU thread pushes without a copy
// and without a driver call; a kernel or another CPU thread consumes. Needs only descriptor.h of
// jitkern. Users may include it.
//
// Pushes are numbered from 0; the number is the push's ticket. Push t is in slot t % num_slots, as
// generation t / num_slots + 1. Memory that was never written has generation 0. There is one
// producer at a time, which
//
//   1. waits until the slot's completion word has the generation before (acquire): the consumer no
//      longer reads the slot, and its rows have been copied
//   2. writes the descriptors by plain stores (streaming stores need an sfence after them)
//   3. writes the seals: the 8 bytes that end each half of a descriptor become the word of step 4
//   4. writes the word: ONE release store of 8 bytes that hold generation and count
//   5. writes the head: the number of pushes so far, for the next producer
//
// A consumer of ticket t, of generation g,
//
//   1. reads the word by acquire loads (of system scope on a GPU: ld.acquire.sys.b64) until it is
//      generation g with a count of at most max_descriptors; other values are an older push or none
//   2. reads that many descriptors, each once, and takes them only if all seals equal the word
//   3. copies the rows that are inside both buffers
//   4. writes g to the completion word by a release store (st.release.sys), after its last copy
//
// Why no torn or stale push is taken: generation and count are one word, so they are of the same
// push. Generation g is there only after the release of step 4, with which the consumer's acquire
// synchronises. A producer killed before step 4 leaves generation g - 1. One killed between 4 and 5
// leaves a whole push, which the next producer recognises by its generation. On x86 (TSO) acquire
// and release bind only the compiler.
//
// Why there are seals: a read over PCIe takes 1.2 us, and reading first the word, then the
// descriptors takes two. With seals a GPU may read both at once, in any order. A GPU reads 32
// aligned bytes at once, they are a snapshot of a CPU's cache line, and a seal is stored after all
// fields. So the fields beside a right seal are those of push t. If the word is right and a seal is
// wrong, read again after the acquire. The word has a line of its own, since two reads of one host
// line are served one after the other, 1.06 us each. Machines guarantee this, CUDA's memory model
// does not, as with NCCL's LL128. On other machines read the descriptors after the acquire.
//
// One gap remains for a GPU that reads both at once: the seals of a producer killed between steps 3
// and 4 are right too. If the next producer pushes as many descriptors, reads served before and
// after that push see the new word and an old descriptor.
#pragma once

#include "descriptor.h"

namespace jitkern {

constexpr unsigned long long kRingMagic = 0x676e69726b74696aULL;  // "jitkring"
constexpr unsigned kRingVersion = 2;
// A GPU's line. Words that different sides write are on different lines; a slot's descriptors start
// on the line after its word.
constexpr unsigned kRingLineBytes = 128;
constexpr unsigned kRingMaxDescriptors = 65'535;
constexpr unsigned kRingMaxSlots = 65'536;

// A slot's word: the generation in the upper 48 bits, which never wrap around, then the count.
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

// The first line of a ring; constant. Offsets are from the ring's first byte: the head is at
// head_at, completion words every done_bytes from dones_at, slots every slot_bytes from slots_at.
// Each has lines of its own.
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

// The header of a ring of this size.
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

// Makes a ring of ring_layout(...).num_bytes of zeros that start on a line.
inline void ring_init(void* base, unsigned num_slots, unsigned max_descriptors) {
  RingHeader header = ring_layout(num_slots, max_descriptors);
  header.magic = 0;
  *static_cast<RingHeader*>(base) = header;
  __atomic_store_n(&static_cast<RingHeader*>(base)->magic, kRingMagic, __ATOMIC_RELEASE);
}

// Whether there is a ring of this version at `base`.
inline bool is_ring(const void* base) {
  const RingHeader* header = static_cast<const RingHeader*>(base);
  return __atomic_load_n(&header->magic, __ATOMIC_ACQUIRE) == kRingMagic &&
         header->version == kRingVersion;
}

// The words of a ring, by ticket. Any thread may read them.
class Ring {
 public:
  using Word = unsigned long long;

  // There is a ring at `base`: see is_ring.
  explicit Ring(void* base)
      : base_(static_cast<char*>(base)), header_(*static_cast<const RingHeader*>(base)) {}

  const RingHeader& header() const { return header_; }
  Descriptor* descriptors(Word ticket) const {
    return reinterpret_cast<Descriptor*>(base_ + header_.descriptors_at(ticket));
  }
  // Whether the push has been consumed.
  bool is_done(Word ticket) const { return load(done(ticket)) >= header_.generation(ticket); }
  // Whether the push's slot may be written: its previous push has been consumed.
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

// Pushes; a ring has one producer at a time. No function waits.
class RingProducer : public Ring {
 public:
  using Ring::Ring;

  // The ticket of the next push.
  Word next() const {
    const Word ticket = load(head());
    // One more if the previous producer was killed before step 5.
    return ticket + (ring_generation(load(word(ticket))) == header().generation(ticket) ? 1 : 0);
  }
  // Room for max_descriptors of the next push; null while its slot is in use.
  Descriptor* try_reserve() const {
    const Word ticket = next();
    return is_free(ticket) ? descriptors(ticket) : nullptr;
  }
  // Pushes the first `count`, at most max_descriptors, of those reserved. Returns the ticket.
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

// Consumes on the CPU. Several may consume different tickets.
class RingConsumer : public Ring {
 public:
  using Ring::Ring;

  // The descriptors of a push and their count; null if it is not there yet.
  const Descriptor* find(Word ticket, unsigned* count) const {
    const Word value = load(word(ticket));
    *count = ring_count(value);
    if (ring_generation(value) != header().generation(ticket)) return nullptr;
    if (*count > header().max_descriptors) return nullptr;
    const Descriptor* const found = descriptors(ticket);
    for (unsigned i = 0; i < *count; ++i) {
      // The acquire of the word orders these.
      if (__atomic_load_n(&found[i].first_seal, __ATOMIC_RELAXED) != value) return nullptr;
      if (__atomic_load_n(&found[i].second_seal, __ATOMIC_RELAXED) != value) return nullptr;
    }
    return found;
  }
  // Marks the push consumed: its slot, and the memory that its descriptors name, may be reused.
  void complete(Word ticket) const { store(done(ticket), header().generation(ticket)); }
};

#endif  // __CUDACC_RTC__

}  // namespace jitkern
