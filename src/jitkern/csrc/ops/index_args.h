// The arguments of indexing, checked.
#pragma once

#include <jitkern/launch.h>

#include <vector>

#include "index.h"

namespace jitkern {

struct IndexArgs {
  // What messages call the arguments: of several tables each has its number.
  struct Names {
    const char* weights;
    const char* output;
  };

  // Checks all. TypeError or ValueError naming the argument. Start and length are none where no
  // vocab_range was given.
  IndexArgs(Names names, AnyView weights, AnyView indices, AnyView output, AnyView start,
            AnyView length);

  // A table in host memory may be read by a GPU that has the indices.
  bool is_host_table() const { return !weights.on_cuda() && indices.on_cuda(); }

  Rows weights;
  Indices indices;
  Rows output;  // a row for each index
  IndexParams params;
};

// The kernel of tables in device memory. It reads those of the host as well, for calls of few rows.
void launch_index(const IndexArgs& args);

// Launches a call on tables in host memory, whose indices are the same. ValueError where one is not
// pinned.
void index_host_tables(std::vector<IndexArgs>& tables);

}  // namespace jitkern
