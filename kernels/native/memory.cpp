// CRC-32C three lanes at a time: the instruction takes three cycles but starts one each cycle, so three runs of
// bytes are summed side by side and joined by tables that append a lane of zero bytes to a checksum.
//
// Large copies load each vector once, store it past the caches and sum the register: what is summed is what was
// written, whatever another process does to the source meanwhile, and the target is not read first to be overwritten.
#include "memory.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>

#include "pool.h"

#if defined(__x86_64__)
#include <immintrin.h>
#define KV_CRC_TARGET __attribute__((target("sse4.2")))
#define KV_STREAM_TARGET __attribute__((target("sse4.2,avx2")))
#endif

namespace kv {
namespace {

constexpr std::uint32_t kPolynomial = 0x82F63B78u;  // reflected
constexpr std::size_t kLane = 1024;
constexpr std::size_t kPage = 4096;                 // a lane of a streamed copy: each is a page of its own
constexpr std::size_t kFold = 3 * kLane;            // a copy is summed in pieces of this size, while in L1
constexpr std::size_t kPiece = std::size_t{256} << 10;    // threads share copies in pieces of this size
constexpr std::size_t kStreamMin = std::size_t{1} << 20;  // copies of less than this stay in the caches

using Table = std::array<std::uint32_t, 256>;

constexpr Table byte_table() {
    Table table{};
    for (std::uint32_t i = 0; i < 256; ++i) {
        std::uint32_t crc = i;
        for (int bit = 0; bit < 8; ++bit) crc = (crc >> 1) ^ ((crc & 1u) ? kPolynomial : 0u);
        table[i] = crc;
    }
    return table;
}

constexpr Table kBytes = byte_table();

std::uint32_t append_zeros(std::uint32_t crc, std::size_t count) {
    for (std::size_t i = 0; i < count; ++i) crc = (crc >> 8) ^ kBytes[crc & 0xFFu];
    return crc;
}

// tables[k][b]: the checksum state b << 8k after kBytesOfLane zero bytes. The step is linear: it is computed for
// single bits, and four look-ups join.
template <std::size_t kBytesOfLane>
struct LaneShift {
    std::array<Table, 4> tables{};

    LaneShift() {
        for (int place = 0; place < 4; ++place)
            for (int bit = 0; bit < 8; ++bit) {
                const std::uint32_t alone = append_zeros(1u << (8 * place + bit), kBytesOfLane);
                for (std::uint32_t value = 0; value < 256; ++value)
                    if (value >> bit & 1u) tables[place][value] ^= alone;
            }
    }

