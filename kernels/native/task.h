// What the kernels of every instruction-set level are given, and the table by which a level offers them.
//
// Plain data and function pointers only: files compiled with wider instructions include this header, and nothing
// in it may be compiled twice into one program with different flags.
#pragma once

#include <cstddef>
#include <cstdint>

namespace kv {

enum class Format : int { fp16, bf16, fp32, int8 };

// Bytes of one head's part of a slice. `dim` and `tokens` are at most kMaxSide on the native path.
struct Shape {
    int heads;
    int dim;
    int tokens;
    Format format;
};

constexpr int kMaxSide = 256;   // int32 sums of int16 by int8 products stay below 2^31 up to 512
constexpr int kRowChunk = 64;   // query rows attended together: their fp32 sums stay in L1 and L2
constexpr int kPad = 16;        // widest vector in floats: scratch rows are padded to it

constexpr int padded(int count) { return (count + kPad - 1) / kPad * kPad; }

constexpr std::size_t element_bytes(Format format) {
    return format == Format::int8 ? 1 : format == Format::fp32 ? 4 : 2;
}

constexpr std::size_t head_bytes(const Shape& shape) {
    const std::size_t both = 2 * static_cast<std::size_t>(shape.dim) * shape.tokens * element_bytes(shape.format);
    return shape.format == Format::int8 ? both + 2 * (2 * static_cast<std::size_t>(shape.dim) + shape.tokens) : both;
}

// One KV head of one sequence: `rows` query rows over `blocks` tiles, in the order given.
struct AttendTask {
    const float* query;          // row r at query + (r / group) * query_stride + (r % group) * dim
    std::int64_t query_stride;
    int group;
    int rows;                    // at most kRowChunk
    int first_place;             // position of rows 0..group-1; later groups are one further each
    const std::uint8_t* const* tiles;  // this head's part of each block's slice
    const std::int32_t* starts;  // position of each block's first token
    int blocks;
    Shape shape;
    float scale;
    float soft_cap;              // 0 when off
    int window;                  // 0 when off
    float* scratch;              // attend_scratch_floats(), 64-byte aligned, this thread's own
    float* sums;                 // out: [rows][padded(dim)] unnormalised values
    float* top;                  // out: [rows] largest score
    float* mass;                 // out: [rows] sum of exp(score - top)
};

constexpr std::size_t attend_scratch_floats() {
    return static_cast<std::size_t>(kRowChunk) * (kMaxSide + kPad)  // scaled queries
           + 4 * kMaxSide                                  // scores of a row tile
           + 4 * kMaxSide                                  // packed pairs of a row tile
           + 3 * kMaxSide;                                 // decoded parameters of a tile
}

// One head of one slice between raw and int8. `raw` and `coded` point at that head's part.
struct CodecTask {
    Shape shape;                 // shape.format is the raw one
    std::uint8_t* raw;
    std::uint8_t* coded;
    float* scratch;              // codec_scratch_floats(), 64-byte aligned
};

constexpr std::size_t codec_scratch_floats() { return 4 * kMaxSide; }
static_assert(codec_scratch_floats() <= attend_scratch_floats(), "both cut from one buffer of the thread");

// One way to copy `size` bytes between ranges that do not overlap. `sum` gives the CRC-32C state after them.
struct CopyForm {
    const char* name;
    bool streams;                // past the caches
    std::uint32_t (*sum)(std::uint8_t* to, const std::uint8_t* from, std::size_t size, std::uint32_t state);  // or null
    void (*copy)(std::uint8_t* to, const std::uint8_t* from, std::size_t size);                               // or null
};

// The digest of one head of one slice, whose part of it `slice` is: `dim` fp16 numbers each.
struct DigestTask {
    Shape shape;
    const std::uint8_t* slice;
    float* scratch;              // 3 * kMaxSide
    std::uint16_t* low;
    std::uint16_t* high;
    std::uint16_t* mean;
};

// Queries against the digests of some blocks.
struct ScoreTask {
    const float* query;          // [3][heads][group][padded(dim)]: as it is, its part above zero, its part below
    const std::uint16_t* digests;  // fp16 [blocks][3][heads][dim]
    int blocks;
    int heads;
    int group;
    int dim;
    float* most;                 // out: [blocks][heads][group], no token's score is above it
    float* middle;               // out: the mean of the scores
};

struct Level {
    const char* name;
    void (*attend)(const AttendTask&);
    bool (*quantise)(const CodecTask&);
    void (*dequantise)(const CodecTask&);
    void (*digest)(const DigestTask&);
    void (*score)(const ScoreTask&);
    const CopyForm* copies;      // beside the plain ones, which every level has
    int copy_count;
};

const Level* portable_level();
const Level* avx2_level();    // null where this build has none
const Level* avx512_level();  // null where this build has none

}  // namespace kv
