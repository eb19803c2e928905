// Copies of many slices on the pool, and the read that other kernels are measured against.
#include "memory.h"

#include <algorithm>
#include <atomic>
#include <cstring>

#include "copies.h"
#include "pool.h"

namespace kv {
namespace {

constexpr std::size_t kPiece = std::size_t{256} << 10;  // threads share copies in pieces of this size
constexpr std::size_t kTurn = std::size_t{32} << 10;    // and take small ones together, as many as make this

// Sum of the whole 64-bit words of `block`; `next` is what will be read after it.
std::uint64_t sum_words(const Span& block, const std::uint8_t* next) {
    constexpr std::size_t kLanes = 16;    // words of two cache lines, summed apart so that no sum waits for another
    constexpr std::size_t kAhead = 4096;  // bytes
    const std::size_t words = block.size / 8;
    std::uint64_t sums[kLanes] = {};
    std::size_t i = 0;
    for (; i + kLanes <= words; i += kLanes) {
        std::uint64_t lanes[kLanes];
        std::memcpy(lanes, block.data + 8 * i, sizeof lanes);
        const std::size_t ahead = 8 * i + kAhead;
        const std::uint8_t* const at = ahead < block.size ? block.data + ahead : next + (ahead - block.size);
        __builtin_prefetch(at, 0, 3);
        __builtin_prefetch(at + 64, 0, 3);
        for (std::size_t lane = 0; lane < kLanes; ++lane) sums[lane] += lanes[lane];
    }
    for (; i < words; ++i) {
        std::uint64_t last;
        std::memcpy(&last, block.data + 8 * i, sizeof last);
        sums[0] += last;
    }
    std::uint64_t sum = 0;
    for (const std::uint64_t lane : sums) sum += lane;
    return sum;
}

// Copy `runs` runs of `run_bytes` each, which `place` finds by number, shared by threads in pieces of at most kPiece.
template <typename Place>
void copy_runs(std::size_t runs, std::size_t run_bytes, int threads, const Place& place) {
    const std::size_t pieces = (run_bytes + kPiece - 1) / kPiece, items = runs * pieces, total = runs * run_bytes;
    const CopyForm& form = chosen_copy(false, total);
    // Small runs are taken many at a time: a thread's turn costs as much as a copy of some hundred bytes.
    const std::size_t turn = std::max<std::size_t>(1, kTurn / std::max<std::size_t>(1, std::min(kPiece, run_bytes)));
    const std::size_t turns = (items + turn - 1) / turn;
    std::atomic<std::size_t> next{0};
    const auto lane = [&](int) {
        for (std::size_t taken = next.fetch_add(1); taken < turns; taken = next.fetch_add(1))
            for (std::size_t item = taken * turn; item < std::min(items, (taken + 1) * turn); ++item) {
                const SlicesCopy run = place(item / pieces);
                const std::size_t begin = item % pieces * kPiece;
                form.copy(run.to + begin, run.from + begin, std::min(kPiece, run_bytes - begin));
            }
    };
    const std::size_t lanes = std::min<std::size_t>(threads, turns);
    if (total >= kLargeCopy && lanes > 1)
        parallel_for(static_cast<int>(lanes), lane);
    else
        lane(0);
}

}  // namespace

std::uint64_t read_blocks(const std::vector<Span>& blocks) {
    constexpr std::size_t kPiece = std::size_t{1} << 20;
    // Pieces are cut at whole blocks, so that a piece of small blocks is still worth a thread's while.
    std::vector<std::size_t> ends;
    std::size_t held = 0;
    for (std::size_t i = 0; i < blocks.size(); ++i)
        if ((held += blocks[i].size) >= kPiece || i + 1 == blocks.size()) {
            ends.push_back(i + 1);
            held = 0;
        }
    std::atomic<std::uint64_t> total{0};
    parallel_for(static_cast<int>(ends.size()), [&](int item) {
        std::uint64_t sum = 0;
        for (std::size_t i = item == 0 ? 0 : ends[item - 1]; i < ends[item]; ++i)
            sum += sum_words(blocks[i], i + 1 < blocks.size() ? blocks[i + 1].data : blocks[i].data);
        total += sum;
    });
    return total;
}

std::uint64_t read_all(const std::uint8_t* data, std::size_t size) {
    constexpr std::size_t kPiece = std::size_t{1} << 20;
    std::vector<Span> pieces;
    for (std::size_t at = 0; at < size; at += kPiece) pieces.push_back({data + at, std::min(kPiece, size - at)});
    return read_blocks(pieces);
}

std::uint32_t copy_crc32c(std::uint8_t* to, const std::uint8_t* from, std::size_t size, std::uint32_t crc) {
    return ~chosen_copy(true, size).sum(to, from, size, ~crc);
}

void copy_slices(const std::vector<SlicesCopy>& blocks, const SlicesShape& shape, int threads) {
    const bool packed = shape.to_stride == shape.slice_bytes && shape.from_stride == shape.slice_bytes;
    const std::size_t runs = packed ? 1 : shape.slices, run_bytes = shape.slices * shape.slice_bytes / runs;
    copy_runs(blocks.size() * runs, run_bytes, threads, [&](std::size_t item) {
        const SlicesCopy& block = blocks[item / runs];
        const std::size_t run = item % runs;
        return SlicesCopy{block.to + run * shape.to_stride, block.from + run * shape.from_stride};
    });
}

void copy_pieces(const std::int64_t* to, const std::int64_t* from, std::size_t count, std::size_t piece_bytes, int threads) {
    copy_runs(count, piece_bytes, threads, [&](std::size_t item) {
        return SlicesCopy{reinterpret_cast<std::uint8_t*>(to[item]), reinterpret_cast<const std::uint8_t*>(from[item])};
    });
}

void copy_slices_crc32c(const std::vector<SlicesCopy>& blocks, const SlicesShape& shape, std::uint32_t* crcs) {
    const std::size_t items = blocks.size() * shape.slices, total = items * shape.slice_bytes;
    const CopyForm& form = chosen_copy(true, total);
    const auto one = [&](int item) {
        const SlicesCopy& block = blocks[item / shape.slices];
        const std::size_t slice = item % shape.slices;
        crcs[item] = ~form.sum(block.to + slice * shape.to_stride, block.from + slice * shape.from_stride,
                               shape.slice_bytes, ~0u);
    };
    if (total >= kLargeCopy) {
        parallel_for(static_cast<int>(items), one);
        return;
    }
    // Waking a second thread would cost more than it saves.
    for (std::size_t item = 0; item < items; ++item) one(static_cast<int>(item));
}

}  // namespace kv
