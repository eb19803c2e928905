// Decoding of slices that were split into byte planes and coded as one LZ4 block (docs/format.md, "Coded slices").
#pragma once

#include <cstddef>
#include <cstdint>

namespace kv {

// Decode one LZ4 block. True if it is well formed and gives exactly `size` bytes; nothing outside of the two ranges is
// read or written, whatever `in` holds.
bool lz4_decode(const std::uint8_t* in, std::size_t in_size, std::uint8_t* out, std::size_t size);

// Join byte planes to numbers of `planes` bytes each; `size` is a multiple of `planes`. Ranges must not overlap.
void join_planes(const std::uint8_t* split, std::uint8_t* out, std::size_t size, int planes);

}  // namespace kv
