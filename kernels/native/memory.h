// Copies with their CRC-32C (Castagnoli, as in iSCSI and the crc32c package), by the processor's instruction.
#pragma once

#include <cstddef>
#include <cstdint>

namespace kv {

// CRC-32C of `size` bytes, continuing from `crc` (0 to begin).
std::uint32_t crc32c(const std::uint8_t* data, std::size_t size, std::uint32_t crc);

// Copy and return the CRC-32C of what was copied; the source is read from memory once. Ranges must not overlap.
std::uint32_t copy_crc32c(std::uint8_t* to, const std::uint8_t* from, std::size_t size, std::uint32_t crc);

// Read every byte on the pool and return the sum of its 64-bit words (a tail below 8 bytes is left out): the read
// bandwidth that other kernels are measured against.
std::uint64_t read_all(const std::uint8_t* data, std::size_t size);

// True when the processor computes CRC-32C itself.
bool has_crc_instruction();

}  // namespace kv
