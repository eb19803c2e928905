// The index of blocks: a slot number a block, an array a field, and one hash table from (namespace, key) to slot.
//
// What it means is said by kvstore/store/columns/index.py, which is the same in Python and what this is tested against.
// Nothing here takes a lock: the store's lock guards all of it. Arrays are reserved at their full length and take
// memory as they are touched, so that they never move: whoever holds a view of one sees every slot that comes later.
#pragma once

#include <sys/mman.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <new>
#include <vector>

#include "index_memory.h"

namespace kv {

inline constexpr std::int32_t kNone = -1, kUnknown = -2, kUnlisted = -3;
inline constexpr int kIndexTiers = 8, kTierBits = 4, kKinds = 4;
// Slots of an index: 134 million; and namespaces whose numbers readers in other processes know. Address space is what
// this costs, and nothing else.
inline constexpr std::size_t kSlotsMax = std::size_t{1} << 27, kNamesMax = std::size_t{1} << 20;
// In the namespace column of a slot that is free.
inline constexpr std::uint32_t kFree = 0xFFFFFFFF;

// One field of all slots, zeros at first. Its memory is its own, or a part of the index's.
template <typename T>
class Column {
public:
    Column() = default;
    Column(T* data, std::size_t count) : data_(data), bytes_(count * sizeof(T)), own_(false) {}
    explicit Column(std::size_t count) : bytes_(count * sizeof(T)) {
        void* const at = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (at == MAP_FAILED) throw std::bad_alloc();
        data_ = static_cast<T*>(at);
    }
    ~Column() {
        if (data_ != nullptr && own_) munmap(data_, bytes_);
    }
    Column(Column&& other) noexcept : data_(other.data_), bytes_(other.bytes_), own_(other.own_) { other.data_ = nullptr; }
    Column& operator=(Column&&) = delete;
    Column(const Column&) = delete;

    T& operator[](std::size_t slot) { return data_[slot]; }
    const T& operator[](std::size_t slot) const { return data_[slot]; }
    T* data() { return data_; }
    const T* data() const { return data_; }
    std::size_t size() const { return bytes_ / sizeof(T); }

private:
    T* data_ = nullptr;
    std::size_t bytes_ = 0;
    bool own_ = true;
};

union Key {
    std::uint8_t bytes[kKeyBytes];
    std::uint64_t words[kKeyWords];
};

// One block that a storage tier was found to hold at a start.
struct Recovered {
    const std::uint8_t *key, *parent;
    std::uint32_t place;
    std::uint8_t kind;
};

// What came of them: positions that were refused, slots of all others, slots that are new (ghosts included), blocks that
// were on no tier before, and how many came by kind.
struct Entered {
    std::vector<std::size_t> refused;
    std::vector<std::int32_t> slots;
    std::size_t added = 0, fresh = 0;
    std::vector<std::size_t> kinds = std::vector<std::size_t>(kKinds);
};

// Slots by (namespace, key). It grows by a second table, to which a few entries go with each one that comes: no call
// pays for all of them. Entries have 32 bits of the hash beside the slot; where they agree, the key's column decides.
// What changes it is part of a Change of its owner's.
class SlotTable {
public:
    explicit SlotTable(IndexMemory& memory);
    std::int32_t find(std::uint32_t tag, std::uint32_t space, const std::uint8_t* key, const Column<std::uint32_t>& spaces,
                      const Column<Key>& keys) const;
    void prefetch(std::uint32_t tag) const { __builtin_prefetch(&now_.entries[tag & now_.mask]); }
    // A slot whose tag is this one, or kNone: what find is likely to look at.
    std::int32_t likely(std::uint32_t tag) const;
    void insert(std::uint32_t tag, std::int32_t slot);
    void erase(std::uint32_t tag, std::int32_t slot);
    std::size_t bytes() const { return (now_.capacity() + old_.capacity()) * sizeof(Entry); }

private:
    struct Table {
        std::uint64_t* entries = nullptr;
        std::uint32_t mask = 0;
        std::size_t capacity() const { return entries != nullptr ? std::size_t{mask} + 1 : 0; }
        Entry operator[](std::uint32_t at) const { return Entry::of(entries[at]); }
        void put(std::uint32_t at, Entry entry) { publish(entries[at], entry.word()); }
        void add(Entry entry);
    };
    Table make(std::size_t capacity) const;
    void tell() const;  // readers, which tables there are
    void move_some();

