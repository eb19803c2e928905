// The copies that a level offers. Included inside the level's own namespace; `Wide` is the level's vector of bytes.
//
// A copy with its checksum loads each vector once, stores it and sums the register: what is summed is what was written,
// whatever another process does to the source meanwhile. Streamed stores go past the caches: the target is not read
// first to be overwritten. How far apart three lanes may lie differs: lanes a page apart feed three prefetchers, but
// on Zen 3 they fall into one write-combining buffer (0.9 GB/s); which is best is measured (copies.cpp).

constexpr std::size_t kBounce = 3 * kNearLane;  // bytes that are gathered in L1 before they are streamed out in order

inline std::uint32_t after_lane(const LaneTables& of, std::uint32_t crc) {
    return of.tables[0][crc & 0xFFu] ^ of.tables[1][(crc >> 8) & 0xFFu] ^ of.tables[2][(crc >> 16) & 0xFFu] ^ of.tables[3][crc >> 24];
}

template <bool kStream>
inline void put(std::uint8_t* to, Wide::V value) {
    if constexpr (kStream)
        Wide::stream(to, value);
    else
        Wide::store(to, value);
}

// Copy whole triples of lanes and return how many bytes that were; `to` is aligned to a vector where it is streamed to.
template <std::size_t kLane, bool kStream>
inline std::size_t sum_lanes(std::uint8_t* to, const std::uint8_t* from, std::size_t size, std::uint32_t& crc) {
    const LaneTables& tables = kLane == kNearLane ? near_lane_tables() : page_lane_tables();
    std::size_t done = 0;
    for (; size - done >= 3 * kLane; done += 3 * kLane) {
        std::uint64_t a = crc, b = 0, c = 0;
        for (std::size_t i = done; i < done + kLane; i += Wide::N) {
            if (kLane == kNearLane && size - done >= 6 * kLane) {
                // Three runs in a page follow no pattern that every prefetcher knows: the next triple is asked for.
                __builtin_prefetch(from + 3 * kLane + i);
                __builtin_prefetch(from + 4 * kLane + i);
                __builtin_prefetch(from + 5 * kLane + i);
            }
            const Wide::V x = Wide::load(from + i), y = Wide::load(from + kLane + i), z = Wide::load(from + 2 * kLane + i);
            put<kStream>(to + i, x);
            put<kStream>(to + kLane + i, y);
            put<kStream>(to + 2 * kLane + i, z);
            Wide::add_to(x, y, z, a, b, c);
        }
        crc = after_lane(tables, after_lane(tables, static_cast<std::uint32_t>(a)) ^ static_cast<std::uint32_t>(b)) ^
              static_cast<std::uint32_t>(c);
    }
    return done;
}

template <bool kStream>
inline std::size_t copy_in_order(std::uint8_t* to, const std::uint8_t* from, std::size_t size) {
    std::size_t done = 0;
    for (; size - done >= 2 * Wide::N; done += 2 * Wide::N) {
        const Wide::V x = Wide::load(from + done), y = Wide::load(from + done + Wide::N);
        put<kStream>(to + done, x);
        put<kStream>(to + done + Wide::N, y);
    }
    return done;
}

inline void copy_few(std::uint8_t* to, const std::uint8_t* from, std::size_t size) {
    if (size > 0) std::memcpy(to, from, size);  // an empty buffer may lie nowhere
}

// Copy up to where `to` is aligned to a cache line; returns how many bytes.
inline std::size_t copy_head(std::uint8_t* to, const std::uint8_t* from, std::size_t size) {
    const std::size_t over = reinterpret_cast<std::uintptr_t>(to) % 64, head = over == 0 ? 0 : 64 - over;
    const std::size_t count = head < size ? head : size;
    copy_few(to, from, count);
    return count;
}

// Copy and sum what no whole vector or triple is left of, in order.
inline std::uint32_t sum_rest(std::uint8_t* to, const std::uint8_t* from, std::size_t size, std::uint32_t crc) {
    copy_few(to, from, size);
    return crc_state(to, size, crc);
}

template <std::size_t kLane, bool kStream>
std::uint32_t sum_by_lanes(std::uint8_t* to, const std::uint8_t* from, std::size_t size, std::uint32_t crc) {
    std::size_t done = kStream ? copy_head(to, from, size) : 0;
    crc = crc_state(to, done, crc);
    done += sum_lanes<kLane, kStream>(to + done, from + done, size - done, crc);
    if (kLane != kNearLane) done += sum_lanes<kNearLane, kStream>(to + done, from + done, size - done, crc);
    // Streamed stores are ordered by nothing else: whoever is told of the copy must find it written.
    if (kStream) Wide::fence();
    return sum_rest(to + done, from + done, size - done, crc);
}

std::uint32_t sum_bounced(std::uint8_t* to, const std::uint8_t* from, std::size_t size, std::uint32_t crc) {
    alignas(64) std::uint8_t held[kBounce];
    std::size_t done = copy_head(to, from, size);
    crc = crc_state(to, done, crc);
    for (; size - done >= kBounce; done += kBounce) {
        sum_lanes<kNearLane, false>(held, from + done, kBounce, crc);
        copy_in_order<true>(to + done, held, kBounce);
    }
    Wide::fence();
    return sum_rest(to + done, from + done, size - done, crc);
}

void copy_streamed(std::uint8_t* to, const std::uint8_t* from, std::size_t size) {
    std::size_t done = copy_head(to, from, size);
    done += copy_in_order<true>(to + done, from + done, size - done);
    Wide::fence();
    copy_few(to + done, from + done, size - done);
}

template <std::size_t kLane>
void copy_by_lanes(std::uint8_t* to, const std::uint8_t* from, std::size_t size) {
    std::size_t done = copy_head(to, from, size);
    for (; size - done >= 3 * kLane; done += 2 * kLane)
        for (std::size_t end = done + kLane; done < end; done += Wide::N) {
            const Wide::V x = Wide::load(from + done), y = Wide::load(from + kLane + done), z = Wide::load(from + 2 * kLane + done);
            Wide::stream(to + done, x);
            Wide::stream(to + kLane + done, y);
            Wide::stream(to + 2 * kLane + done, z);
        }
    Wide::fence();
    copy_few(to + done, from + done, size - done);
}

void copy_bounced(std::uint8_t* to, const std::uint8_t* from, std::size_t size) {
    alignas(64) std::uint8_t held[kBounce];
    std::size_t done = copy_head(to, from, size);
    for (; size - done >= kBounce; done += kBounce) {
        std::memcpy(held, from + done, kBounce);
        copy_in_order<true>(to + done, held, kBounce);
    }
    Wide::fence();
    copy_few(to + done, from + done, size - done);
}

// Null marks what makes no sense: lanes are for sums, and a sum in one lane is three times as slow.
const CopyForm kCopies[] = {
    {"lanes", false, sum_by_lanes<kNearLane, false>, nullptr},
    {"streamed", true, nullptr, copy_streamed},
    {"streamed near lanes", true, sum_by_lanes<kNearLane, true>, copy_by_lanes<kNearLane>},
    {"streamed page lanes", true, sum_by_lanes<kPageLane, true>, copy_by_lanes<kPageLane>},
    {"bounced", true, sum_bounced, copy_bounced},
};
