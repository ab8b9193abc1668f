// The arguments of indexing, checked.
#pragma once

#include <jitkern/launch.h>

#include <vector>

#include "index.h"

namespace jitkern {

// Which indices the rows of a table belong to, as given: none what was not.
struct VocabularyArgs {
  // `more`: (added_range, vocab_size), or none. Each argument from Python takes 15 to 35 ns.
  VocabularyArgs(AnyView vocab_range, AnyView more);
  bool all() const { return is_none(vocab_range) && is_none(added_range) && is_none(vocab_size); }

  AnyView vocab_range;
  tvm::ffi::Any added_range;
  tvm::ffi::Any vocab_size;
};

struct IndexArgs {
  // What messages call the arguments: of several tables each has its number.
  struct Names {
    const char* weights;
    const char* output;
  };

  // Checks all. TypeError or ValueError naming the argument.
  IndexArgs(Names names, AnyView weights, AnyView indices, AnyView output,
            const VocabularyArgs& vocabulary);

  // A table in host memory may be read by a GPU that has the indices.
  bool is_host_table() const { return !weights.on_cuda() && indices.on_cuda(); }

  Rows weights;
  Indices indices;
  Rows output;  // a row for each index
  IndexParams params;
};

constexpr size_t kMaxTables = 8;  // of a call

// The kernel of tables in device memory, once for each, on the device of the indices. It reads
// those of the host as well, for calls of few rows.
void launch_index(const LaunchScope& scope, const IndexArgs* tables, size_t num_tables);

// Launches a call on tables in host memory, whose indices are the same. ValueError where one is not
// pinned.
void index_host_tables(std::vector<IndexArgs>& tables);

}  // namespace jitkern