    std::uint32_t operator()(std::uint32_t crc) const {
        return tables[0][crc & 0xFFu] ^ tables[1][(crc >> 8) & 0xFFu] ^ tables[2][(crc >> 16) & 0xFFu] ^ tables[3][crc >> 24];
    }
};

std::uint32_t portable_state(const std::uint8_t* data, std::size_t size, std::uint32_t crc) {
    for (std::size_t i = 0; i < size; ++i) crc = (crc >> 8) ^ kBytes[(crc ^ data[i]) & 0xFFu];
    return crc;
}

#if defined(__x86_64__)
std::uint64_t word(const std::uint8_t* data) {
    std::uint64_t value;
    std::memcpy(&value, data, sizeof value);
    return value;
}

KV_CRC_TARGET std::uint32_t instruction_state(const std::uint8_t* data, std::size_t size, std::uint32_t crc) {
    static const LaneShift<kLane> shift;
    for (; size >= 3 * kLane; size -= 3 * kLane, data += 3 * kLane) {
        std::uint64_t a = crc, b = 0, c = 0;
        for (std::size_t i = 0; i < kLane; i += 8) {
            a = _mm_crc32_u64(a, word(data + i));
            b = _mm_crc32_u64(b, word(data + kLane + i));
            c = _mm_crc32_u64(c, word(data + 2 * kLane + i));
        }
        crc = shift(shift(static_cast<std::uint32_t>(a)) ^ static_cast<std::uint32_t>(b)) ^ static_cast<std::uint32_t>(c);
    }
    std::uint64_t state = crc;
    for (; size >= 8; size -= 8, data += 8) state = _mm_crc32_u64(state, word(data));
    crc = static_cast<std::uint32_t>(state);
    for (; size > 0; --size, ++data) crc = _mm_crc32_u8(crc, *data);
    return crc;
}

// Store 32 bytes past the caches and add them to a checksum. The empty assembly keeps the compiler from reading the
// source a second time.
KV_STREAM_TARGET __attribute__((always_inline)) inline std::uint64_t stream32(std::uint8_t* to, const std::uint8_t* from,
                                                                              std::uint64_t state) {
    __m256i value = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
    __asm__ volatile("" : "+x"(value));
    _mm256_stream_si256(reinterpret_cast<__m256i*>(to), value);
    const __m128i low = _mm256_castsi256_si128(value), high = _mm256_extracti128_si256(value, 1);
    state = _mm_crc32_u64(state, static_cast<std::uint64_t>(_mm_cvtsi128_si64(low)));
    state = _mm_crc32_u64(state, static_cast<std::uint64_t>(_mm_extract_epi64(low, 1)));
    state = _mm_crc32_u64(state, static_cast<std::uint64_t>(_mm_cvtsi128_si64(high)));
    return _mm_crc32_u64(state, static_cast<std::uint64_t>(_mm_extract_epi64(high, 1)));
}

// Copy whole triples of lanes and return how many bytes that were; `to` is aligned to 32 bytes.
template <std::size_t kBytesOfLane>
KV_STREAM_TARGET std::size_t stream_lanes(std::uint8_t* to, const std::uint8_t* from, std::size_t size, std::uint32_t& crc) {
    static const LaneShift<kBytesOfLane> shift;
    constexpr std::size_t kTriple = 3 * kBytesOfLane;
    std::size_t done = 0;
    for (; size - done >= kTriple; done += kTriple) {
        std::uint8_t* const t = to + done;
        const std::uint8_t* const f = from + done;
        std::uint64_t a = crc, b = 0, c = 0;
        for (std::size_t i = 0; i < kBytesOfLane; i += 32) {
            a = stream32(t + i, f + i, a);
            b = stream32(t + kBytesOfLane + i, f + kBytesOfLane + i, b);
            c = stream32(t + 2 * kBytesOfLane + i, f + 2 * kBytesOfLane + i, c);
        }
        crc = shift(shift(static_cast<std::uint32_t>(a)) ^ static_cast<std::uint32_t>(b)) ^ static_cast<std::uint32_t>(c);
    }
    return done;
}

// Copy as much as goes past the caches; returns how many bytes, with `crc` the state after them.
KV_STREAM_TARGET std::size_t stream_state(std::uint8_t* to, const std::uint8_t* from, std::size_t size, std::uint32_t& crc) {
    std::size_t done = stream_lanes<kPage>(to, from, size, crc);
    done += stream_lanes<kLane>(to + done, from + done, size - done, crc);
    // Streamed stores are ordered by nothing else: whoever is told of the copy must find it written.
    _mm_sfence();
    return done;
}

KV_STREAM_TARGET void stream_copy(std::uint8_t* to, const std::uint8_t* from, std::size_t size) {
    const std::size_t head = std::min(size, (32 - reinterpret_cast<std::uintptr_t>(to) % 32) % 32);
    std::memcpy(to, from, head);
    std::size_t done = head;
    for (; size - done >= 64; done += 64) {
        const __m256i low = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + done));
        const __m256i high = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + done + 32));
        _mm256_stream_si256(reinterpret_cast<__m256i*>(to + done), low);
        _mm256_stream_si256(reinterpret_cast<__m256i*>(to + done + 32), high);
    }
    std::memcpy(to + done, from + done, size - done);
    _mm_sfence();
}
#endif

bool can_stream() {
#if defined(__x86_64__)
    static const bool can = __builtin_cpu_supports("sse4.2") && __builtin_cpu_supports("avx2");
    return can;
#else
    return false;
#endif
}

