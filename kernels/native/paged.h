// Paged attention over a batch, merge, and the codec over many slices: plans work for the pool.
#pragma once

#include <cstdint>
#include <span>

#include "task.h"

namespace kv {

struct PagedCall {
    const float* query;               // [queries][q_heads][dim]
    int queries;
    int q_heads;
    const std::int64_t* addresses;    // [sequences][blocks], 0 marks none
    const std::int32_t* starts;       // [sequences][blocks]
    const std::int32_t* offsets;      // [sequences + 1]
    const std::int32_t* contexts;     // [sequences]
    int sequences;
    int blocks;
    std::int64_t layer_offset;        // bytes from a block's layer 0 to the wanted slice
    Shape shape;
    float scale;
    float soft_cap;                   // 0 when off
    int window;                       // 0 when off
    float* out;                       // [queries][q_heads][dim]
    float* lse;                       // [queries][q_heads]
};

void paged_attention(const Level& level, const PagedCall& call);

// out, lse = parts joined; `sinks` [heads] or null. Arrays are [rows][heads][dim] and [rows][heads].
struct MergeCall {
    std::span<const float* const> outs;
    std::span<const float* const> lses;
    const float* sinks;
    std::int64_t rows;
    int heads;
    int dim;
    float* out;
    float* lse;
};

void merge(const MergeCall& call);

// Slices i = 0..count-1 at raw + i * raw_stride and coded + i * coded_stride; format is the raw one.
struct CodecCall {
    Shape shape;
    std::uint8_t* raw;
    std::int64_t raw_stride;
    std::uint8_t* coded;
    std::int64_t coded_stride;
    int count;
};

bool quantise(const Level& level, const CodecCall& call);
void dequantise(const Level& level, const CodecCall& call);

}  // namespace kv
