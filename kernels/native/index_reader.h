// The index of a daemon, as another process on its host reads it: without a call or a lock, and within its bounds
// whatever it reads there.
#pragma once

#include <cstddef>
#include <cstdint>

#include "index_memory.h"

namespace kv {

class IndexReader {
public:
    // Reads memory of this shape at `base`, which outlives it.
    IndexReader(const void* base, const IndexShape& shape) : base_(base), shape_(shape) {}

    // Residency of the longest run of blocks, from the first key on, that can be read; its length. `name` is that of the
    // namespace: where the number is another's by now, nothing is found. A run that is shorter than the keys may be so
    // because the index changed again and again meanwhile: who wants to know asks the daemon.
    std::size_t match(std::uint32_t space, const std::uint8_t* name, const std::uint8_t* const* keys, std::size_t count, char* found) const;

private:
    struct Table {
        const std::uint64_t* entries;
        std::size_t mask;
    };
    Table table_of(std::uint64_t entries) const;
    std::uint8_t residency_of(std::uint32_t tag, std::uint32_t space, const std::uint8_t* key) const;
    std::size_t run(std::uint32_t space, const std::uint8_t* const* keys, std::size_t count, char* found) const;
    bool is(std::size_t offset, const std::uint8_t* bytes) const;
    template <typename T>
    const T* at(std::size_t offset) const {
        return reinterpret_cast<const T*>(static_cast<const std::uint8_t*>(base_) + offset);
    }
    const IndexHeader& header() const { return *at<IndexHeader>(0); }

    const void* base_;
    IndexShape shape_;
};

// The mapping of an index, and what reads it.
class MappedIndex {
public:
    // Maps the memory of `fd`, which stays the caller's. Throws invalid_argument for what is no index of this layout.
    explicit MappedIndex(int fd);
    ~MappedIndex();
    MappedIndex(const MappedIndex&) = delete;
    MappedIndex& operator=(const MappedIndex&) = delete;
    const IndexReader& reader() const { return reader_; }

private:
    const IndexShape shape_;
    void* const base_;
    const IndexReader reader_;
};

}  // namespace kv