std::uint32_t state_after(const std::uint8_t* data, std::size_t size, std::uint32_t crc) {
#if defined(__x86_64__)
    if (has_crc_instruction()) return instruction_state(data, size, crc);
#endif
    return portable_state(data, size, crc);
}

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

}  // namespace

bool has_crc_instruction() {
#if defined(__x86_64__)
    static const bool has = __builtin_cpu_supports("sse4.2");
    return has;
#else
    return false;
#endif
}

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

std::uint32_t crc32c(const std::uint8_t* data, std::size_t size, std::uint32_t crc) { return ~state_after(data, size, ~crc); }

namespace {

std::uint32_t copy_state(std::uint8_t* to, const std::uint8_t* from, std::size_t size, std::uint32_t state, bool stream) {
    std::size_t done = 0;
#if defined(__x86_64__)
    if (stream && reinterpret_cast<std::uintptr_t>(to) % 32 == 0) done = stream_state(to, from, size, state);
#endif
    for (; done < size; done += kFold) {
        const std::size_t count = std::min(size - done, kFold);
        std::memcpy(to + done, from + done, count);
        // The copy is summed, not its source: another process may write to the source meanwhile.
        state = state_after(to + done, count, state);
    }
    return state;
}

void copy_piece(std::uint8_t* to, const std::uint8_t* from, std::size_t size, bool stream) {
#if defined(__x86_64__)
    if (stream) {
        stream_copy(to, from, size);
        return;
    }
#endif
    std::memcpy(to, from, size);
}

}  // namespace

std::uint32_t copy_crc32c(std::uint8_t* to, const std::uint8_t* from, std::size_t size, std::uint32_t crc) {
    return ~copy_state(to, from, size, ~crc, size >= kStreamMin && can_stream());
}

void copy_slices(const std::vector<SlicesCopy>& blocks, const SlicesShape& shape, int threads) {
    const bool packed = shape.to_stride == shape.slice_bytes && shape.from_stride == shape.slice_bytes;
    const std::size_t runs = packed ? 1 : shape.slices, run_bytes = shape.slices * shape.slice_bytes / runs;
    const std::size_t pieces = (run_bytes + kPiece - 1) / kPiece, items = blocks.size() * runs * pieces;
    const std::size_t total = blocks.size() * runs * run_bytes;
    const bool stream = total >= kStreamMin && can_stream();
    std::atomic<std::size_t> next{0};
    const auto lane = [&](int) {
        for (std::size_t item = next.fetch_add(1); item < items; item = next.fetch_add(1)) {
            const SlicesCopy& block = blocks[item / pieces / runs];
            const std::size_t run = item / pieces % runs, begin = item % pieces * kPiece;
            copy_piece(block.to + run * shape.to_stride + begin, block.from + run * shape.from_stride + begin,
                       std::min(kPiece, run_bytes - begin), stream);
        }
    };
    const std::size_t lanes = std::min<std::size_t>(threads, items);
    if (total >= kStreamMin && lanes > 1)
        parallel_for(static_cast<int>(lanes), lane);
    else
        lane(0);
}

void copy_slices_crc32c(const std::vector<SlicesCopy>& blocks, const SlicesShape& shape, std::uint32_t* crcs) {
    const std::size_t items = blocks.size() * shape.slices, total = items * shape.slice_bytes;
    const bool stream = total >= kStreamMin && can_stream();
    const auto one = [&](int item) {
        const SlicesCopy& block = blocks[item / shape.slices];
        const std::size_t slice = item % shape.slices;
        crcs[item] = ~copy_state(block.to + slice * shape.to_stride, block.from + slice * shape.from_stride,
                                 shape.slice_bytes, ~0u, stream);
    };
    if (total >= kStreamMin) {
        parallel_for(static_cast<int>(items), one);
        return;
    }
    // Waking a second thread would cost more than it saves.
    for (std::size_t item = 0; item < items; ++item) one(static_cast<int>(item));
}

}  // namespace kv
