// CRC-32C three lanes at a time: the instruction takes three cycles but starts one each cycle, so three runs of
// bytes are summed side by side and joined by tables that append a lane of zero bytes to a checksum.
#include "crc.h"

#include <array>
#include <cstring>

#include "memory.h"

#if defined(__x86_64__)
#include <immintrin.h>
#define KV_CRC_TARGET __attribute__((target("sse4.2")))
#endif

namespace kv {
namespace {

constexpr std::uint32_t kPolynomial = 0x82F63B78u;  // reflected
constexpr std::size_t kLane = kNearLane;

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

// The step from a state to the one after a lane of zero bytes is linear: it is computed for single bits, and four
// look-ups join.
LaneTables tables_of(std::size_t lane_bytes) {
    LaneTables made{};
    for (int place = 0; place < 4; ++place)
        for (int bit = 0; bit < 8; ++bit) {
            const std::uint32_t alone = append_zeros(1u << (8 * place + bit), lane_bytes);
            for (std::uint32_t value = 0; value < 256; ++value)
                if (value >> bit & 1u) made.tables[place][value] ^= alone;
        }
    return made;
}

std::uint32_t portable_state(const std::uint8_t* data, std::size_t size, std::uint32_t crc) {
    for (std::size_t i = 0; i < size; ++i) crc = (crc >> 8) ^ kBytes[(crc ^ data[i]) & 0xFFu];
    return crc;
}

#if defined(__x86_64__)
std::uint32_t after_lane(const LaneTables& of, std::uint32_t crc) {
    return of.tables[0][crc & 0xFFu] ^ of.tables[1][(crc >> 8) & 0xFFu] ^ of.tables[2][(crc >> 16) & 0xFFu] ^ of.tables[3][crc >> 24];
}

std::uint64_t word(const std::uint8_t* data) {
    std::uint64_t value;
    std::memcpy(&value, data, sizeof value);
    return value;
}

KV_CRC_TARGET std::uint32_t instruction_state(const std::uint8_t* data, std::size_t size, std::uint32_t crc) {
    const LaneTables& near = near_lane_tables();
    for (; size >= 3 * kLane; size -= 3 * kLane, data += 3 * kLane) {
        std::uint64_t a = crc, b = 0, c = 0;
        const std::uint8_t* const next = size >= 6 * kLane ? data + 3 * kLane : data;
        for (std::size_t i = 0; i < kLane; i += 8) {
            if (i % 64 == 0) {
                // Three runs in a page follow no pattern that every prefetcher knows: the next triple is asked for.
                __builtin_prefetch(next + i);
                __builtin_prefetch(next + kLane + i);
                __builtin_prefetch(next + 2 * kLane + i);
            }
            a = _mm_crc32_u64(a, word(data + i));
            b = _mm_crc32_u64(b, word(data + kLane + i));
            c = _mm_crc32_u64(c, word(data + 2 * kLane + i));
        }
        crc = after_lane(near, after_lane(near, static_cast<std::uint32_t>(a)) ^ static_cast<std::uint32_t>(b)) ^
              static_cast<std::uint32_t>(c);
    }
    std::uint64_t state = crc;
    for (; size >= 8; size -= 8, data += 8) state = _mm_crc32_u64(state, word(data));
    crc = static_cast<std::uint32_t>(state);
    for (; size > 0; --size, ++data) crc = _mm_crc32_u8(crc, *data);
    return crc;
}
#endif

}  // namespace

const LaneTables& near_lane_tables() {
    static const LaneTables made = tables_of(kNearLane);
    return made;
}

const LaneTables& page_lane_tables() {
    static const LaneTables made = tables_of(kPageLane);
    return made;
}

bool has_crc_instruction() {
#if defined(__x86_64__)
    static const bool has = __builtin_cpu_supports("sse4.2");
    return has;
#else
    return false;
#endif
}

std::uint32_t crc_state(const std::uint8_t* data, std::size_t size, std::uint32_t state) {
#if defined(__x86_64__)
    if (has_crc_instruction()) return instruction_state(data, size, state);
#endif
    return portable_state(data, size, state);
}

std::uint32_t crc32c(const std::uint8_t* data, std::size_t size, std::uint32_t crc) { return ~crc_state(data, size, ~crc); }

}  // namespace kv
