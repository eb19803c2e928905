// The prefetch of the next tile while one is read. Included inside a level's own namespace, before attend.inc.h.
//
// A tile is one run of bytes and is prefetched in order, so that the processor's own prefetcher joins in. Panels, which
// read, fetch a little less than they read; what lies between panels (scales, weights, sums of a row) reads nothing
// from memory and fetches a step a row, so that memory does not rest: int8 is 4 to 13 % faster with the steps.

inline void prefetch(const std::uint8_t* at, std::ptrdiff_t bytes) {
    for (std::ptrdiff_t i = 0; i < bytes; i += 64) __builtin_prefetch(at + i, 0, KV_PREFETCH_LOCALITY);
}

struct Ahead {
    static constexpr std::ptrdiff_t kStep = 256;  // bytes: about what memory gives meanwhile; 512 is no faster

    const std::uint8_t* at;  // what is fetched next
    std::ptrdiff_t share;    // of the bytes that panels read, in 256ths; 0 when there is no next tile

    // The share that, beside so many steps, fetches `size` bytes while panels read as many.
    static std::ptrdiff_t share_beside(int steps, std::ptrdiff_t size) {
        const std::ptrdiff_t left = size - steps * kStep;
        return left <= 0 ? 1 : (left * 256 + size - 1) / size;
    }

    // By how much a panel that reads `bytes` at a time moves on each time.
    std::ptrdiff_t pace(std::ptrdiff_t bytes) const { return bytes * share >> 8; }

    void step() {
        if (share == 0) return;
        prefetch(at, kStep);
        at += kStep;
    }
};
