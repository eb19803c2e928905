// CRC-32C three lanes at a time: the instruction takes three cycles but starts one each cycle, so three runs of
// kLane bytes are summed side by side and joined by tables that append kLane zero bytes to a checksum.
#include "memory.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>

#include "pool.h"

#if defined(__x86_64__)
#include <nmmintrin.h>
#define KV_CRC_TARGET __attribute__((target("sse4.2")))
#endif

namespace kv {
namespace {

constexpr std::uint32_t kPolynomial = 0x82F63B78u;  // reflected
constexpr std::size_t kLane = 1024;
constexpr std::size_t kFold = 3 * kLane;            // a copy is summed in pieces of this size, while in L1

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

// shift[k][b]: the checksum state b << 8k after kLane zero bytes. The step is linear, so four look-ups join.
struct LaneShift {
    std::array<Table, 4> tables;

    LaneShift() {
        for (int place = 0; place < 4; ++place)
            for (std::uint32_t value = 0; value < 256; ++value)
                tables[place][value] = append_zeros(value << (8 * place), kLane);
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
    static const LaneShift shift;
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
#endif

std::uint32_t state_after(const std::uint8_t* data, std::size_t size, std::uint32_t crc) {
#if defined(__x86_64__)
    if (has_crc_instruction()) return instruction_state(data, size, crc);
#endif
    return portable_state(data, size, crc);
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

std::uint64_t read_all(const std::uint8_t* data, std::size_t size) {
    constexpr std::size_t kPiece = std::size_t{1} << 20;
    constexpr std::size_t kLanes = 16;  // words of two cache lines, summed apart so that no sum waits for another
    std::atomic<std::uint64_t> total{0};
    parallel_for(static_cast<int>((size + kPiece - 1) / kPiece), [&](int item) {
        const std::uint8_t* from = data + item * kPiece;
        const std::size_t words = std::min(kPiece, size - item * kPiece) / 8;
        std::uint64_t sums[kLanes] = {};
        std::size_t i = 0;
        for (; i + kLanes <= words; i += kLanes) {
            std::uint64_t lanes[kLanes];
            std::memcpy(lanes, from + 8 * i, sizeof lanes);
            __builtin_prefetch(from + 8 * i + 4096, 0, 3);
            __builtin_prefetch(from + 8 * i + 4096 + 64, 0, 3);
            for (std::size_t lane = 0; lane < kLanes; ++lane) sums[lane] += lanes[lane];
        }
        for (; i < words; ++i) {
            std::uint64_t last;
            std::memcpy(&last, from + 8 * i, sizeof last);
            sums[0] += last;
        }
        std::uint64_t sum = 0;
        for (const std::uint64_t lane : sums) sum += lane;
        total += sum;
    });
    return total;
}

std::uint32_t crc32c(const std::uint8_t* data, std::size_t size, std::uint32_t crc) { return ~state_after(data, size, ~crc); }

std::uint32_t copy_crc32c(std::uint8_t* to, const std::uint8_t* from, std::size_t size, std::uint32_t crc) {
    std::uint32_t state = ~crc;
    for (std::size_t done = 0; done < size; done += kFold) {
        const std::size_t count = size - done < kFold ? size - done : kFold;
        std::memcpy(to + done, from + done, count);
        // The copy is summed, not its source: another process may write to the source meanwhile.
        state = state_after(to + done, count, state);
    }
    return ~state;
}

}  // namespace kv
