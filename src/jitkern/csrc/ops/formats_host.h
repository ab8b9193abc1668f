// A call of store_rows or gather_rows in a format: its arguments, checked.
#pragma once

#include <optional>
#include <vector>

#include "common.h"
#include "formats_cpu.h"
#include "store_host.h"

namespace jitkern {

constexpr int kNoFormat = -1;  // in the place of a Format

// One cache, the rows of values that are stored in it or read from it, and what lies beside them.
struct FormatSide {
  const Tensor& cache;
  const Tensor& values;
  std::optional<Rows> rest;
  const Tensor* scales;  // in a tensor of their own, or null
};

struct FormatCall {
  const char* op;
  int format;
  RowFormat row;
  Indices indices;
  bool writes_cache;  // a store; else a gather, which writes the values
  int num_tables = 0;
  FormatShape shapes[2];  // one for each table
  FormatParams params{};

  // `format` is a number of Format. The sides have one device, and so have the indices unless the
  // caches are in host memory.
  FormatCall(const char* op, int format, const Indices& indices, bool writes_cache);

  // Checks and adds a cache, one or two. The values are [rows, dim] or [rows, heads, dim].
  void add(const FormatSide& side);

  // ValueError if the tensor, or one used before, is written and they overlap.
  void uses(const CacheRows& rows, bool is_written);

  // Launches a kernel for both tables, or one after the other if they differ in shape.
  void launch(KernelTable& table, const LaunchScope& scope);

 private:
  struct Launch {
    const Kernel* kernel;
    i64 num_blocks;
  };

  int most_elems(int t) const;
  Launch prepare(KernelTable& table, const Device& device, int t, int elems) const;
  CacheRows set_cache(const FormatSide& side, const FormatShape& shape, FormatTable& table);
  CacheRows set_scales(const FormatSide& side, const FormatShape& shape, const CacheRows& cache,
                       FormatTable& table) const;

  std::optional<CacheRows> first_cache_;
  Few<CacheRows, 6> written_;  // they overlap no other tensor
  Few<CacheRows, 6> read_;
  u64 bits_[2];  // addresses and strides of each table that bound the width of vectors
};

// An argument that is a tensor or a list of two, with the names of its items in messages.
struct ListArg {
  const char* name;
  const char* items[2];
};

// The caches, 1 or 2, and the rows that belong to them: with one cache values and, in some formats,
// the rest of a row. kNoFormat: one or two parts of a row.
struct RowsArgs {
  Tensors caches;
  Tensors rows;
  Tensors scales;

  RowsArgs(const char* op, const ListArg& rows_arg, AnyView caches, AnyView rows, AnyView scales,
           int format);
  // Adds the sides of a call in a format. ValueError if a tensor is missing or too much.
  void add_to(FormatCall& call) const;
};

// What the builders in ops/formats.py take.
inline std::vector<const char*> format_spec() {
  return {"format", "groups", "group", "rest_bytes", "value_type", "elems", "index_bytes"};
}
inline GroupShape format_shape(const Spec&, int, int) { return {1, 1, 1, 1}; }

}  // namespace jitkern
