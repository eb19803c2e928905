// Copies with their CRC-32C (Castagnoli, as in iSCSI and the crc32c package), by the processor's instruction.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace kv {

// CRC-32C of `size` bytes, continuing from `crc` (0 to begin).
std::uint32_t crc32c(const std::uint8_t* data, std::size_t size, std::uint32_t crc);

// Copy and return the CRC-32C of what was copied; the source is read from memory once. Ranges must not overlap.
std::uint32_t copy_crc32c(std::uint8_t* to, const std::uint8_t* from, std::size_t size, std::uint32_t crc);

// One block's slices on their way to another place.
struct SlicesCopy {
    std::uint8_t* to;
    const std::uint8_t* from;
};

// Slices of all blocks of one call; a stride is the distance from a slice to the next.
struct SlicesShape {
    std::size_t slices, slice_bytes, to_stride, from_stride;
};

// Copy the slices of many blocks on `threads` threads of the pool at most, where the processor can without leaving large
// copies in the caches. Ranges must not overlap; bytes between slices are left alone.
void copy_slices(const std::vector<SlicesCopy>& blocks, const SlicesShape& shape, int threads);

// Copy `count` pieces of `piece_bytes` each from address to address, on `threads` threads of the pool at most; where
// targets overlap each other or a source, what they hold afterwards is not defined.
void copy_pieces(const std::int64_t* to, const std::int64_t* from, std::size_t count, std::size_t piece_bytes, int threads);

// Copy the slices of many blocks, on the pool if they are large, and put the CRC-32C of each written slice into
// `crcs`, block by block. Ranges must not overlap; bytes between slices are left alone.
void copy_slices_crc32c(const std::vector<SlicesCopy>& blocks, const SlicesShape& shape, std::uint32_t* crcs);

// Read every byte on the pool and return the sum of its 64-bit words (a tail below 8 bytes is left out): the read
// bandwidth that other kernels are measured against.
std::uint64_t read_all(const std::uint8_t* data, std::size_t size);

struct Span {
    const std::uint8_t* data;
    std::size_t size;
};

// The same for blocks that lie apart, in the order given; of each the tail below 8 bytes is left out.
std::uint64_t read_blocks(const std::vector<Span>& blocks);

// True when the processor computes CRC-32C itself.
bool has_crc_instruction();

}  // namespace kv
