// CRC-32C as a running state (the checksum is its complement), and what the copies of every level need to join lanes.
//
// Plain data and declarations only, as in task.h: files compiled with wider instructions include this.
#pragma once

#include <cstddef>
#include <cstdint>

namespace kv {

constexpr std::size_t kNearLane = 1024;  // bytes
constexpr std::size_t kPageLane = 4096;

// tables[k][b] is the state b << 8k after a lane of zero bytes; the exclusive or of four entries is that of any state.
struct LaneTables {
    std::uint32_t tables[4][256];
};

const LaneTables& near_lane_tables();
const LaneTables& page_lane_tables();

// The state after `size` more bytes; ~0 to begin.
std::uint32_t crc_state(const std::uint8_t* data, std::size_t size, std::uint32_t state);

}  // namespace kv
