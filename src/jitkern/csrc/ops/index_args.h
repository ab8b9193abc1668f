// The arguments of indexing, checked.
#pragma once

#include <jitkern/launch.h>

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
  // Checks all. TypeError or ValueError naming the argument.
  IndexArgs(AnyView weights, AnyView indices, AnyView output, const VocabularyArgs& vocabulary);

  // A table in host memory may be read by a GPU that has the indices.
  bool is_host_table() const { return !weights.on_cuda() && indices.on_cuda(); }

  Rows weights;
  Indices indices;
  Rows output;  // a row for each index
  IndexParams params;
};

// Launches the kernel of tables in device memory, on the device of the indices. Calls of few rows
// read a table in host memory with it too.
void launch_index(const LaunchScope& scope, const IndexArgs& args);

// Launches a call on a table in host memory. ValueError if it is not pinned.
void index_host_table(IndexArgs& args);

}  // namespace jitkern
