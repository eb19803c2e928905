// Where the index keeps what a reader in another process needs to match: one piece of memory, laid out from its size alone.
//
//   header | names of namespaces, 32 bytes each | tables | namespace of each slot | residency | keys
//
// A table of C entries lies C entries behind where tables begin, so each has a place of its own and none is used twice.
// The memory is a memfd where readers are to map it, else private; it takes pages as they are touched.
//
// Readers hold no lock. What spans more than one word changes while `changes` is odd (a sequence lock: H. Boehm, "Can
// seqlocks get along with programming language memory models?", MSPC 2012): a reader that saw an odd number, or
// another one after it had looked, looks again. Everything they may read is written by release stores and read by
// acquire loads, which cost nothing on x86.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

namespace kv {

inline constexpr std::size_t kKeyBytes = 32, kKeyWords = kKeyBytes / 8;
inline constexpr std::uint64_t kIndexMagic = 0x3158444956534B54;  // "TKSVIDX1": another layout has another number
// In the place of an entry of a table that has gone over to a larger one.
inline constexpr std::uint32_t kMoved = 0xFFFFFFFF;

// A word that readers of other processes may look at meanwhile.
template <typename T>
void publish(T& word, T value) {
    std::atomic_ref<T>(word).store(value, std::memory_order_release);
}
template <typename T>
T published(const T& word) {
    return std::atomic_ref<T>(const_cast<T&>(word)).load(std::memory_order_acquire);
}

// 32 bits of the hash of a slot's name, and the slot + 1 (0 for an entry that is free).
struct Entry {
    std::uint32_t tag, place;
    static Entry of(std::uint64_t word) { return {static_cast<std::uint32_t>(word), static_cast<std::uint32_t>(word >> 32)}; }
    std::uint64_t word() const { return std::uint64_t{place} << 32 | tag; }
};

struct IndexHeader {
    std::uint64_t magic, slots, names;  // how many there are room for
    std::uint64_t seeds[5];             // clients choose keys; who can not map this does not choose who shares a place
    std::uint64_t changes;
    std::uint64_t now, old;  // entries of the table, and of the one that goes over to it; 0 for none
    std::uint64_t readable;  // residency bits that a reader may answer for; 0: ask the daemon
};

std::uint32_t tag_of(const std::uint64_t* seeds, std::uint32_t space, const std::uint8_t* key);

// Offsets, and bytes in all, for so many slots and names.
struct IndexShape {
    IndexShape(std::size_t slots, std::size_t names);
    std::size_t slots, names;
    std::size_t entries_max;  // of the largest table
    std::size_t name, table, spaces, residency, keys, bytes;
};

class IndexMemory {
public:
    // With `shared` a memfd, sealed: nobody shrinks or grows it, or maps it writable after this. Throws bad_alloc.
    IndexMemory(std::size_t slots, std::size_t names, bool shared);
    ~IndexMemory();
    IndexMemory(const IndexMemory&) = delete;
    IndexMemory& operator=(const IndexMemory&) = delete;

    const IndexShape shape;
    int fd() const { return fd_; }  // -1 where it is private; stays this object's
    IndexHeader& header() const { return *static_cast<IndexHeader*>(base_); }
    std::uint64_t* table(std::size_t entries) const { return at<std::uint64_t>(shape.table) + entries; }
    void forget_table(std::size_t entries) const;  // its pages go back to the system
    template <typename T>
    T* at(std::size_t offset) const {
        return reinterpret_cast<T*>(static_cast<std::uint8_t*>(base_) + offset);
    }

private:
    void* base_ = nullptr;
    int fd_ = -1;
};

// What is done while one of these lives is one step for readers. Of one thread at a time; may not be nested.
class Change {
public:
    explicit Change(IndexHeader& header) : header_(header) {
        std::atomic_ref<std::uint64_t>(header_.changes).store(header_.changes + 1, std::memory_order_relaxed);
    }
    ~Change() { publish(header_.changes, header_.changes + 1); }
    Change(const Change&) = delete;
    Change& operator=(const Change&) = delete;

private:
    IndexHeader& header_;
};

}  // namespace kv