    IndexMemory& memory_;
    Table now_, old_;  // old_ is empty but while entries go over
    std::size_t count_ = 0, moved_ = 0;
};

// A list of slots, cold to hot, linked by two columns.
struct Ends {
    std::int32_t cold = kNone, hot = kNone;
};

// Everything of one tier.
struct TierColumns {
    explicit TierColumns(std::size_t count)
        : place(count), kids(count), colder(count), hotter(count), pins(count), aside(count) {}
    Column<std::uint32_t> place;
    Column<std::int32_t> kids, colder, hotter;
    Column<std::uint32_t> pins;
    Column<std::uint8_t> aside;  // 1: what the links of the slot are of is the list of those set aside
    Ends listed, set_aside;
    bool lists = false;  // whether uses and pins keep its list here: its policy is the LRU of this index
    std::size_t pinned = 0;
    std::int64_t pinned_bytes = 0;
};

class Index {
public:
    // With `shared`, what readers in other processes need is in a memfd.
    explicit Index(const std::vector<int>& tiers, std::size_t slots_max = kSlotsMax, bool shared = false);

    std::int32_t find(std::uint32_t space, const std::uint8_t* key) const;
    // As find for each of many keys, which lie anywhere; memory is waited for once and not for each.
    void find_all(std::uint32_t space, const std::uint8_t* const* wanted, std::size_t count, std::int32_t* slots) const;
    std::int32_t add(const std::uint8_t* key, std::int32_t parent, std::uint32_t space, std::uint32_t depth);
    void adopt(std::int32_t slot, std::int32_t parent, std::uint32_t depth);
    void orphan(std::int32_t slot);
    void remove(std::int32_t slot);
    bool in_use(std::int32_t slot) const { return slot >= 0 && slot < fresh_ && spaces[slot] != kFree; }
    std::int32_t top() const { return fresh_; }
    std::size_t count() const { return static_cast<std::size_t>(fresh_) - free_.size(); }
    std::size_t table_bytes() const { return table_.bytes(); }
    const IndexMemory& memory() const { return memory_; }
    // What readers are told: which namespace has this number (null: none any more), and what bits they may answer for.
    void name(std::uint32_t space, const std::uint8_t* name);
    void set_readable(std::uint8_t bits) { publish(memory_.header().readable, std::uint64_t{bits}); }

    Entered enter(std::uint32_t space, int tier, const std::vector<Recovered>& blocks);

    // Uses, given parents first: parents end up hotter than their children.
    void note(const std::int32_t* slots, std::size_t count, std::uint32_t ticks);
    void know(std::uint32_t space, const std::vector<std::int64_t>& sizes);  // of a block, by tier and kind
    void set_kind(std::int32_t slot, std::uint8_t kind);
    bool pin(std::int32_t slot, int tier);    // true if it is the first pin of that copy
    bool unpin(std::int32_t slot, int tier);  // true if it was the last

    void use(int tier, std::int32_t slot);
    void use_if_known(int tier, std::int32_t slot);
    void take(int tier, std::int32_t slot);
    void set_aside(int tier, std::int32_t slot);
    void return_cold(int tier, std::int32_t slot);
    void reconsider_all(int tier);
    TierColumns* tier(int number) const { return number >= 0 && number <= kIndexTiers ? tiers_[number].get() : nullptr; }
    TierColumns& need(int number) const;

private:
    IndexMemory memory_;

public:
    Column<Key> keys;
    Column<std::int32_t> parent, children;
    Column<std::uint32_t> spaces, last_use;
    Column<std::uint8_t> residency, codec;
    Column<std::uint16_t> depth, hits;

private:
    std::uint32_t tag_of(std::uint32_t space, const std::uint8_t* key) const { return kv::tag_of(memory_.header().seeds, space, key); }
    std::int64_t size_of(std::int32_t slot, int tier) const;

    std::unique_ptr<TierColumns> tiers_[kIndexTiers + 1];
    std::vector<int> numbers_;
    SlotTable table_;
    std::vector<std::int32_t> free_;
    std::vector<std::int64_t> sizes_;  // by namespace, tier and kind
    std::int32_t fresh_ = 0;
};

}  // namespace kv
